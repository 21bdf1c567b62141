"""Numbers of command lines.

The law of this module: what is no number is in no range. click's own ranges compare, and nan is
neither below nor above anything.
"""

from __future__ import annotations

from typing import Any

import click

__all__ = ["Range"]


class Range(click.FloatRange):
    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        found = float(super().convert(value, param, ctx))
        if found != found:
            self.fail(f"{value} is not a number", param, ctx)
        return found

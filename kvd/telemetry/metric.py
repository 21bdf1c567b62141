"""What a declared metric is.

The law of this module: one dimension at most, and all values of it are named where it is declared.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

__all__ = ["Metric", "MetricKind"]


class MetricKind(StrEnum):
    COUNTER = "counter"  # only rises, from 0 at the daemon's start
    GAUGE = "gauge"


class Metric(NamedTuple):
    """`label` is the one dimension it may have ("" for none), `values` all its values. `tenant`:
    kept per namespace; the total is the sum over namespaces."""

    name: str
    kind: MetricKind
    unit: str
    help: str
    label: str = ""
    values: tuple[str, ...] = ()
    tenant: bool = False

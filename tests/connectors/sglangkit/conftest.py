"""The fixtures of `sglang_kit`, whose helpers the tests import by that name."""

from __future__ import annotations

from sglang_kit import daemon, make, model

__all__ = ["daemon", "make", "model"]

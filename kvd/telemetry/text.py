"""Metrics as Prometheus' text format, version 0.0.4.

The law of this module: whatever a tenant is called, it ends no line and no label.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvd.telemetry.exported import Series

__all__ = ["CONTENT_TYPE", "exposition"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_HELP = str.maketrans({"\\": r"\\", "\n": r"\n"})
_VALUE = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


def exposition(series: Iterable[Series]) -> Iterator[str]:
    """Lines, with their ends. A metric without points is left out."""
    for metric, points in series:
        if not points:
            continue
        name = metric.prometheus_name
        yield f"# HELP {name} {metric.help.translate(_HELP)}\n"
        yield f"# TYPE {name} {metric.kind.value}\n"
        for labels, value in points:
            told = ",".join(
                f'{label}="{text.translate(_VALUE)}"'
                for label, text in zip(metric.labels, labels, strict=True)
            )
            yield f"{name}{{{told}}} {value}\n" if told else f"{name} {value}\n"

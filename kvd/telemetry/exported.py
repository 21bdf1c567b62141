"""What is exported: every declared metric, under its name for exporters, with a stat's values.

The law of this module: a name, unit or label that was exported once stays what it is. The points
are those of one `stat`, as an administrator sees it: nothing is counted here, and what is kept by
tenant has no point without its tenant.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from kvd.telemetry.metric import Metric, MetricKind
from kvd.telemetry.sections import SECTIONS
from kvd.telemetry.server import SERVER_METRICS
from kvd.telemetry.table import METRICS

__all__ = ["EXPORTED", "Exported", "Point", "Series", "series"]

TENANT = "tenant"
_UNITS = {"bytes": "By", "s": "s", "": "1"}  # as UCUM has them


class Exported(NamedTuple):
    """One metric as exporters name it."""

    name: str  # of the table
    kind: MetricKind
    unit: str  # UCUM
    help: str
    labels: tuple[str, ...]

    @property
    def otlp_name(self) -> str:
        return f"kvd.{self.name}"

    @property
    def prometheus_name(self) -> str:
        unit = {"By": "_bytes", "s": "_seconds"}.get(self.unit, "")
        if unit and "bytes" in self.name.split("_"):
            unit = ""  # it stands there already
        return f"kvd_{self.name}{unit}" + ("_total" if self.kind is MetricKind.COUNTER else "")


class Point(NamedTuple):
    labels: tuple[str, ...]  # values, in the order of the metric's labels
    value: int | float


class Series(NamedTuple):
    metric: Exported
    points: list[Point]


def _unit(unit: str) -> str:
    one = unit[:-3] + "y" if unit.endswith("ies") else unit.removesuffix("s")
    return _UNITS.get(unit, f"{{{one}}}")


def _declared(metric: Metric) -> Exported:
    labels = ((TENANT,) if metric.tenant else ()) + ((metric.label,) if metric.values else ())
    return Exported(metric.name, metric.kind, _unit(metric.unit), metric.help, labels)


_COUNTED = {m.name: _declared(m) for m in (*METRICS.values(), *SERVER_METRICS.values())}
_SHOWN = {
    m.name: Exported(m.name, m.kind, _unit(m.unit), m.help, section.labels)
    for section in SECTIONS
    for m in section.metrics
}
EXPORTED: dict[str, Exported] = {**_COUNTED, **_SHOWN}
assert len(EXPORTED) == len(_COUNTED) + len(_SHOWN), "a name is declared twice"


def series(stat: Mapping[str, Any]) -> Iterator[Series]:
    """All metrics with their points, of an administrator's `stat`."""
    for metric in _COUNTED.values():
        if metric.labels[:1] == (TENANT,):
            yield Series(
                metric,
                [
                    Point((tenant, *point.labels), point.value)
                    for tenant, row in stat["tenants"].items()
                    for point in _points(row["counters"], metric.name)
                ],
            )
        else:
            yield Series(metric, _points(stat["counters"], metric.name))
    for section in SECTIONS:
        rows = list(section.rows(stat))
        for shown in section.metrics:
            yield Series(
                _SHOWN[shown.name],
                [
                    Point(row.labels, value)
                    for row in rows
                    if (value := row.values.get(shown.key)) is not None
                ],
            )


def _points(counters: Mapping[str, Any], name: str) -> list[Point]:
    value = counters.get(name)
    if isinstance(value, Mapping):
        return [Point((label,), count) for label, count in value.items()]
    return [] if value is None else [Point((), value)]

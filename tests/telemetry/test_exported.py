"""The names of exported metrics, and the page that lists them."""

from __future__ import annotations

import re
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvd.telemetry import METRICS
from kvd.telemetry.exported import EXPORTED, Point, Series
from kvd.telemetry.sections import SECTIONS
from kvd.telemetry.server import SERVER_METRICS

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "telemetry.md"


def test_every_declared_metric_is_exported_under_a_name_of_its_own() -> None:
    declared = [*METRICS, *SERVER_METRICS, *(m.name for s in SECTIONS for m in s.metrics)]
    assert list(EXPORTED) == declared
    for names in (
        [m.otlp_name for m in EXPORTED.values()],
        [m.prometheus_name for m in EXPORTED.values()],
    ):
        assert len(set(names)) == len(declared)
    for metric in EXPORTED.values():
        assert re.fullmatch(r"kvd\.[a-z][a-z0-9_]*", metric.otlp_name)
        assert re.fullmatch(r"kvd_[a-z][a-z0-9_]*", metric.prometheus_name)
        assert re.fullmatch(r"By|s|1|\{[a-z]+\}", metric.unit), metric
        assert metric.help


@given(st.lists(st.tuples(st.sampled_from(sorted(EXPORTED)), st.integers(0, 40)), max_size=6))
def test_however_many_points_each_goes_out_once_in_requests_of_bounded_size(
    told: list[tuple[str, int]],
) -> None:
    """Requests of at most ten points here; 8,192 otherwise."""
    otlp = pytest.importorskip("kvd.server.otlp")
    series = []
    for name, count in told:
        labels = ["x"] * len(EXPORTED[name].labels)
        series.append(Series(EXPORTED[name], [Point(tuple(labels), n) for n in range(count)]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(otlp, "POINTS", 10)
        patch.setattr(otlp, "pause", lambda: None)
        requests = list(otlp.requests(series, {"service.name": "kvd"}, 1, 2))
    found: dict[str, list[int]] = {}
    for request in requests:
        (resource,) = request.resource_metrics
        metrics = resource.scope_metrics[0].metrics
        points = [(m.name, p) for m in metrics for p in (*m.sum.data_points, *m.gauge.data_points)]
        assert 0 < len(points) <= 10
        assert resource.resource.attributes[0].value.string_value == "kvd"
        for name, point in points:
            found.setdefault(name, []).append(point.as_int)
    wanted: dict[str, list[int]] = {}
    for name, count in told:
        if count:
            wanted.setdefault(f"kvd.{name}", []).extend(range(count))
    assert found == wanted


def page_rows() -> list[str]:
    """The table of docs/telemetry.md, as it has to be."""
    rows = []
    for m in EXPORTED.values():
        labels = ", ".join(f"`{label}`" for label in m.labels)
        rows.append(f"| `{m.otlp_name}` | {m.kind.value} | `{m.unit}` | {labels} | {m.help} |")
    return rows


def test_the_page_lists_what_is_exported() -> None:
    """`python tests/telemetry/test_exported.py` writes the table anew."""
    table = PAGE.read_text().partition("| --- | --- | --- | --- | --- |")[2]
    rows = [line for line in table.splitlines() if line.startswith("| `kvd.")]
    assert rows == page_rows()


if __name__ == "__main__":
    lines = PAGE.read_text().splitlines()
    first = lines.index("| --- | --- | --- | --- | --- |")
    rest = [line for line in lines[first + 1 :] if not line.startswith("| `kvd.")]
    PAGE.write_text("\n".join([*lines[: first + 1], *page_rows(), *rest]) + "\n")

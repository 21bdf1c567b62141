"""Telemetry: every metric, declared once.

The law of this package: a name that is not in the table can't be counted.
"""

from kvd.telemetry.table import METRICS, Metric, MetricKind, metric

__all__ = ["METRICS", "Metric", "MetricKind", "metric"]

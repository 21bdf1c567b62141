"""Telemetry: every metric, declared once.

The law of this package: a name that is not in the table can't be counted.
"""

from kvd.telemetry.metric import Metric, MetricKind
from kvd.telemetry.table import METRICS, metric

__all__ = ["METRICS", "Metric", "MetricKind", "metric"]

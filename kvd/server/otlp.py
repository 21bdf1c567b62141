"""Metrics as OTLP over gRPC: to the one endpoint that is configured, and to nobody else.

The law of this module: one call for each request, with a deadline, and no retries. Counters are
told as they are since the start, so whatever is lost stands in the next export. A call that failed
takes its channel with it: the next one begins anew, with nothing left of a peer that died.

Needs the extra `otel`; nothing else in kvd imports these packages.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

# gRPC's core writes to stderr past all loggers; what fails is told by the exporter, once.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import grpc
from opentelemetry.proto.collector.metrics.v1 import (
    metrics_service_pb2 as service,
)
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2_grpc import (
    MetricsServiceStub,
)
from opentelemetry.proto.metrics.v1.metrics_pb2 import (
    AGGREGATION_TEMPORALITY_CUMULATIVE,
    Metric,
)

from kvd import __version__
from kvd.server.figures import pause
from kvd.telemetry.exported import Exported, Point, Series
from kvd.telemetry.metric import MetricKind

__all__ = ["Otlp", "OtlpTarget", "requests"]

POINTS = 8192  # of one request: 1 MB, a quarter of what a collector takes
YIELD = 128  # points between which other threads may run
MOST_TOLD = 300  # characters of an error


class OtlpTarget(NamedTuple):
    """`address`: HOST:PORT. `tls`: None for none, else certificates (PEM) of those who may vouch
    for the server, empty for the system's. `headers`: sent with each call."""

    address: str
    tls: bytes | None
    headers: tuple[tuple[str, str], ...]
    resource: Mapping[str, str]


class Otlp:
    """One endpoint. `send` is for one thread; `cancel` for any."""

    def __init__(self, target: OtlpTarget) -> None:
        self.target = target
        self._channel: grpc.Channel | None = None
        self._call: grpc.Future | None = None
        self._cancelled = False

    def send(
        self, series: Iterable[Series], begun_unix_ns: int, now_unix_ns: int, timeout_s: float
    ) -> str:
        """Why not all of it was taken; empty if it was. Returns within the timeout, about."""
        end = time.monotonic() + timeout_s
        for request in requests(series, self.target.resource, begun_unix_ns, now_unix_ns):
            left = max(0.0, end - time.monotonic())
            answer, error = self.call(MetricsServiceStub, request, left)
            if answer is not None and answer.partial_success.rejected_data_points:
                refused = answer.partial_success
                error = f"{refused.rejected_data_points} points refused: {refused.error_message}"
            if error:
                return _told(error)
        return ""

    def call(self, stub: type, request: Any, timeout_s: float) -> tuple[Any, str]:
        """What the collector answered, or why it did not."""
        if self._channel is None:
            self._channel = self._open(timeout_s)
        export = stub(self._channel).Export
        self._call = export.future(request, timeout_s, metadata=self.target.headers)
        try:
            if self._cancelled:
                self._call.cancel()
            return self._call.result(), ""
        except grpc.RpcError as error:
            self.close()
            return None, _told(f"{error.code().name}: {error.details()}")
        except grpc.FutureCancelledError:
            self.close()
            return None, "CANCELLED: the daemon stops"
        finally:
            self._call = None

    def _open(self, timeout_s: float) -> grpc.Channel:
        address, tls = self.target.address, self.target.tls
        options = [
            ("grpc.enable_http_proxy", 0),  # the endpoint, and nobody on the way
            ("grpc.use_local_subchannel_pool", 1),  # nothing is kept of an earlier channel
            # a peer that takes the connection and is mute: 20 s otherwise, beyond the call's end
            ("grpc.min_reconnect_backoff_ms", int(timeout_s * 1000)),
            ("grpc.primary_user_agent", f"kvd/{__version__}"),
        ]
        if tls is None:
            return grpc.insecure_channel(address, options)
        return grpc.secure_channel(address, grpc.ssl_channel_credentials(tls or None), options)

    def cancel(self) -> None:
        """Let what is under way end now, and all that comes."""
        self._cancelled = True
        call = self._call
        if call is not None:
            call.cancel()

    def close(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()


def _told(text: str) -> str:
    return " ".join(text.split())[:MOST_TOLD]


def requests(
    series: Iterable[Series], resource: Mapping[str, str], begun_unix_ns: int, now_unix_ns: int
) -> Iterator[service.ExportMetricsServiceRequest]:
    """The metrics in requests of at most so many points; each is made when it is asked for."""
    request, metrics, room = _empty(resource)
    added = 0  # since others could run
    for metric, points in series:
        at = 0
        while at < len(points):
            if not room:
                yield request
                request, metrics, room = _empty(resource)
            part = points[at : at + min(room, YIELD)]
            if added + len(part) > YIELD:
                pause()
                added = 0
            if not at or room == POINTS:
                told = _metric(metrics.add(), metric)
            _add(told, metric, part, begun_unix_ns, now_unix_ns)
            added += len(part)
            at += len(part)
            room -= len(part)
    if room < POINTS:
        yield request


def _metric(told: Metric, metric: Exported) -> Any:
    """Its points go into what is returned."""
    told.name, told.unit, told.description = metric.otlp_name, metric.unit, metric.help
    if metric.kind is MetricKind.GAUGE:
        return told.gauge.data_points
    told.sum.is_monotonic = True
    told.sum.aggregation_temporality = AGGREGATION_TEMPORALITY_CUMULATIVE
    return told.sum.data_points


def _add(
    told: Any, metric: Exported, points: Sequence[Point], begun_unix_ns: int, now_unix_ns: int
) -> None:
    start = begun_unix_ns if metric.kind is MetricKind.COUNTER else 0
    for point in points:
        row = told.add(start_time_unix_nano=start, time_unix_nano=now_unix_ns)
        if isinstance(point.value, int):
            row.as_int = point.value
        else:
            row.as_double = point.value
        for name, value in zip(metric.labels, point.labels, strict=True):
            row.attributes.add(key=name).value.string_value = value


def _empty(resource: Mapping[str, str]) -> tuple[service.ExportMetricsServiceRequest, Any, int]:
    """A request, its list of metrics, and how many points fit."""
    request = service.ExportMetricsServiceRequest()
    told = request.resource_metrics.add()
    for name, value in resource.items():
        told.resource.attributes.add(key=name).value.string_value = value
    scope = told.scope_metrics.add()
    scope.scope.name, scope.scope.version = "kvd", __version__
    return request, scope.metrics, POINTS

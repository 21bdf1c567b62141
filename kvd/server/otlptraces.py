"""Spans as OTLP, beside the metrics of kvd.server.otlp.

The law of this module: as there. A span's place in time is that of its request's arrival and
answer, by this machine's clock of day; its id is by chance.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence

from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as service
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import TraceServiceStub
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from kvd import __version__
from kvd.server.figures import pause
from kvd.server.otlp import YIELD, Otlp
from kvd.server.spans import Ended

__all__ = ["OtlpTraces", "encoded"]


class OtlpTraces(Otlp):
    """One endpoint. `send_spans` is for one thread; `cancel` for any."""

    def send_spans(self, spans: Sequence[Ended], timeout_s: float) -> str:
        """Why not all of them were taken; empty if they were. Returns within the timeout, about."""
        answer, error = self.call(TraceServiceStub, encoded(spans, self.target.resource), timeout_s)
        if answer is not None and answer.partial_success.rejected_spans:
            error = f"{answer.partial_success.rejected_spans} spans refused"
        return error


def encoded(
    spans: Sequence[Ended], resource: Mapping[str, str]
) -> service.ExportTraceServiceRequest:
    offset = time.time_ns() - time.monotonic_ns()
    request = service.ExportTraceServiceRequest()
    told = request.resource_spans.add()
    for name, value in resource.items():
        told.resource.attributes.add(key=name).value.string_value = value
    scope = told.scope_spans.add()
    scope.scope.name, scope.scope.version = "kvd", __version__
    for at, ended in enumerate(spans):
        span = scope.spans.add(
            trace_id=ended.trace_id,
            span_id=os.urandom(8),
            parent_span_id=ended.parent,
            name=ended.name,
            kind=Span.SPAN_KIND_SERVER,
            start_time_unix_nano=ended.begun_ns + offset,
            end_time_unix_nano=ended.ended_ns + offset,
        )
        span.attributes.add(key="tenant").value.string_value = ended.tenant
        span.attributes.add(key="session").value.int_value = ended.session
        if ended.error:
            span.attributes.add(key="error.type").value.string_value = ended.error
            span.status.code = Status.STATUS_CODE_ERROR
        if at % YIELD == 0:
            pause()
    return request

"""The collector that the configuration names: what is sent there beside the metrics.

The law of this module: what can be refused is refused at the start, the packages and files that are
needed; whether the collector is there is not: a cache does not wait for who watches it.
"""

from __future__ import annotations

import importlib.util
import re
import socket
from typing import NamedTuple

from kvd import __version__
from kvd.errors import ConfigError
from kvd.server.config import Config
from kvd.server.exporter import Exporter
from kvd.server.files import open_file
from kvd.server.spans import Spans

__all__ = ["ExportPlan", "open_export", "open_spans", "plan_export"]

_NEEDED = ("grpc", "opentelemetry.proto.collector.metrics.v1")
_NAME = re.compile(r"[a-z0-9_.-]+")
_VALUE = re.compile(r"[\x20-\x7e]+")


class ExportPlan(NamedTuple):
    """`tls` is None without TLS, empty for the system's authorities."""

    address: str
    tls: bytes | None
    headers: tuple[tuple[str, str], ...]
    resource: dict[str, str]


def plan_export(config: Config) -> ExportPlan | None:
    """What is to be exported to, None for nothing. ConfigError if it can't be."""
    if not config.otlp_endpoint:
        return None
    if not all(_installed(name) for name in _NEEDED):
        raise ConfigError(
            f"telemetry.otlp_endpoint = {config.otlp_endpoint!r}: needs packages that are not "
            "installed: pip install 'kvd[otel]'"
        )
    scheme, _, address = config.otlp_endpoint.partition("://")
    tls = None
    if scheme == "https":
        tls = b"" if config.otlp_ca_file is None else _read("otlp_ca_file", config.otlp_ca_file)
    headers: tuple[tuple[str, str], ...] = ()
    if config.otlp_headers_file is not None:
        headers = _headers(config.otlp_headers_file)
    return ExportPlan(address, tls, headers, _resource(config))


def open_export(config: Config, plan: ExportPlan | None) -> Exporter | None:
    """The exporter, running."""
    if plan is None:
        return None
    from kvd.server.otlp import Otlp, OtlpTarget

    return Exporter(
        Otlp(OtlpTarget(*plan)),
        config.otlp_endpoint,
        config.telemetry_timeout_s,
    )


def open_spans(config: Config, plan: ExportPlan | None) -> Spans | None:
    """What sends spans, running, if they are wanted."""
    if plan is None or not config.traces:
        return None
    from kvd.server.otlp import OtlpTarget
    from kvd.server.otlptraces import OtlpTraces

    return Spans(OtlpTraces(OtlpTarget(*plan)), config.telemetry_timeout_s)


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # a package above it
        return False


def _read(key: str, path: str) -> bytes:
    try:
        with open_file(path) as file:
            return file.read(1 << 20)
    except OSError as error:
        raise ConfigError(f"telemetry.{key}: {path}: {error.strerror}") from None


def _headers(path: str) -> tuple[tuple[str, str], ...]:
    """Lines NAME: VALUE. No value is shown: it may be a secret."""
    found = []
    for number, line in enumerate(_read("otlp_headers_file", path).splitlines(), 1):
        text = line.decode("utf-8", "replace").strip()
        if not text or text.startswith("#"):
            continue
        name, colon, value = (part.strip() for part in text.partition(":"))
        name = name.lower()
        bad = name.startswith("grpc-") or name.endswith("-bin")
        if not colon or bad or not _NAME.fullmatch(name) or not _VALUE.fullmatch(value):
            raise ConfigError(
                f"telemetry.otlp_headers_file: {path}, line {number}: write NAME: VALUE, in "
                "printable ASCII"
            )
        found.append((name, value))
    return tuple(found)


def _resource(config: Config) -> dict[str, str]:
    host = socket.gethostname()
    given = dict(item.split("=", 1) for item in config.telemetry_attributes)
    return {
        "host.name": host,
        "service.instance.id": f"{host}/{config.instance}",
        **given,
        "service.name": "kvd",
        "service.version": __version__,
    }

"""The configuration: read once, checked whole, never changed while the daemon runs.

The law of this module: a value that can't be used stops the start with the setting, where the value
came from, and the way out. Reading order: flag, then environment, then file, then default; the
origin of each value is kept and shown by `kvd --check`.
"""

from __future__ import annotations

import grp
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from kvd.arena import Wish
from kvd.errors import ConfigError
from kvd.server.settings import SETTINGS, NamespaceRule, Setting, find_setting
from kvd.server.shown import without_password
from kvd.server.sources import CONFIG_ENV, from_environment, from_file
from kvd.server.tenantrules import Tenant
from kvd.wire.paths import default_socket

__all__ = ["Config", "load_config"]


@dataclass(frozen=True, slots=True)
class Config:
    """What the daemon runs with. Sizes in bytes, times in seconds (fields named `_s`)."""

    socket: str
    instance: str
    log_level: str
    drain_s: float
    workers: int
    stuck_s: float
    gc_freeze: bool
    arena_path: str
    arena_any_fs: bool
    arena_size: int
    slab_size: int | None
    huge_pages: Wish
    max_sessions: int
    max_specs: int
    max_inflight: int
    lease_s: float
    lease_max_s: float
    write_s: float
    write_max_s: float
    write_share: float
    lease_share: float
    pin_share: float
    pin_total_share: float
    pin_max_s: float
    eviction_policy: str
    eviction_keep_s: float
    watermarks: tuple[float, float]
    transient_share: float
    room_wait_s: float
    retry_s: float
    installation: str | None
    hbm_device: str
    hbm_limit: int
    hbm_write: str
    hbm_read_s: float
    hbm_write_s: float
    hbm_scrub: int
    hbm_reserve: int
    hbm_workers: int
    nvme_path: str | None
    nvme_limit: int
    nvme_write: str
    nvme_read_s: float
    nvme_write_s: float
    nvme_scrub: int
    nvme_slab_size: int | None
    nvme_engine: str
    nvme_reserve: int
    nvme_preallocate: bool
    nvme_workers: int
    redis_url: str
    redis_limit: int
    redis_write: str
    redis_read_s: float
    redis_write_s: float
    redis_scrub: int
    redis_password_file: str | None
    redis_prefix: str
    redis_ttl_s: float
    redis_workers: int
    s3_bucket: str
    s3_limit: int
    s3_write: str
    s3_read_s: float
    s3_write_s: float
    s3_scrub: int
    s3_endpoint: str
    s3_region: str
    s3_addressing: str
    s3_verify_tls: bool | str
    s3_profile: str
    s3_credentials_file: str | None
    s3_prefix: str
    s3_ttl_s: float
    s3_workers: int
    directory_url: str
    directory_password_file: str | None
    directory_prefix: str
    directory_ttl_s: float
    directory_wait_s: float
    trace_record: str | None
    trace_limit: int
    otlp_endpoint: str
    otlp_headers_file: str | None
    otlp_ca_file: str | None
    telemetry_interval_s: float
    telemetry_timeout_s: float
    telemetry_attributes: tuple[str, ...]
    prometheus: str | None
    traces: bool
    namespaces: tuple[NamespaceRule, ...]
    tenants: tuple[Tenant, ...]
    isolation: bool
    public_writers: tuple[str, ...]
    tenants_file: str | None
    tenant_metrics: int
    admin_uids: tuple[int, ...]
    admin_group: str
    tcp_endpoint: str | None
    tcp_secret_key_file: str | None
    tcp_clients_file: str | None
    tcp_heartbeat_s: float
    file: str | None = None  # the configuration file
    origins: Mapping[str, str] = field(default_factory=dict)  # dotted name -> where from

    @property
    def arena_base(self) -> str:
        """Path of the arena's files without their endings."""
        return os.path.join(self.arena_path, f"kvd-{os.getuid()}-{self.instance}")

    @property
    def policy_file(self) -> str:
        """Path of what the policies know."""
        return self.arena_base + ".policy"

    @property
    def admin_gid(self) -> int | None:
        return _group_id(self.admin_group)


def load_config(
    *,
    flags: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
    file: str | None = None,
) -> Config:
    """The configuration from flags (dotted name -> text), environment and TOML file.

    ConfigError with one line if anything in it can't be used.
    """
    environ = os.environ if environ is None else environ
    raw: dict[str, object] = {}
    origins: dict[str, str] = {}

    def take(source: Iterator[tuple[Setting, object, str]]) -> None:
        for setting, value, origin in source:
            raw[setting.name] = value
            origins[setting.name] = origin

    take((setting, setting.default, "default") for setting in SETTINGS)
    file = file or environ.get(CONFIG_ENV) or None
    if file is not None:
        take(from_file(file))
    take(from_environment(environ))
    for name, value in (flags or {}).items():
        setting = find_setting(name)
        assert setting is not None, name
        take(iter([(setting, value, f"flag {setting.flag}")]))

    values: dict[str, Any] = {}
    for setting in SETTINGS:
        try:
            values[setting.field] = setting.parse(raw[setting.name])
        except ValueError as refused:
            raise _refusal(setting, raw[setting.name], origins[setting.name], refused) from None
    if values["socket"] is None:
        values["socket"] = default_socket()
    config = Config(**values, file=file, origins=origins)
    _check_together(config)
    return config


def _refusal(setting: Setting, value: object, origin: str, why: object) -> ConfigError:
    shown = repr(value)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return ConfigError(f"{setting.name} = {shown} ({origin}): {why}")


def _check_together(config: Config) -> None:
    def refuse(name: str, why: str) -> ConfigError:
        setting = find_setting(name)
        assert setting is not None, name
        shown = without_password(str(value := getattr(config, setting.field)))
        return _refusal(
            setting, shown if isinstance(value, str) else value, config.origins[name], why
        )

    if config.lease_s > config.lease_max_s:
        raise refuse("limits.lease_s", f"longer than limits.lease_max_s = {config.lease_max_s:g}")
    if config.write_s > config.write_max_s:
        raise refuse("limits.write_s", f"longer than limits.write_max_s = {config.write_max_s:g}")
    if config.slab_size is not None and config.slab_size > config.arena_size // 16:
        most = config.arena_size // 16
        raise refuse(
            "arena.slab_size",
            f"more than 1/16 of arena.size, {most} bytes; lower it or raise arena.size",
        )
    if config.watermarks[0] < config.watermarks[1]:
        raise refuse("tiers.watermarks", "the high one is below the low one")
    if config.directory_url and not config.s3_bucket:
        raise refuse("directory.url", "needs tiers.s3.bucket: it tells who has what in that bucket")
    for name, value in (
        ("telemetry.otlp_headers_file", config.otlp_headers_file),
        ("telemetry.otlp_ca_file", config.otlp_ca_file),
    ):
        if value is not None and not config.otlp_endpoint:
            raise refuse(name, "of no use without telemetry.otlp_endpoint; give that, too")
    if config.traces and not config.otlp_endpoint:
        raise refuse("telemetry.traces", "needs telemetry.otlp_endpoint: spans go there")
    if config.otlp_ca_file is not None and not config.otlp_endpoint.startswith("https://"):
        raise refuse("telemetry.otlp_ca_file", "telemetry.otlp_endpoint is not https://")
    if config.admin_group and _group_id(config.admin_group) is None:
        raise refuse("admin.group", "no such group; give the name or number of one that exists")
    if config.tcp_endpoint is not None:
        for name, value in (
            ("tcp.secret_key_file", config.tcp_secret_key_file),
            ("tcp.clients_file", config.tcp_clients_file),
        ):
            if value is None:
                raise refuse(name, "needed with tcp.endpoint: TCP is served with CURVE only")


def _group_id(group: str) -> int | None:
    if not group:
        return None
    try:
        return int(group) if group.isdecimal() else grp.getgrnam(group).gr_gid
    except (KeyError, OverflowError):
        return None


assert {setting.field for setting in SETTINGS} == {f.name for f in fields(Config)} - {
    "file",
    "origins",
}

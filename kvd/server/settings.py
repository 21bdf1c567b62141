"""The declared table of settings: name, kind, default, help. Everything else derives from it.

The law of this module: a setting exists in all its forms or in none. Its key in kvd.toml, its flag
and its environment variable come from one row; so do its check, its default and its line in
`kvd --check`. A parser takes the raw value (typed from TOML, text from a flag or the environment)
and returns the value that the daemon uses, or raises ValueError saying what would be accepted.
"""

from __future__ import annotations

from typing import NamedTuple

from kvd.arena import WISHES
from kvd.server.parsers import (
    NamespaceRule,
    Parser,
    address,
    attributes,
    boolean,
    boolean_or_path,
    choice,
    collector,
    count,
    endpoint,
    fractions,
    group,
    identifiers,
    installation,
    instance,
    maybe_path,
    names,
    namespaces,
    number,
    path,
    size,
    tenants,
    text,
)

__all__ = ["SETTINGS", "NamespaceRule", "Setting", "find_setting"]


class Setting(NamedTuple):
    section: str
    key: str
    field: str  # attribute of Config
    default: object  # raw, as it would stand in the file
    parse: Parser
    metavar: str
    help: str

    @property
    def name(self) -> str:
        return f"{self.section}.{self.key}" if self.key else self.section

    @property
    def flag(self) -> str:
        return "--" + "-".join(self._words).replace("_", "-")

    @property
    def env(self) -> str:
        return "KVD_" + "_".join(self._words).upper()

    @property
    def _words(self) -> list[str]:
        words = [] if self.section == "daemon" else [self.section.removeprefix("tiers.")]
        return [*words, self.key] if self.key else words


# -- the table ----------------------------------------------------------------------------------

DAY = 86_400.0
WRITE = choice("on-demote", "through", "on-second-hit")


def _tier(section: str, field: str, limit: str, write: str, read_s: float) -> tuple[Setting, ...]:
    """What all tiers below have."""
    return (
        Setting(section, "limit", f"{field}_limit", limit, size(2**20, 2**50), "SIZE",
                "bytes that the tier may take at most"),
        Setting(section, "write", f"{field}_write", write, WRITE, "WHEN",
                "when chunks are written there: on-demote (as they leave DRAM), through (as soon "
                "as they are sealed), on-second-hit"),
        Setting(section, "read_s", f"{field}_read_s", read_s, number(0.01, 600, "seconds"),
                "SECONDS", "a read that takes longer is a miss"),
        Setting(section, "write_s", f"{field}_write_s", 2 * read_s, number(0.01, 600, "seconds"),
                "SECONDS", "a write that takes longer has failed"),
        Setting(section, "scrub", f"{field}_scrub", "0", size(0, 2**40), "SIZE",
                "bytes a second that are read in the background to see whether they hold; 0: off"),
    )  # fmt: skip


SETTINGS: tuple[Setting, ...] = (
    Setting("daemon", "socket", "socket", "", maybe_path, "PATH",
            "unix socket of the control plane; 107 bytes at most (default: the user's runtime "
            "directory, /run/kvd for a service)"),
    Setting("daemon", "instance", "instance", "default", instance, "NAME",
            "name of this daemon; part of the arena's file name, told to clients"),
    Setting("daemon", "log_level", "log_level", "info",
            choice("debug", "info", "warning", "error"), "LEVEL", "what is logged to stderr"),
    Setting("daemon", "drain_s", "drain_s", 5, number(0, 3600, "seconds"), "SECONDS",
            "how long SIGTERM lets loads finish"),
    Setting("daemon", "workers", "workers", 2, count(1, 64), "N",
            "threads that verify, seal and copy payloads"),
    Setting("daemon", "stuck_s", "stuck_s", 10, number(0.1, DAY, "seconds"), "SECONDS",
            "a worker that takes longer for one transfer is reported and replaced"),
    Setting("daemon", "gc_freeze", "gc_freeze", True, boolean, "BOOL",
            "exempt what exists after start from garbage collection"),
    Setting("arena", "path", "arena_path", "/dev/shm", path, "DIR",
            "directory on a tmpfs that holds the arena's files"),
    Setting("arena", "any_file_system", "arena_any_fs", False, boolean, "BOOL",
            "let arena.path be on a disk too: slow, for trials only"),
    Setting("arena", "size", "arena_size", "1GiB", size(2 * 2**20, 2**46), "SIZE",
            "bytes of shared memory for payloads, rounded down to whole slabs"),
    Setting("arena", "slab_size", "slab_size", "auto", size(2**16, 2**42, auto=True), "SIZE",
            "bytes of one slab, and so of the largest chunk; auto: 1/32 of the arena; 1/16 at "
            "most"),
    Setting("arena", "huge_pages", "huge_pages", "prefer", choice(*WISHES), "WISH",
            "whether the arena lies in pages of 2 MiB; require: no start without; what is left of "
            "it below 2 MiB lies in small ones in any case"),
    Setting("limits", "sessions", "max_sessions", 1024, count(1, 65_536), "N",
            "clients at a time"),
    Setting("limits", "specs", "max_specs", 1024, count(1, 65_536), "N",
            "registered KVSpecs at a time"),
    Setting("limits", "inflight", "max_inflight", 256, count(1, 900), "N",
            "requests in flight of one session"),
    Setting("limits", "lease_s", "lease_s", 30, number(0.1, 600, "seconds"), "SECONDS",
            "a lease's life when the client names none"),
    Setting("limits", "lease_max_s", "lease_max_s", 600, number(0.1, DAY, "seconds"), "SECONDS",
            "the longest life of a lease"),
    Setting("limits", "write_s", "write_s", 30, number(0.1, 600, "seconds"), "SECONDS",
            "time to finish a write when the client names none"),
    Setting("limits", "write_max_s", "write_max_s", 600, number(0.1, DAY, "seconds"), "SECONDS",
            "the longest time to finish a write"),
    Setting("limits", "write_share", "write_share", 0.25, number(0.001, 1, "of the arena"), "SHARE",
            "most of the arena that unfinished writes of one session may hold"),
    Setting("limits", "lease_share", "lease_share", 0.5, number(0.001, 1, "of the arena"), "SHARE",
            "most of the arena that leases of one session may hold"),
    Setting("limits", "pin_share", "pin_share", 0.1, number(0, 1, "of the arena"), "SHARE",
            "most of the arena that hints of one tenant may pin or spare"),
    Setting("limits", "pin_total_share", "pin_total_share", 0.5, number(0, 1, "of the arena"),
            "SHARE", "most of the arena that hints of all tenants may pin or spare"),
    Setting("limits", "pin_max_s", "pin_max_s", 3600, number(0, DAY, "seconds"), "SECONDS",
            "how long a hint holds at most"),
    Setting("eviction", "policy", "eviction_policy", "default", text, "NAME",
            "which chunks go first when a tier is full: default, a policy of docs/eviction.md, or "
            "package.module.Class; options follow a colon: crf:half_life_s=300"),
    Setting("eviction", "keep_s", "eviction_keep_s", 300, number(0, DAY, "seconds"), "SECONDS",
            "how often what the policies know is kept for a restart; 0: only when it is stopped"),
    Setting("tiers", "watermarks", "watermarks", [0.97, 0.95], fractions(2), "HIGH,LOW",
            "with a tier below: above HIGH of its slots DRAM is demoted, down to LOW"),
    Setting("tiers", "transient_share", "transient_share", 0.1, number(0, 0.5, "of the arena"),
            "SHARE", "most of the arena that first hits from tiers below may hold"),
    Setting("tiers", "room_wait_s", "room_wait_s", 0.05, number(0, 60, "seconds"), "SECONDS",
            "how long a store that finds DRAM full waits for demotions before chunks are dropped; "
            "after a wait in vain none waits before a demotion is done"),
    Setting("tiers", "retry_s", "retry_s", 30, number(0.01, DAY, "seconds"), "SECONDS",
            "a tier that fails is tried again after a second, then after ever longer, but never "
            "later than this"),
    Setting("tiers", "installation", "installation", "auto", installation, "NAME",
            "whose objects these are in shared media: equal for all lives of one daemon, different "
            "for any two (auto: host name, uid and instance)"),
    Setting("tiers.hbm", "device", "hbm_device", "", text, "DEVICE",
            "cuda:N, whose memory is a tier (cpu: host memory, for trials); empty: off"),
    *_tier("tiers.hbm", "hbm", "4GiB", "on-second-hit", 2),
    Setting("tiers.hbm", "reserve", "hbm_reserve", "512MiB", size(0, 2**50), "SIZE",
            "bytes of the device that are left free for the engines"),
    Setting("tiers.hbm", "workers", "hbm_workers", 2, count(1, 64), "N", "copies at a time"),
    Setting("tiers.nvme", "path", "nvme_path", "", maybe_path, "DIR",
            "a directory of its own for the NVMe tier; empty: off"),
    *_tier("tiers.nvme", "nvme", "16GiB", "on-demote", 5),
    Setting("tiers.nvme", "slab_size", "nvme_slab_size", "auto", size(2**16, 2**40, auto=True),
            "SIZE", "bytes of one slab file; auto: 1/32 of the limit, from 1 MiB to 1 GiB"),
    Setting("tiers.nvme", "engine", "nvme_engine", "auto",
            choice("auto", "cufile", "kvikio", "o_direct", "buffered"), "NAME",
            "how bytes are moved; auto: the best that works on this directory"),
    Setting("tiers.nvme", "reserve", "nvme_reserve", "1GiB", size(0, 2**50), "SIZE",
            "bytes of the file system that are left free"),
    Setting("tiers.nvme", "preallocate", "nvme_preallocate", True, boolean, "BOOL",
            "take a slab's bytes from the file system when it is made"),
    Setting("tiers.nvme", "workers", "nvme_workers", 4, count(1, 64), "N",
            "reads and writes at a time"),
    Setting("tiers.redis", "url", "redis_url", "", text, "URL",
            "redis://, rediss:// or unix://; empty: off"),
    *_tier("tiers.redis", "redis", "256MiB", "on-second-hit", 2),
    Setting("tiers.redis", "password_file", "redis_password_file", "", maybe_path, "PATH",
            "file with the password"),
    Setting("tiers.redis", "prefix", "redis_prefix", "kvd", text, "TEXT", "of all keys"),
    Setting("tiers.redis", "ttl_s", "redis_ttl_s", 0, number(0, 366 * DAY, "seconds"), "SECONDS",
            "chunks expire after this; 0: never"),
    Setting("tiers.redis", "workers", "redis_workers", 4, count(1, 64), "N",
            "requests at a time"),
    Setting("tiers.s3", "bucket", "s3_bucket", "", text, "NAME",
            "the bucket of the S3 tier; empty: off"),
    *_tier("tiers.s3", "s3", "1TiB", "on-demote", 20),
    Setting("tiers.s3", "endpoint", "s3_endpoint", "", text, "URL",
            "of the service; empty: AWS"),
    Setting("tiers.s3", "region", "s3_region", "", text, "NAME", "of the bucket"),
    Setting("tiers.s3", "addressing", "s3_addressing", "auto",
            choice("auto", "path", "virtual"), "STYLE", "how the bucket is named in requests"),
    Setting("tiers.s3", "verify_tls", "s3_verify_tls", True, boolean_or_path, "BOOL|PATH",
            "verify the service's certificate; a path: with these authorities"),
    Setting("tiers.s3", "profile", "s3_profile", "", text, "NAME", "of AWS' own configuration"),
    Setting("tiers.s3", "credentials_file", "s3_credentials_file", "", maybe_path, "PATH",
            "in the format of AWS' own tools"),
    Setting("tiers.s3", "prefix", "s3_prefix", "kvd", text, "TEXT", "of all objects"),
    Setting("tiers.s3", "ttl_s", "s3_ttl_s", 0, number(0, 3660 * DAY, "seconds"), "SECONDS",
            "objects are deleted after this; 0: only when the limit is reached"),
    Setting("tiers.s3", "workers", "s3_workers", 16, count(1, 256), "N", "requests at a time"),
    Setting("directory", "url", "directory_url", "", text, "URL",
            "redis://, rediss:// or unix://: a directory that the daemons of one bucket share, who "
            "has which chunk there; empty: off"),
    Setting("directory", "password_file", "directory_password_file", "", maybe_path, "PATH",
            "file with its password"),
    Setting("directory", "prefix", "directory_prefix", "kvd", text, "TEXT",
            "of all its keys: equal for all daemons that share it"),
    Setting("directory", "ttl_s", "directory_ttl_s", DAY, number(1, 366 * DAY, "seconds"),
            "SECONDS",
            "an entry ends this long after the chunk was last stored or used by anybody"),
    Setting("directory", "wait_s", "directory_wait_s", 0.1, number(0.001, 10, "seconds"), "SECONDS",
            "how long a lookup waits for it at most; then what is not known here is a miss"),
    Setting("trace", "record", "trace_record", "", maybe_path, "PATH",
            "record requests here for kvd-cli simulate: times, lengths and keyed hashes of blocks, "
            "no tokens; empty: off"),
    Setting("trace", "limit", "trace_limit", "256MiB", size(2**16, 2**40), "SIZE",
            "bytes of the record, PATH and PATH.1 together"),
    Setting("telemetry", "otlp_endpoint", "otlp_endpoint", "", collector, "URL",
            "http://HOST:PORT (https:// with TLS) of an OpenTelemetry collector's gRPC receiver, "
            "which gets the metrics of docs/telemetry.md; empty: off"),
    Setting("telemetry", "otlp_headers_file", "otlp_headers_file", "", maybe_path, "PATH",
            "file with a line NAME: VALUE for each header that goes with an export, for example "
            "an authorization"),
    Setting("telemetry", "otlp_ca_file", "otlp_ca_file", "", maybe_path, "PATH",
            "certificates (PEM) of who may vouch for an https:// endpoint; empty: the system's"),
    Setting("telemetry", "interval_s", "telemetry_interval_s", 15, number(0.1, 3600, "seconds"),
            "SECONDS", "between exports"),
    Setting("telemetry", "timeout_s", "telemetry_timeout_s", 10, number(0.1, 600, "seconds"),
            "SECONDS", "an export that takes longer has failed"),
    Setting("telemetry", "traces", "traces", False, boolean, "BOOL",
            "send a span to that collector for each request whose client calls its trace sampled"),
    Setting("telemetry", "attributes", "telemetry_attributes", [], attributes, "NAME=VALUE,...",
            "of the resource that exports speak of, beside service.name = kvd, "
            "service.instance.id, service.version and host.name"),
    Setting("telemetry", "prometheus", "prometheus", "", address, "ADDRESS:PORT",
            "serve metrics at http://ADDRESS:PORT/metrics for Prometheus; who can reach it may "
            "read them, names of tenants too; empty: off"),
    Setting("namespaces", "", "namespaces", [], namespaces, "RULES",
            "who belongs to which namespace: name=NAME,uids=1001+1002,gids=100,token_file=PATH;… "
            "(the daemon's own uid and root: `default`)"),
    Setting("tenants", "", "tenants", {}, tenants, "JSON",
            "what each tenant may have, and who it is (docs/tenants.md): the tables [tenants.NAME] "
            "and [tenants.NAME.TIER], as JSON"),
    Setting("tenancy", "isolation", "isolation", True, boolean, "BOOL",
            "each tenant has a share of each tier; off: one pool, where the coldest goes"),
    Setting("tenancy", "public_writers", "public_writers", [], names, "NAMES",
            "namespaces whose members may write in the namespace `public`"),
    Setting("tenancy", "state_file", "tenants_file", "", maybe_path, "PATH",
            "where tenants stand that `kvd-cli tenant` adds (default: tenants.json in the "
            "service's state directory, else CONFIG.tenants.json, else kvd/tenants.json where the "
            "user's state is; tenants-NAME.json for another instance)"),
    Setting("tenancy", "metrics", "tenant_metrics", 64, count(0, 4096), "N",
            "tenants that `stat` and metrics tell apart; all further ones are `other` together"),
    Setting("admin", "uids", "admin_uids", [], identifiers, "UIDS",
            "uids with the admin role beside the daemon's own and root"),
    Setting("admin", "group", "admin_group", "", group, "GROUP",
            "a group, by name or number, whose members have the admin role"),
    Setting("tcp", "endpoint", "tcp_endpoint", "", endpoint, "tcp://ADDRESS:PORT",
            "serve inline clients over TCP too, with CURVE; empty: off"),
    Setting("tcp", "secret_key_file", "tcp_secret_key_file", "", maybe_path, "PATH",
            "file with the daemon's CURVE secret key (Z85, 40 characters)"),
    Setting("tcp", "clients_file", "tcp_clients_file", "", maybe_path, "PATH",
            "file with a line PUBLIC_KEY NAMESPACE for each client that may connect"),
    Setting("tcp", "heartbeat_s", "tcp_heartbeat_s", 2, number(0.05, 600, "seconds"), "SECONDS",
            "interval of ZMTP heartbeats; a peer that misses three is dead"),
)  # fmt: skip

_BY_NAME = {setting.name: setting for setting in SETTINGS}


def find_setting(name: str) -> Setting | None:
    """The setting with this dotted name, or None."""
    return _BY_NAME.get(name)

"""What a client can ask, one NamedTuple an operation.

The law of this module: fields stand in the order of the core's events (less session and request),
so that the server builds an event by `Event(session, request, *message)`; what is wrong in type,
size or range never gets that far (kvd.wire.requested). Durations are nanoseconds; there is no time
of a clock.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from kvd.wire import codec as c
from kvd.wire.limits import DEFAULT_LIMITS, Limits
from kvd.wire.ops import Op

LEVELS = ("namespaces", "specs", "prefixes", "chunks")


class Hello(NamedTuple):
    """First message of a session. Over ipc the header carries the token that attach gave."""

    client_name: str
    features: tuple[str, ...]
    clock_ns: int  # the client's CLOCK_MONOTONIC
    expected_instance: str | None  # answered WRONG_INSTANCE if it is another
    group_secret: bytes | None  # tcp only; over ipc attach carried it
    token: bytes | None  # tcp only: the content of a namespace's token file
    namespace: str | None = None  # tcp only, from 1.4: `public`, for who may write there


class RegisterSpec(NamedTuple):
    spec: bytes  # KVSpec.encode()


class Reserve(NamedTuple):
    spec: bytes
    kind: int
    shards: tuple[int, ...]
    hashes: bytes
    parent: bytes
    index0: int
    fingerprints: bytes
    tokens: bytes | None
    pos0: bytes | None
    flags: int
    ttl: int


class Put(NamedTuple):
    """A reserve, its bytes (one payload frame a result, chunk-major) and its commit in one."""

    spec: bytes
    kind: int
    shards: tuple[int, ...]
    hashes: bytes
    parent: bytes
    index0: int
    fingerprints: bytes
    tokens: bytes | None
    pos0: bytes | None
    flags: int
    ttl: int


class Commit(NamedTuple):
    write: int
    items: bytes | None
    digests: bytes | None


class Abort(NamedTuple):
    write: int
    items: bytes | None


class Lookup(NamedTuple):
    spec: bytes
    kind: int
    shards: tuple[int, ...]
    hashes: bytes
    fingerprints: bytes | None
    flags: int  # LookupFlag
    lease_ns: int
    parent: bytes
    index0: int
    ttl: int


class Load(NamedTuple):
    lease: int
    items: bytes | None
    shards: tuple[int, ...] | None


class Prefetch(NamedTuple):
    """From 1.3: a hint that these chunks will be asked for within `within` ns."""

    spec: bytes
    kind: int
    shards: tuple[int, ...]
    hashes: bytes
    within: int


class Wait(NamedTuple):
    transfer: int
    after: int
    timeout_ns: int  # the answer comes at the latest then


class Cancel(NamedTuple):
    transfer: int


class Renew(NamedTuple):
    lease: int
    lease_ns: int


class Release(NamedTuple):
    lease: int


class Selector(NamedTuple):
    """Which chunks; the same fields as the core's. On the wire a map with what is given only."""

    namespace: str | None = None
    spec: bytes | None = None
    kind: int | None = None
    keys: tuple[bytes, ...] = ()
    key_prefix: bytes | None = None
    subtree: bytes | None = None
    idle_ns: int | None = None
    state: str | None = None
    tier: str | None = None
    everything: bool = False


class Evict(NamedTuple):
    selector: Selector
    dry_run: bool
    cursor: int
    limit: int


class List(NamedTuple):
    level: str
    selector: Selector
    cursor: int
    limit: int


class Stat(NamedTuple):
    pass


class Tier(NamedTuple):
    """From 1.1; for administrators. `command`: probe, drain or scrub."""

    tier: str
    command: str


class Hint(NamedTuple):
    """From 1.2. `hint`: HintKind. `level`: of a priority, 0 low, 1 normal, 2 high; else 0.
    `within_ns`: how long it holds, or until when reuse is expected."""

    spec: bytes
    kind: int
    hashes: bytes
    hint: int
    level: int
    within_ns: int


class Tenant(NamedTuple):
    """From 1.4. `list` and `show` tell a session about its own tenant, administrators about all;
    the other commands are theirs. `name`: empty for `list`. `settings`: a map as in the
    configuration, and `token`, `keep`; for `list` the name `after` which it goes on."""

    command: str  # list, show, add, set, rotate or remove
    name: str
    settings: dict[str, Any]


class Heartbeat(NamedTuple):
    pass


class Get(NamedTuple):
    """An inline load: one payload frame for each OK result."""

    spec: bytes
    kind: int
    shards: tuple[int, ...]
    hashes: bytes
    fingerprints: bytes | None
    flags: int  # GetFlag


class Bye(NamedTuple):
    """The session ends; its leases and unfinished writes with it."""


Request = (
    Hello
    | RegisterSpec
    | Reserve
    | Commit
    | Abort
    | Lookup
    | Load
    | Prefetch
    | Wait
    | Cancel
    | Renew
    | Release
    | Evict
    | List
    | Stat
    | Tier
    | Hint
    | Tenant
    | Heartbeat
    | Put
    | Get
    | Bye
)

OP_OF: dict[type, Op] = {
    Hello: Op.HELLO,
    RegisterSpec: Op.REGISTER_SPEC,
    Reserve: Op.RESERVE,
    Commit: Op.COMMIT,
    Abort: Op.ABORT,
    Lookup: Op.LOOKUP,
    Load: Op.LOAD,
    Prefetch: Op.PREFETCH,
    Wait: Op.WAIT,
    Cancel: Op.CANCEL,
    Renew: Op.RENEW,
    Release: Op.RELEASE,
    Evict: Op.EVICT,
    List: Op.LIST,
    Stat: Op.STAT,
    Tier: Op.TIER,
    Hint: Op.HINT,
    Tenant: Op.TENANT,
    Heartbeat: Op.HEARTBEAT,
    Put: Op.PUT,
    Get: Op.GET,
    Bye: Op.BYE,
}


TIER_COMMANDS = ("probe", "drain", "scrub")
TENANT_COMMANDS = ("list", "show", "add", "set", "rotate", "remove")


def selector_to_wire(selector: Selector) -> dict[str, Any]:
    """Only the conditions that are given."""
    given = {k: v for k, v in selector._asdict().items() if v is not None}
    if not selector.keys:
        del given["keys"]
    if not selector.everything:
        del given["everything"]
    return given


def encode_request(message: Request, limits: Limits = DEFAULT_LIMITS) -> bytes:
    """The body. LimitExceeded if it is too long to be sent."""
    if isinstance(message, (Evict, List)):
        values: tuple[Any, ...] = tuple(
            selector_to_wire(v) if isinstance(v, Selector) else v for v in message
        )
        return c.pack(values, limits.body)
    if isinstance(message, Hello) and message.namespace is None:
        return c.pack(message[:-1], limits.body)  # as 1.0 says it
    return c.pack(message, limits.body)

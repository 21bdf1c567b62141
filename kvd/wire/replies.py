"""What the daemon answers, one NamedTuple a shape of answer.

The law of this module: fields stand in the order of the core's results, so that the server sends
`encode_reply(result)` as it got it; and a client believes no answer whose sizes do not fit
together: one outcome byte a result, one reference for each result that has one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from kvd.chunk import Outcome
from kvd.errors import Busy, ErrorCode, KvdError, ProtocolError, error_from_wire
from kvd.wire import codec as c
from kvd.wire.limits import DEFAULT_LIMITS, Limits, limits_from_wire
from kvd.wire.ops import Op
from kvd.wire.versions import MAX_FEATURE_BYTES, MAX_FEATURES

MAX_MESSAGE = 4096  # bytes of an error's text

_LOOKUP_FIELDS = 7
_GRANTED = bytes([Outcome.GRANTED])
_OK = bytes([Outcome.OK])


class HelloReply(NamedTuple):
    instance: str
    version: str  # of the daemon's package
    features: tuple[str, ...]
    clock_ns: int  # the daemon's CLOCK_MONOTONIC
    limits: Limits
    namespace: str
    admin: bool
    lease_default_ns: int
    session: bytes  # the token that every later request carries


class SpecReply(NamedTuple):
    digest: bytes


class ReserveReply(NamedTuple):
    write: int
    outcomes: bytes
    refs: bytes
    deadline: int


class OutcomesReply(NamedTuple):
    """Commit, abort, put, and get (there with a payload frame for each OK)."""

    outcomes: bytes


class LoadReply(NamedTuple):
    transfer: int
    outcomes: bytes
    refs: bytes
    done: bool


class LookupReply(NamedTuple):
    outcomes: bytes
    leading: int
    lease: int
    expiry: int
    load: LoadReply | None
    reserved: ReserveReply | None
    tiers: bytes = b""  # from 1.1: by key, 0 DRAM, n the n-th tier below; empty: all in DRAM


class WaitReply(NamedTuple):
    items: bytes
    outcomes: bytes
    refs: bytes
    known: int
    done: bool


class LeaseReply(NamedTuple):
    expiry: int
    chunks: int


class EvictReply(NamedTuple):
    matched: int
    evicted: int
    leased: int
    writing: int
    bytes: int
    named: list[dict[str, Any]]
    cursor: int | None


class ListReply(NamedTuple):
    rows: list[dict[str, Any]]
    cursor: int | None


class StatReply(NamedTuple):
    stat: dict[str, Any]


class TierReply(NamedTuple):
    """`detail` is for people. `chunks`: how many a drain will write, or a scrub will read."""

    ok: bool
    detail: str
    chunks: int


class HintReply(NamedTuple):
    """Chunks: taken, not there, over a cap. `within_ns`: how long the hint holds."""

    taken: int
    absent: int
    over: int
    within_ns: int


class TenantReply(NamedTuple):
    """`rows`: one a tenant. `token`: told once, after `add` with a token, and `rotate`."""

    rows: list[dict[str, Any]]
    token: str | None


class DoneReply(NamedTuple):
    pass


Reply = (
    HelloReply
    | SpecReply
    | ReserveReply
    | OutcomesReply
    | LookupReply
    | LoadReply
    | WaitReply
    | LeaseReply
    | EvictReply
    | ListReply
    | StatReply
    | TierReply
    | HintReply
    | TenantReply
    | DoneReply
)


def encode_reply(result: tuple[Any, ...], limits: Limits = DEFAULT_LIMITS) -> bytes:
    """The body of an answer: a reply of this module, or the core's result of the same shape."""
    if isinstance(result, HelloReply):
        result = result._replace(limits=result.limits.to_wire())  # type: ignore[arg-type]
    elif len(result) == _LOOKUP_FIELDS and not result[-1] and hasattr(result, "tiers"):
        result = result[:-1]  # nothing to say: as 1.0 says it
    return c.pack(result, limits.body)


def encode_error(code: int, message: str, retry_ns: int = 0) -> bytes:
    """The body of an error; goes with FrameFlag.REPLY | FrameFlag.ERROR. `retry_ns`: from 1.4, only
    with BUSY."""
    clean = message.encode("utf-8", "replace")[:MAX_MESSAGE].decode("utf-8", "ignore")
    return c.pack((int(code), clean, retry_ns) if retry_ns else (int(code), clean))


def error_body(error: BaseException) -> bytes:
    """The body for a caught exception. What is not a KvdError is told by its type alone: its text
    may hold what the peer must not see."""
    if isinstance(error, KvdError):
        retry_s = error.retry_after_s if isinstance(error, Busy) else 0.0
        return encode_error(error.code, str(error), int(retry_s * 1e9))
    return encode_error(ErrorCode.INTERNAL, f"unexpected {type(error).__name__} in the daemon")


def decode_error(body: bytes) -> KvdError:
    """The typed error that an error reply stands for."""
    found = c.unpack(body)
    f = c.fields(found, 2, "error", True)
    code, message = c.uint(f[0], "code", c.U32), c.text(f[1], "message", MAX_MESSAGE)
    if code == ErrorCode.BUSY:
        return Busy(message, c.uint(found[2], "retry_ns") / 1e9 if len(found) > 2 else 0.0)
    return error_from_wire(code, message)


def decode_reply(op: int, body: bytes, *, newer: bool = False) -> Reply:
    """The answer to operation `op`. ProtocolError if it does not hold together."""
    entry = _DECODERS.get(op)
    if entry is None:
        raise ProtocolError(f"operation {op} is unknown to this version")
    name, count, decode = entry
    found = c.unpack(body, rows=True)
    if op == Op.LOOKUP and len(found) == count - 1:
        found.append(b"")
    return decode(c.fields(found, count, name, newer), newer)


# -- one decoder a shape --------------------------------------------------------------------------


def _outcomes(value: Any) -> bytes:
    if type(value) is bytes:
        return value
    raise c.wrong("outcomes", "bytes", value)


def _hello(f: list[Any], newer: bool) -> HelloReply:
    return HelloReply(
        c.text(f[0], "instance", 1024),
        c.text(f[1], "version", 256),
        c.names(f[2], "features", MAX_FEATURES, MAX_FEATURE_BYTES),
        c.uint(f[3], "clock_ns"),
        limits_from_wire(f[4]),
        c.text(f[5], "namespace", 1024),
        c.boolean(f[6], "admin"),
        c.uint(f[7], "lease_default_ns"),
        c.exactly(f[8], "session", 16),
    )


def _spec(f: list[Any], newer: bool) -> SpecReply:
    return SpecReply(c.exactly(f[0], "digest", c.HASH_BYTES))


def _reserve(f: list[Any], newer: bool) -> ReserveReply:
    outcomes = _outcomes(f[1])
    return ReserveReply(
        c.uint(f[0], "write"),
        outcomes,
        c.refs(f[2], outcomes.count(_GRANTED)),
        c.uint(f[3], "deadline"),
    )


def _outcomes_only(f: list[Any], newer: bool) -> OutcomesReply:
    return OutcomesReply(_outcomes(f[0]))


def _load(f: list[Any], newer: bool) -> LoadReply:
    outcomes = _outcomes(f[1])
    return LoadReply(
        c.uint(f[0], "transfer"),
        outcomes,
        c.refs(f[2], outcomes.count(_OK)),
        c.boolean(f[3], "done"),
    )


def _lookup(f: list[Any], newer: bool) -> LookupReply:
    load: LoadReply | None = None
    reserved: ReserveReply | None = None
    if f[4] is not None:
        load = _load(_nested(f[4], 4, "load", newer), newer)
    if f[5] is not None:
        reserved = _reserve(_nested(f[5], 4, "reserved", newer), newer)
    outcomes = _outcomes(f[0])
    leading = c.uint(f[1], "leading", len(outcomes) + 1)
    tiers = _outcomes(f[6])
    if tiers and len(tiers) != len(outcomes):
        raise ProtocolError(f"tiers: {len(tiers)} bytes for {len(outcomes)} outcomes")
    return LookupReply(
        outcomes, leading, c.uint(f[2], "lease"), c.uint(f[3], "expiry"), load, reserved, tiers
    )


def _nested(value: Any, count: int, name: str, newer: bool) -> list[Any]:
    if type(value) is not list:
        raise c.wrong(name, "an array", value)
    return c.fields(value, count, name, newer)


def _wait(f: list[Any], newer: bool) -> WaitReply:
    outcomes = _outcomes(f[1])
    return WaitReply(
        c.packed(f[0], "items", 4, len(outcomes)),
        outcomes,
        c.refs(f[2], outcomes.count(_OK)),
        c.uint(f[3], "known", c.U32),
        c.boolean(f[4], "done"),
    )


def _lease(f: list[Any], newer: bool) -> LeaseReply:
    return LeaseReply(c.uint(f[0], "expiry"), c.uint(f[1], "chunks"))


def _rows(value: Any, name: str) -> list[dict[str, Any]]:
    if type(value) is not list:
        raise c.wrong(name, "an array of maps", value)
    for row in value:
        if type(row) is not dict:
            raise c.wrong(name, "an array of maps", row)
        for key in row:
            if type(key) is not str:
                raise c.wrong(name, "maps with text keys", key)
        c.check_nesting(row, DEFAULT_LIMITS.nesting - 2, name)
    return value


def _cursor(value: Any) -> int | None:
    return None if value is None else c.uint(value, "cursor")


def _evict(f: list[Any], newer: bool) -> EvictReply:
    return EvictReply(
        c.uint(f[0], "matched"),
        c.uint(f[1], "evicted"),
        c.uint(f[2], "leased"),
        c.uint(f[3], "writing"),
        c.uint(f[4], "bytes"),
        _rows(f[5], "named"),
        _cursor(f[6]),
    )


def _list(f: list[Any], newer: bool) -> ListReply:
    return ListReply(_rows(f[0], "rows"), _cursor(f[1]))


def _stat(f: list[Any], newer: bool) -> StatReply:
    if type(f[0]) is not dict:
        raise c.wrong("stat", "a map", f[0])
    c.check_nesting(f[0], DEFAULT_LIMITS.nesting - 1, "stat")
    return StatReply(f[0])


def _tier(f: list[Any], newer: bool) -> TierReply:
    return TierReply(
        c.boolean(f[0], "ok"), c.text(f[1], "detail", MAX_MESSAGE), c.uint(f[2], "chunks")
    )


def _hint(f: list[Any], newer: bool) -> HintReply:
    return HintReply(
        c.uint(f[0], "taken"),
        c.uint(f[1], "absent"),
        c.uint(f[2], "over"),
        c.uint(f[3], "within_ns"),
    )


def _tenant(f: list[Any], newer: bool) -> TenantReply:
    return TenantReply(_rows(f[0], "rows"), c.optional_text(f[1], "token", MAX_MESSAGE))


def _done(f: list[Any], newer: bool) -> DoneReply:
    return DoneReply()


_DECODERS: dict[int, tuple[str, int, Callable[[list[Any], bool], Reply]]] = {
    Op.HELLO: ("hello", 9, _hello),
    Op.REGISTER_SPEC: ("register_spec", 1, _spec),
    Op.RESERVE: ("reserve", 4, _reserve),
    Op.COMMIT: ("commit", 1, _outcomes_only),
    Op.ABORT: ("abort", 1, _outcomes_only),
    Op.LOOKUP: ("lookup", _LOOKUP_FIELDS, _lookup),
    Op.LOAD: ("load", 4, _load),
    Op.WAIT: ("wait", 5, _wait),
    Op.CANCEL: ("cancel", 0, _done),
    Op.RENEW: ("renew", 2, _lease),
    Op.RELEASE: ("release", 2, _lease),
    Op.EVICT: ("evict", 7, _evict),
    Op.LIST: ("list", 2, _list),
    Op.STAT: ("stat", 1, _stat),
    Op.TIER: ("tier", 3, _tier),
    Op.HINT: ("hint", 4, _hint),
    Op.TENANT: ("tenant", 2, _tenant),
    Op.PREFETCH: ("prefetch", 1, _outcomes_only),
    Op.HEARTBEAT: ("heartbeat", 0, _done),
    Op.PUT: ("put", 1, _outcomes_only),
    Op.GET: ("get", 1, _outcomes_only),
    Op.BYE: ("bye", 0, _done),
}

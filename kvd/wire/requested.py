"""From the bytes of a request to its message: one decoder an operation.

The law of this module: a field that is wrong in type, size or range is refused by its name, before
anything is allocated for it; what a newer minor added behind the fields that are known is ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvd.errors import ProtocolError
from kvd.wire import codec as c
from kvd.wire.limits import DEFAULT_LIMITS, GROUP_BYTES, TOKEN_BYTES, Limits, over
from kvd.wire.ops import GetFlag, LookupFlag, Op
from kvd.wire.requests import (
    LEVELS,
    TENANT_COMMANDS,
    TIER_COMMANDS,
    Abort,
    Bye,
    Cancel,
    Commit,
    Evict,
    Get,
    Heartbeat,
    Hello,
    Hint,
    List,
    Load,
    Lookup,
    Prefetch,
    Put,
    RegisterSpec,
    Release,
    Renew,
    Request,
    Reserve,
    Selector,
    Stat,
    Tenant,
    Tier,
    Wait,
)
from kvd.wire.versions import MAX_FEATURE_BYTES, MAX_FEATURES

__all__ = ["decode_request"]

# plain integers: an IntFlag costs a microsecond each time
_LEASE = int(LookupFlag.LEASE)
_LOAD = int(LookupFlag.LOAD)
_RESERVE_MISSES = int(LookupFlag.RESERVE_MISSES)


def decode_request(
    op: int, body: bytes, limits: Limits = DEFAULT_LIMITS, *, newer: bool = False
) -> Request:
    """The message of operation `op`. `newer`: the sender's minor is newer than ours.

    ProtocolError on an unknown operation or a field of the wrong type, size or range;
    LimitExceeded on more than `limits` allow.
    """
    entry = _DECODERS.get(op)
    if entry is None:
        raise ProtocolError(f"operation {op} is unknown to this version")
    name, count, decode = entry
    found = c.unpack(body)
    if op == Op.HELLO and len(found) == count - 1:
        found.append(None)
    return decode(c.fields(found, count, name, newer), limits)


# -- one decoder an operation ---------------------------------------------------------------------


def _duration(value: Any, name: str, most: int) -> int:
    """Nanoseconds, at least 1, at most `most`."""
    number = c.uint(value, name)
    if number == 0:
        raise ProtocolError(f"{name}: must be longer than nothing")
    if number > most:
        raise over(f"{name} (ns)", number, most, "ask for less, and renew")
    return number


def _hello(f: list[Any], limits: Limits) -> Hello:
    return Hello(
        c.text(f[0], "client_name", limits.client_name),
        c.names(f[1], "features", MAX_FEATURES, MAX_FEATURE_BYTES),
        c.uint(f[2], "clock_ns"),
        c.optional_text(f[3], "expected_instance", limits.name),
        c.optional_blob(f[4], "group_secret", GROUP_BYTES),
        c.optional_blob(f[5], "token", TOKEN_BYTES),
        c.optional_text(f[6], "namespace", limits.name),
    )


def _register_spec(f: list[Any], limits: Limits) -> RegisterSpec:
    return RegisterSpec(c.blob(f[0], "spec", limits.spec))


def _write_fields(f: list[Any], limits: Limits) -> tuple[Any, ...]:
    packed_hashes, keys = c.hashes(f[3], limits)
    shards = c.shards(f[2], limits)
    c.results(keys, len(shards), limits)
    return (
        c.exactly(f[0], "spec", c.HASH_BYTES),
        c.kind(f[1]),
        shards,
        packed_hashes,
        c.exactly(f[4], "parent", c.HASH_BYTES),
        c.uint(f[5], "index0", c.U32),
        c.packed(f[6], "fingerprints", c.FINGERPRINT_BYTES, keys),
        c.optional_packed(f[7], "tokens", 4, keys),
        c.optional_packed(f[8], "pos0", 8, keys),
        c.uint(f[9], "flags", c.U32),
        _duration(f[10], "ttl", limits.ttl_max_ns),
    )


def _reserve(f: list[Any], limits: Limits) -> Reserve:
    return Reserve._make(_write_fields(f, limits))


def _put(f: list[Any], limits: Limits) -> Put:
    return Put._make(_write_fields(f, limits))


def _items(value: Any, limits: Limits) -> bytes | None:
    return None if value is None else c.several(value, "items", 4, limits.results)


def _commit(f: list[Any], limits: Limits) -> Commit:
    items = _items(f[1], limits)
    digests = f[2]
    if digests is not None:
        if items is None:
            digests = c.several(digests, "digests", c.DIGEST_BYTES, limits.results)
        else:
            digests = c.packed(digests, "digests", c.DIGEST_BYTES, len(items) // 4)
    return Commit(c.uint(f[0], "write"), items, digests)


def _abort(f: list[Any], limits: Limits) -> Abort:
    return Abort(c.uint(f[0], "write"), _items(f[1], limits))


def _lookup(f: list[Any], limits: Limits) -> Lookup:
    spec, kind, shards, hashes, fingerprints, flags, lease_ns, parent, index0, ttl = f
    packed_hashes, keys = c.hashes(hashes, limits)
    named = c.shards(shards, limits)
    c.results(keys, len(named), limits)
    if type(flags) is not int or not 0 <= flags <= 31:
        raise c.wrong("flags", "a sum of lookup flags", flags)
    if flags & _LEASE:
        _duration(lease_ns, "lease_ns", limits.lease_max_ns)
    elif flags & _LOAD:
        raise ProtocolError("flags: a lookup that loads has to lease")
    if flags & _RESERVE_MISSES:
        if fingerprints is None:
            raise ProtocolError("fingerprints: a lookup that reserves has to name them")
        _duration(ttl, "ttl", limits.ttl_max_ns)
    return Lookup(
        c.exactly(spec, "spec", c.HASH_BYTES),
        c.kind(kind),
        named,
        packed_hashes,
        c.optional_packed(fingerprints, "fingerprints", c.FINGERPRINT_BYTES, keys),
        flags,
        c.uint(lease_ns, "lease_ns"),
        c.exactly(parent, "parent", c.HASH_BYTES),
        c.uint(index0, "index0", c.U32),
        c.uint(ttl, "ttl"),
    )


def _load(f: list[Any], limits: Limits) -> Load:
    return Load(
        c.uint(f[0], "lease"),
        _items(f[1], limits),
        None if f[2] is None else c.shards(f[2], limits),
    )


def _prefetch(f: list[Any], limits: Limits) -> Prefetch:
    packed_hashes, keys = c.hashes(f[3], limits)
    shards = c.shards(f[2], limits)
    c.results(keys, len(shards), limits)
    return Prefetch(
        c.exactly(f[0], "spec", c.HASH_BYTES),
        c.kind(f[1]),
        shards,
        packed_hashes,
        _duration(f[4], "within", limits.lease_max_ns),
    )


def _wait(f: list[Any], limits: Limits) -> Wait:
    timeout_ns = c.uint(f[2], "timeout_ns")
    if timeout_ns > limits.wait_max_ns:
        raise over("timeout_ns", timeout_ns, limits.wait_max_ns, "wait again")
    return Wait(c.uint(f[0], "transfer"), c.uint(f[1], "after", c.U32), timeout_ns)


def _cancel(f: list[Any], limits: Limits) -> Cancel:
    return Cancel(c.uint(f[0], "transfer"))


def _renew(f: list[Any], limits: Limits) -> Renew:
    return Renew(c.uint(f[0], "lease"), _duration(f[1], "lease_ns", limits.lease_max_ns))


def _release(f: list[Any], limits: Limits) -> Release:
    return Release(c.uint(f[0], "lease"))


def _keys(value: Any, limits: Limits) -> tuple[bytes, ...]:
    if type(value) is not list:
        raise c.wrong("keys", "an array of hashes", value)
    if len(value) > limits.keys:
        raise over("keys a request", len(value), limits.keys, "split the request")
    return tuple(c.exactly(key, "keys", c.HASH_BYTES) for key in value)


def _key_prefix(value: Any, limits: Limits) -> bytes:
    return c.blob(value, "key_prefix", c.HASH_BYTES)


_CONDITIONS: dict[str, Callable[[Any, Limits], Any]] = {
    "namespace": lambda v, limits: c.text(v, "namespace", limits.name),
    "spec": lambda v, limits: c.exactly(v, "spec", c.HASH_BYTES),
    "kind": lambda v, limits: c.kind(v),
    "keys": _keys,
    "key_prefix": _key_prefix,
    "subtree": lambda v, limits: c.exactly(v, "subtree", c.HASH_BYTES),
    "idle_ns": lambda v, limits: c.uint(v, "idle_ns", 1 << 63),
    "state": lambda v, limits: c.text(v, "state", 32),
    "tier": lambda v, limits: c.text(v, "tier", 32),
    "everything": lambda v, limits: c.boolean(v, "everything"),
}


def _selector(value: Any, limits: Limits) -> Selector:
    """A condition that this version does not know is an error: leaving it out would select more
    than was meant."""
    if type(value) is not dict:
        raise c.wrong("selector", "a map", value)
    given: dict[str, Any] = {}
    for name, condition in value.items():
        check = _CONDITIONS.get(name) if type(name) is str else None
        if check is None:
            raise ProtocolError("selector: names a condition that this version does not know")
        given[name] = check(condition, limits)
    return Selector(**given)


def _evict(f: list[Any], limits: Limits) -> Evict:
    return Evict(
        _selector(f[0], limits),
        c.boolean(f[1], "dry_run"),
        c.uint(f[2], "cursor"),
        _page(f[3], limits),
    )


def _page(value: Any, limits: Limits) -> int:
    limit = c.uint(value, "limit")
    if limit == 0:
        raise ProtocolError("limit: must be at least 1")
    if limit > limits.list_rows:
        raise over("rows a page", limit, limits.list_rows, "ask for less, and follow the cursor")
    return limit


def _list(f: list[Any], limits: Limits) -> List:
    if type(f[0]) is not str or f[0] not in LEVELS:
        raise c.wrong("level", "one of " + ", ".join(LEVELS), f[0])
    return List(f[0], _selector(f[1], limits), c.uint(f[2], "cursor"), _page(f[3], limits))


def _stat(f: list[Any], limits: Limits) -> Stat:
    return Stat()


def _tier(f: list[Any], limits: Limits) -> Tier:
    command = c.text(f[1], "command", 64)
    if command not in TIER_COMMANDS:
        raise c.wrong("command", "one of " + ", ".join(TIER_COMMANDS), command)
    return Tier(c.text(f[0], "tier", 64), command)


def _hint(f: list[Any], limits: Limits) -> Hint:
    packed_hashes, _ = c.hashes(f[2], limits)
    return Hint(
        c.exactly(f[0], "spec", c.HASH_BYTES),
        c.kind(f[1]),
        packed_hashes,
        c.uint(f[3], "hint", 256),
        c.uint(f[4], "level", 256),
        c.uint(f[5], "within_ns", 1 << 63),
    )


def _tenant(f: list[Any], limits: Limits) -> Tenant:
    command = c.text(f[0], "command", 64)
    if command not in TENANT_COMMANDS:
        raise c.wrong("command", "one of " + ", ".join(TENANT_COMMANDS), command)
    settings = f[2]
    if type(settings) is not dict or any(type(key) is not str for key in settings):
        raise c.wrong("settings", "a map with text keys", settings)
    c.check_nesting(settings, 4, "settings")
    return Tenant(command, c.text(f[1], "name", limits.name), settings)


def _heartbeat(f: list[Any], limits: Limits) -> Heartbeat:
    return Heartbeat()


def _bye(f: list[Any], limits: Limits) -> Bye:
    return Bye()


def _get(f: list[Any], limits: Limits) -> Get:
    packed_hashes, keys = c.hashes(f[3], limits)
    shards = c.shards(f[2], limits)
    c.results(keys, len(shards), limits)
    flags = f[5]
    if type(flags) is not int or flags & ~int(GetFlag.EVERY | GetFlag.PUBLIC):
        raise c.wrong("flags", "a sum of get flags", flags)
    return Get(
        c.exactly(f[0], "spec", c.HASH_BYTES),
        c.kind(f[1]),
        shards,
        packed_hashes,
        c.optional_packed(f[4], "fingerprints", c.FINGERPRINT_BYTES, keys),
        flags,
    )


_DECODERS: dict[int, tuple[str, int, Callable[[list[Any], Limits], Request]]] = {
    Op.HELLO: ("hello", 7, _hello),
    Op.REGISTER_SPEC: ("register_spec", 1, _register_spec),
    Op.RESERVE: ("reserve", 11, _reserve),
    Op.COMMIT: ("commit", 3, _commit),
    Op.ABORT: ("abort", 2, _abort),
    Op.LOOKUP: ("lookup", 10, _lookup),
    Op.LOAD: ("load", 3, _load),
    Op.PREFETCH: ("prefetch", 5, _prefetch),
    Op.WAIT: ("wait", 3, _wait),
    Op.CANCEL: ("cancel", 1, _cancel),
    Op.RENEW: ("renew", 2, _renew),
    Op.RELEASE: ("release", 1, _release),
    Op.EVICT: ("evict", 4, _evict),
    Op.LIST: ("list", 4, _list),
    Op.STAT: ("stat", 0, _stat),
    Op.TIER: ("tier", 2, _tier),
    Op.HINT: ("hint", 6, _hint),
    Op.TENANT: ("tenant", 3, _tenant),
    Op.HEARTBEAT: ("heartbeat", 0, _heartbeat),
    Op.PUT: ("put", 11, _put),
    Op.GET: ("get", 6, _get),
    Op.BYE: ("bye", 0, _bye),
}

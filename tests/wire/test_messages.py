"""Messages: what goes in comes out, and what is not exactly right does not come in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgpack
import pytest
import wire_vectors as vectors

from kvd.chunk import Outcome
from kvd.core import actions, events
from kvd.errors import (
    ErrorCode,
    InternalError,
    KvdError,
    LeaseLost,
    LimitExceeded,
    ProtocolError,
    VersionError,
)
from kvd.wire import DEFAULT_LIMITS, MINOR, Limits, Op
from kvd.wire import messages as m
from kvd.wire.attach import (
    AttachRequest,
    decode_attach,
    decode_attach_reply,
    encode_attach,
    encode_attach_error,
)
from kvd.wire.limits import limits_from_wire

H = bytes(32)
LIMITS = DEFAULT_LIMITS


def lookup(**changes: Any) -> list[Any]:
    fields = vectors.REQUESTS["lookup"]._asdict() | changes  # type: ignore[union-attr]
    return list(fields.values())


def reserve(**changes: Any) -> list[Any]:
    fields = vectors.REQUESTS["reserve plain"]._asdict() | changes  # type: ignore[union-attr]
    return list(fields.values())


def decode(op: Op, body: list[Any], **more: Any) -> m.Request:
    return m.decode_request(op, msgpack.packb(body), **more)


@pytest.mark.parametrize(
    ("message", "event"),
    [
        (m.Reserve, events.Reserve),
        (m.Commit, events.Commit),
        (m.Abort, events.Abort),
        (m.Lookup, events.Lookup),
        (m.Load, events.Load),
        (m.Prefetch, events.Prefetch),
        (m.Cancel, events.Cancel),
        (m.Renew, events.Renew),
        (m.Release, events.Release),
        (m.Stat, events.Stat),
        (m.Tier, events.TierCommand),
        (m.Hint, events.Hint),
    ],
)
def test_a_request_has_the_fields_of_its_event_in_the_same_order(message: Any, event: Any) -> None:
    assert message._fields == event._fields[2:]
    assert m.Selector._fields == events.Selector._fields


@pytest.mark.parametrize(
    ("reply", "result"),
    [
        (m.SpecReply, actions.SpecResult),
        (m.ReserveReply, actions.ReserveResult),
        (m.OutcomesReply, actions.OutcomesResult),
        (m.LoadReply, actions.LoadResult),
        (m.LookupReply, actions.LookupResult),
        (m.WaitReply, actions.WaitResult),
        (m.LeaseReply, actions.LeaseResult),
        (m.EvictReply, actions.EvictResult),
        (m.ListReply, actions.ListResult),
        (m.StatReply, actions.StatResult),
        (m.TierReply, actions.TierResult),
        (m.HintReply, actions.HintResult),
        (m.DoneReply, actions.DoneResult),
    ],
)
def test_a_reply_has_the_fields_of_its_result_in_the_same_order(reply: Any, result: Any) -> None:
    assert reply._fields == result._fields


def test_every_operation_has_a_request_and_a_reply() -> None:
    assert set(m.OP_OF.values()) == set(Op)
    replies, requests = list(vectors.REPLIES.values()), list(vectors.REQUESTS.values())
    for asked, answered in vectors.ADDED.values():
        requests += asked.values()
        replies += answered.values()
    assert {op for op, _ in replies} == set(Op)
    assert {m.OP_OF[type(v)] for v in requests} == set(Op)


@pytest.mark.parametrize(
    ("op", "body", "error", "told"),
    [
        (Op.LOOKUP, lookup(spec=b"short"), ProtocolError, "spec: 32 bytes"),
        (Op.LOOKUP, lookup(spec=None), ProtocolError, "spec"),
        (Op.LOOKUP, lookup(kind=0), ProtocolError, "kind"),
        (Op.LOOKUP, lookup(kind=True), ProtocolError, "kind"),
        (Op.LOOKUP, lookup(shards=[]), ProtocolError, "shards"),
        (Op.LOOKUP, lookup(shards=[1, 1]), ProtocolError, "twice"),
        (Op.LOOKUP, lookup(shards=[-1]), ProtocolError, "shards"),
        (Op.LOOKUP, lookup(shards=[False]), ProtocolError, "shards"),
        (Op.LOOKUP, lookup(shards=[2**32]), ProtocolError, "shards"),
        (Op.LOOKUP, lookup(hashes=b""), ProtocolError, "hashes"),
        (Op.LOOKUP, lookup(hashes=bytes(33)), ProtocolError, "hashes"),
        (Op.LOOKUP, lookup(hashes="0" * 32), ProtocolError, "hashes"),
        (Op.LOOKUP, lookup(fingerprints=bytes(16)), ProtocolError, "fingerprints"),
        (Op.LOOKUP, lookup(flags=32), ProtocolError, "flags"),
        (Op.LOOKUP, lookup(flags=-1), ProtocolError, "flags"),
        (Op.LOOKUP, lookup(flags=2), ProtocolError, "has to lease"),
        (Op.LOOKUP, lookup(flags=5), ProtocolError, "fingerprints"),
        (Op.LOOKUP, lookup(lease_ns=0), ProtocolError, "lease_ns"),
        (Op.LOOKUP, lookup(lease_ns=1.5), ProtocolError, "lease_ns"),
        (Op.LOOKUP, lookup(lease_ns=2**63), LimitExceeded, "lease_ns"),
        (Op.LOOKUP, lookup(parent=bytes(31)), ProtocolError, "parent"),
        (Op.LOOKUP, lookup(index0=-1), ProtocolError, "index0"),
        (Op.LOOKUP, lookup()[:-1], ProtocolError, "10 fields are due, 9 came"),
        (Op.LOOKUP, [*lookup(), 1], ProtocolError, "10 fields are due, 11 came"),
        (Op.RESERVE, reserve(fingerprints=None), ProtocolError, "fingerprints"),
        (Op.RESERVE, reserve(tokens=bytes(4)), ProtocolError, "tokens"),
        (Op.RESERVE, reserve(pos0=bytes(8)), ProtocolError, "pos0"),
        (Op.RESERVE, reserve(ttl=0), ProtocolError, "ttl"),
        (Op.RESERVE, reserve(ttl=LIMITS.ttl_max_ns + 1), LimitExceeded, "ttl"),
        (Op.COMMIT, [1, bytes(3), None], ProtocolError, "items"),
        (Op.COMMIT, [1, bytes(4), bytes(17)], ProtocolError, "digests"),
        (Op.COMMIT, [1, None, bytes(17)], ProtocolError, "digests"),
        (Op.COMMIT, [-1, None, None], ProtocolError, "write"),
        (Op.COMMIT, [2**64 - 1, None], ProtocolError, "fields"),
        (Op.WAIT, [1, 0, LIMITS.wait_max_ns + 1], LimitExceeded, "timeout_ns"),
        (Op.RENEW, [1, 0], ProtocolError, "lease_ns"),
        (Op.RENEW, [1, LIMITS.lease_max_ns + 1], LimitExceeded, "lease_ns"),
        (Op.LIST, ["everything", {}, 0, 1], ProtocolError, "level"),
        (Op.LIST, ["chunks", [], 0, 1], ProtocolError, "selector"),
        (Op.LIST, ["chunks", {"colour": 1}, 0, 1], ProtocolError, "condition"),
        (Op.LIST, ["chunks", {b"spec": H}, 0, 1], ProtocolError, "condition"),
        (Op.LIST, ["chunks", {}, 0, 0], ProtocolError, "limit"),
        (Op.LIST, ["chunks", {}, 0, LIMITS.list_rows + 1], LimitExceeded, "rows"),
        (Op.EVICT, [{"everything": 1}, False, 0, 1], ProtocolError, "everything"),
        (Op.EVICT, [{"keys": [b"x"]}, False, 0, 1], ProtocolError, "keys"),
        (Op.EVICT, [{"key_prefix": bytes(33)}, False, 0, 1], LimitExceeded, "key_prefix"),
        (Op.EVICT, [{}, 1, 0, 1], ProtocolError, "dry_run"),
        (Op.STAT, [1], ProtocolError, "0 fields are due"),
        (Op.HELLO, ["x" * 257, [], 0, None, None, None], LimitExceeded, "client_name"),
        (Op.HELLO, ["é" * 129, [], 0, None, None, None], LimitExceeded, "client_name"),
        (Op.HELLO, ["x", ["f"] * 65, 0, None, None, None], LimitExceeded, "features"),
        (Op.HELLO, [b"x", [], 0, None, None, None], ProtocolError, "client_name"),
        (Op.REGISTER_SPEC, [bytes(65537)], LimitExceeded, "spec"),
        (Op.GET, [H, 1, [0], H, None, 1], ProtocolError, "flags"),
    ],
)
def test_a_field_that_is_wrong_is_named(
    op: Op, body: list[Any], error: type[KvdError], told: str
) -> None:
    """K03, K09"""
    with pytest.raises(error, match=told):
        decode(op, body)


@pytest.mark.parametrize("op", [0, 99, 255])
def test_an_unknown_operation_is_a_protocol_error(op: int) -> None:
    """K03"""
    with pytest.raises(ProtocolError, match=f"operation {op} is unknown"):
        m.decode_request(op, b"\x90")


def test_limits_hold_exactly() -> None:
    """K09: one at the limit passes, one more is refused and told the limit."""
    limits = LIMITS._replace(keys=8, results=12, shards=5)
    decode(Op.LOOKUP, lookup(hashes=bytes(32 * 8)), limits=limits)
    decode(Op.LOOKUP, lookup(hashes=bytes(32 * 3), shards=[0, 1, 2, 3]), limits=limits)
    for wrong, told in (
        ({"hashes": bytes(32 * 9)}, "keys a request: 9, at most 8"),
        ({"hashes": bytes(32 * 7), "shards": [0, 1]}, "results a request: 14, at most 12"),
        ({"shards": list(range(6))}, "shards a request: 6, at most 5"),
    ):
        with pytest.raises(LimitExceeded, match=told):
            decode(Op.LOOKUP, lookup(**wrong), limits=limits)


def test_a_hundred_thousand_keys_are_refused_before_they_are_sent_or_read() -> None:
    """K09"""
    many = m.Lookup(H, 1, (0,), bytes(32 * 100_000), None, 0, 0, H, 0, 0)
    with pytest.raises(LimitExceeded, match="bytes of a body"):
        m.encode_request(many)
    with pytest.raises(LimitExceeded, match="keys a request: 100000, at most 4096"):
        decode(Op.LOOKUP, list(many))


def test_fields_of_a_newer_minor_are_ignored_and_a_selector_it_does_not_know_is_not() -> None:
    """K04"""
    assert decode(Op.CANCEL, [7, {"why": "new"}], newer=True) == m.Cancel(7)
    with pytest.raises(ProtocolError, match="condition"):
        decode(Op.EVICT, [{"everything": True, "but": 1}, False, 0, 1], newer=True)
    deep: Any = 1
    for _ in range(40):
        deep = [deep]
    with pytest.raises(ProtocolError, match="nested"):
        decode(Op.CANCEL, [7, deep], newer=True)


def test_a_selector_travels_with_what_is_given_only() -> None:
    body = m.encode_request(m.List("chunks", m.Selector(kind=2, keys=(H,)), 0, 5))
    assert msgpack.unpackb(body) == ["chunks", {"kind": 2, "keys": [H]}, 0, 5]


def test_a_core_result_is_sent_as_it_is() -> None:
    result = actions.LookupResult(
        b"\x01", 1, 2, 3, actions.LoadResult(0, b"\x01", vectors.REF, True), None
    )
    reply = m.decode_reply(Op.LOOKUP, m.encode_reply(result))
    assert reply == m.LookupReply(
        b"\x01", 1, 2, 3, m.LoadReply(0, b"\x01", vectors.REF, True), None
    )


@pytest.mark.parametrize(
    ("op", "body"),
    [
        (Op.RESERVE, [1, b"\x03", b"", 0]),  # granted, no reference
        (Op.RESERVE, [1, b"\x04", vectors.REF, 0]),  # a reference for nothing
        (Op.LOAD, [0, b"\x01\x01", vectors.REF, True]),
        (Op.LOAD, [0, b"\x01", vectors.REF, 1]),
        (Op.WAIT, [b"\0\0\0\0", b"\x01\x01", vectors.REF * 2, 2, True]),
        (Op.LOOKUP, [b"\x01", 2, 0, 0, None, None]),  # more leading than keys
        (Op.LOOKUP, [b"\x01", 1, 0, 0, 5, None]),
        (Op.LIST, [[5], None]),
        (Op.LIST, [[{b"k": 5}], None]),
        (Op.STAT, [[]]),
        (Op.HELLO, ["i", "v", [], 0, {}, "n", True, 1, bytes(16)]),
        (Op.COMMIT, ["\x01"]),
    ],
)
def test_a_client_believes_no_answer_that_does_not_hold_together(op: Op, body: list[Any]) -> None:
    with pytest.raises(ProtocolError):
        m.decode_reply(op, msgpack.packb(body))


def test_errors_travel_as_types_and_an_unknown_one_is_still_an_error() -> None:
    assert type(m.decode_error(m.error_body(LeaseLost("gone")))) is LeaseLost
    assert type(m.decode_error(m.encode_error(99, "new"))) is KvdError
    found = m.decode_error(m.error_body(RuntimeError("secret")))
    assert isinstance(found, InternalError) and "secret" not in str(found)
    long = m.decode_error(m.encode_error(ErrorCode.LIMIT, "ü" * 9999))
    assert isinstance(long, LimitExceeded) and len(str(long)) == 2048
    assert str(m.decode_error(m.encode_error(2, "bad \ud800 text"))) == "bad ? text"


def test_limits_are_told_by_name_and_unknown_ones_are_left_alone() -> None:
    """K09"""
    told = LIMITS.to_wire()
    assert limits_from_wire(told | {"new_limit": 5}) == LIMITS
    assert set(told) == set(Limits._fields)
    for wrong in (told | {"keys": -1}, told | {"keys": "9"}, {}, [], None):
        with pytest.raises(ProtocolError):
            limits_from_wire(wrong)


ATTACH = AttachRequest(1, 0, "name", 5, None, None, None, True)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda f: f[:0], ProtocolError),
        (lambda f: ["kvd", *f[1:]], ProtocolError),
        (lambda f: f[:8], ProtocolError),
        (lambda f: [*f, 1], ProtocolError),
        (lambda f: [*f[:4], -1, *f[5:]], ProtocolError),
        (lambda f: [*f[:3], "x" * 300, *f[4:]], LimitExceeded),
        (lambda f: [*f[:6], bytes(2049), *f[7:]], LimitExceeded),
        (lambda f: [f[0], 2, 0, "whatever", "a", "major", "two", "says"], VersionError),
        (lambda f: [f[0], 0, 9], VersionError),
        (lambda f: [f[0], "1", *f[2:]], ProtocolError),
    ],
)
def test_an_attach_that_is_not_right_is_a_typed_error(
    change: Callable[[list[Any]], list[Any]], error: type[KvdError]
) -> None:
    """K03, K04"""
    fields = msgpack.unpackb(encode_attach(ATTACH))
    assert decode_attach(msgpack.packb(fields)) == ATTACH
    with pytest.raises(error):
        decode_attach(msgpack.packb(change(fields)))


def test_an_attach_of_a_newer_minor_works() -> None:
    """K04"""
    fields = [*msgpack.unpackb(encode_attach(ATTACH)), None, "new", 7]
    fields[2] = MINOR + 1
    assert decode_attach(msgpack.packb(fields)) == ATTACH._replace(minor=MINOR + 1)


def test_a_refused_attach_raises_what_the_daemon_said() -> None:
    with pytest.raises(VersionError, match=r"1\.0"):
        decode_attach_reply(encode_attach_error(ErrorCode.VERSION, "2.0 and 1.0"))
    for wrong in (b"", b"\x90", b"\x91\xa2ok", b"\xc0", bytes(5000)):
        with pytest.raises(ProtocolError):
            decode_attach_reply(wrong)


def test_outcome_bytes_are_numbers_of_the_table() -> None:
    assert max(Outcome) < 256

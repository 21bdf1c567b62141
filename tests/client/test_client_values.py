"""What callers may write for numbers: any integer where one is due, any sensible span of time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from fake_daemon import SLOT, FakeDaemon, keys, make_spec

from kvd.chunk import Outcome
from kvd.client import Client
from kvd.client.copies import copy_into, copy_out
from kvd.client.keys import (
    pack_digests,
    pack_fingerprints,
    pack_hashes,
    pack_items,
    pack_numbers,
    whole,
)
from kvd.errors import BadKey, ConfigError, KvdError, LimitExceeded
from kvd.wire import messages as m

EIGHT = [
    [8],
    (8,),
    range(8, 9),
    [np.int64(8)],
    [np.uint8(8)],
    *(np.array([8], dtype=kind) for kind in ("i1", "u1", "<i4", ">i4", "<u4", "<i8", "<u8", ">u8")),
    np.array([8], dtype=object),
    np.array([8]),
    (8).to_bytes(4, "little"),
    bytearray((8).to_bytes(4, "little")),
]


@pytest.mark.parametrize("value", EIGHT, ids=repr)
def test_any_integers_are_numbers(value: Any) -> None:
    assert pack_numbers(value, "<u4", 1, "tokens") == b"\x08\0\0\0"


def test_both_ends_of_a_range_are_in_it_also_side_by_side() -> None:
    top = (1 << 64) - 1
    expected = np.array([0, 1 << 63, top], dtype="<u8").tobytes()
    assert pack_numbers([0, 1 << 63, top], "<u8", 3, "pos0") == expected
    assert pack_numbers([], "<u8", 0, "pos0") == b""
    assert pack_items(iter([0, (1 << 32) - 1])) == b"\0\0\0\0\xff\xff\xff\xff"


@pytest.mark.parametrize(
    "value",
    [
        [-1], [1 << 32], [10**400], [8.0], [math.nan], [math.inf], ["8"], [None], [[8]], [b"8"],
        np.array([-1]), np.array([8.0]), np.array([math.nan]), np.array([1 << 40]),
        np.array(["8"]), np.array([None]), 8, 8.0, [8, 9], [], b"\x08", np.array([8, 9]),
    ],
    ids=repr,
)  # fmt: skip
def test_what_is_no_number_of_the_range_is_a_bad_key(value: Any) -> None:
    with pytest.raises(BadKey, match="tokens"):
        pack_numbers(value, "<u4", 1, "tokens")


def test_a_bad_number_names_itself_and_the_range() -> None:
    with pytest.raises(BadKey, match="pos0: -1 is not from 0 to 18446744073709551615"):
        pack_numbers([-1], "<u8", 1, "pos0")
    with pytest.raises(BadKey, match="index0: a whole number is due, not nan"):
        whole(math.nan, "index0")


@pytest.mark.parametrize("mapped", [True, False])
def test_numbers_go_to_the_daemon_as_what_they_are(fake: FakeDaemon, mapped: bool) -> None:
    with Client(fake.socket, map_memory=mapped) as client:
        handle = client.register(make_spec())
        data = bytes(SLOT)
        key = keys(3)
        said = [
            client.put(handle, key[0], None, data, tokens=8, pos0=0, index=np.int64(0)),
            client.put(handle, key[1], None, data, tokens=np.uint16(8), pos0=np.int64(5)),
            *client.store_chunks(handle, key[2:], None, [data], tokens=[8], pos0=np.array([0])),
        ]
        assert said == [Outcome.OK] * 3
        with client.lookup(handle, key, shards=np.array([0]), every=True) as found:
            assert found.outcomes == (Outcome.OK,) * 3


@pytest.mark.parametrize(
    "wrong",
    [
        {"index0": -1}, {"index0": 0.5}, {"index0": 1 << 32}, {"shards": [-1]}, {"shards": [0.0]},
        {"shards": 0}, {"flags": -1}, {"flags": 1 << 40}, {"flags": "x"}, {"kind": "prefix"},
        {"parent": 5}, {"parent": b"short"}, {"tokens": [math.nan]}, {"pos0": [-1]},
    ],
    ids=repr,
)  # fmt: skip
def test_a_bad_argument_is_a_typed_error_and_the_client_goes_on(
    client: Client, wrong: dict[str, Any]
) -> None:
    handle = client.register(make_spec())
    with pytest.raises(BadKey):
        client.reserve(handle, keys(1), **wrong)
    with pytest.raises(BadKey):
        client.store_chunks(handle, keys(1), None, [bytes(SLOT)], **wrong)
    assert client.put(handle, keys(1)[0], None, bytes(SLOT)) is Outcome.OK


@pytest.mark.parametrize(
    "hashes", [[1], 5, None, ["x" * 32], np.zeros(32), np.zeros((1, 32), np.int32)], ids=repr
)
def test_what_is_no_hash_is_a_bad_key(client: Client, hashes: Any) -> None:
    with pytest.raises(BadKey):
        client.lookup(client.register(make_spec()), hashes)


@pytest.mark.parametrize(
    "kind",
    [bytearray, memoryview, np.bytes_, lambda raw: np.frombuffer(raw, np.uint8)],
    ids=["bytearray", "memoryview", "bytes_", "array"],
)
def test_whatever_has_the_bytes_of_a_key_is_one(kind: Callable[[bytes], Any]) -> None:
    """Side by side with others, too: rows of an array, slices of a packed one."""
    plain = [bytes([n]) * 32 for n in range(1, 4)]
    mixed = [kind(plain[0]), plain[1], kind(plain[2])]
    assert pack_hashes(mixed) == b"".join(plain)
    assert pack_hashes(iter(mixed)) == b"".join(plain)  # type: ignore[arg-type]
    prints = [kind(one[:16]) for one in plain]
    assert pack_digests(prints) == pack_fingerprints(prints, 3) == b"".join(x[:16] for x in plain)
    with pytest.raises(BadKey, match="32 bytes each are due, one has 16"):
        pack_hashes(prints)


def test_rows_of_wider_numbers_are_no_keys() -> None:
    with pytest.raises(BadKey, match="hashes: 32 bytes each are due, 2 have 256"):
        pack_hashes(list(np.zeros((2, 32), np.int32)))  # type: ignore[arg-type]


@pytest.mark.parametrize("mapped", [1, 0, np.bool_(True), np.bool_(False)], ids=repr)
def test_any_truth_is_a_switch(fake: FakeDaemon, mapped: Any) -> None:
    with Client(fake.socket, map_memory=mapped, public=mapped, prefault=mapped) as client:
        client.register(make_spec())
        key, data = keys(1), bytes(range(256)) * (SLOT // 256)
        digest: Any = memoryview(make_spec().digest)
        assert client.store_chunks(make_spec(), key, None, [data], seal=mapped) == [Outcome.OK]
        came = bytearray(SLOT)
        said = client.load_chunks(digest, key, [came], every=mapped, verify=mapped)
        assert said == [Outcome.OK] and came == data
        assert client.get(digest, key[0]) == data
        assert client.info().maps_memory is bool(mapped) and client.public is bool(mapped)


NO_SPANS = [math.inf, -math.inf, math.nan, 1e99, -1, 10**400, "5", b"5", [5], 2_592_001]


@pytest.mark.parametrize("value", NO_SPANS, ids=repr)
def test_a_client_is_not_made_with_a_deadline_that_is_none(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"timeout_s: .* from 0 to 2592000"):
        Client("/tmp/nobody", timeout_s=value)


def calls(client: Client) -> Iterator[tuple[str, Callable[[Any], object], int]]:
    """Everything that takes a span of time: name, call, limit in seconds."""
    handle = client.register(make_spec())
    key = keys(1)
    data = bytes(SLOT)
    day = 86_400
    yield "ttl_s", lambda s: client.reserve(handle, key, ttl_s=s), day
    yield "ttl_s", lambda s: client.put(handle, key[0], None, data, ttl_s=s), day
    yield "ttl_s", lambda s: client.store_chunks(handle, key, None, [data], ttl_s=s), day
    yield "ttl_s", lambda s: client.lookup(handle, key, reserve_misses=True, ttl_s=s), day
    yield "lease_s", lambda s: client.lookup(handle, key, lease_s=s), day
    yield "lease_s", lambda s: client.load_chunks(handle, key, [bytearray(SLOT)], lease_s=s), day
    call = client.submit_at(m.Stat(), client.deadline_ns(5))
    month = 30 * day
    yield "timeout_s", lambda s: client.stat(timeout_s=s), month
    yield "timeout_s", lambda s: client.info(timeout_s=s) and client.ping(timeout_s=s), month
    yield "timeout_s", lambda s: client.submit(m.Stat(), deadline_s=s), month
    yield "timeout_s", lambda s: client.poll(s), month
    yield "timeout_s", lambda s: client.get(handle, key[0], timeout_s=s), month
    yield "timeout_s", lambda s: client.lookup(handle, key, timeout_s=s), month
    yield "timeout_s", lambda s: (call.done or call.result(s)) and client.poll(s), month


def test_a_span_that_does_not_fit_is_told_with_its_limit(client: Client) -> None:
    for name, call, limit in calls(client):
        for value in (math.inf, math.nan, 1e99, 10**400, "5"):
            with pytest.raises(LimitExceeded, match=f"{name}: .* from 0 to {limit}"):
                call(value)
    assert client.stat(timeout_s=30 * 86_400)


def test_a_negative_lease_is_refused_and_a_deadline_that_is_over_is_over(client: Client) -> None:
    for name, call, _ in calls(client):
        if name == "timeout_s":
            try:
                call(-1)
            except (KvdError, TimeoutError) as error:  # result(-1): no answer yet
                assert not isinstance(error, LimitExceeded)
        else:
            with pytest.raises(LimitExceeded, match=f"{name}: -1"):
                call(-1)


def test_handles_hold_to_the_same_limits(client: Client) -> None:
    handle = client.register(make_spec())
    assert client.put(handle, keys(1)[0], None, bytes(SLOT)) is Outcome.OK
    with client.lookup(handle, keys(1), load=True) as found:
        assert found.lease is not None and found.transfer is not None
        for value in (math.inf, math.nan, 1e99, -1):
            with pytest.raises(LimitExceeded, match="seconds"):
                found.lease.renew(value)
        with pytest.raises(LimitExceeded, match="timeout_s"):
            found.transfer.wait(math.inf)
        with pytest.raises(BadKey, match="items"):
            found.lease.load([-1])
    client.timeout_s = math.inf  # set later than it could be checked
    with pytest.raises(LimitExceeded, match="timeout_s"):
        client.stat()
    client.timeout_s = 5


@pytest.mark.parametrize("kind", ["O", [("number", "i8"), ("thing", "O")]])
def test_pointers_are_neither_stored_nor_overwritten(kind: Any) -> None:
    # an array of Python objects holds addresses; bytes that came over one would be followed
    things = np.zeros(SLOT // np.dtype(kind).itemsize, kind)
    before = things.tobytes()
    for copy in (lambda: copy_into(memoryview(bytearray(SLOT)), things),
                 lambda: copy_out(memoryview(bytes(SLOT)), things)):  # fmt: skip
        with pytest.raises(ValueError, match="plain values"):
            copy()
    assert things.tobytes() == before
    named = np.zeros(SLOT // 8, [("Of", "f8")])  # a field's name is none of its types
    copy_out(memoryview(bytes([1]) * SLOT), named)
    assert named.tobytes() == bytes([1]) * SLOT


@pytest.mark.parametrize("path", ["/tmp/\udcff", 5, b"/tmp/kvd.sock"])
def test_a_socket_that_is_no_text_is_refused(path: Any) -> None:
    with pytest.raises(ConfigError, match="socket"):
        Client(path)

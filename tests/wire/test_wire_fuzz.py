"""Whatever comes in, decoding ends in a message or in a typed error, and runs nothing."""

from __future__ import annotations

import os
import pickle
import resource
import tracemalloc
from pathlib import Path
from typing import Any

import msgpack
import pytest
import wire_vectors as vectors
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.errors import KvdError, LimitExceeded, ProtocolError, VersionError
from kvd.wire import Op, decode_frame, encode_frame
from kvd.wire import messages as m
from kvd.wire.attach import decode_attach, decode_attach_reply

TYPED = (ProtocolError, LimitExceeded, VersionError)
BODIES = [
    *((m.OP_OF[type(v)], m.encode_request(v)) for v in vectors.REQUESTS.values()),
    *((m.OP_OF[type(v)], m.encode_request(v)) for v in vectors.REQUESTS_1_1.values()),
    *((m.OP_OF[type(v)], m.encode_request(v)) for v in vectors.REQUESTS_1_2.values()),
]
REPLIES = [
    (op, m.encode_reply(v))
    for more in (vectors.REPLIES, vectors.REPLIES_1_1, vectors.REPLIES_1_2)
    for op, v in more.values()
]


def swallow(op: int, body: bytes) -> None:
    """Decode as everything that it could be taken for."""
    for decode in (
        lambda: m.decode_request(op, body),
        lambda: m.decode_request(op, body, newer=True),
        lambda: m.decode_reply(op, body),
        lambda: decode_frame(body),
        lambda: decode_attach(body),
    ):
        try:
            decode()
        except TYPED:
            pass
    try:
        decode_attach_reply(body)
    except KvdError:
        pass


@pytest.mark.parametrize(("op", "body"), BODIES)
def test_a_request_cut_at_every_length_is_refused(op: int, body: bytes) -> None:
    """K03"""
    for size in range(len(body)):
        with pytest.raises(ProtocolError):
            m.decode_request(op, body[:size])
    with pytest.raises(ProtocolError):
        m.decode_request(op, body + b"\0")


@pytest.mark.parametrize(("op", "body"), BODIES + REPLIES)
def test_each_corrupted_byte_ends_in_a_message_or_a_typed_error(op: int, body: bytes) -> None:
    """K03"""
    for at in range(len(body)):
        for value in (0, 0x7F, 0x90, 0xC1, 0xC6, 0xDD, 0xFF, body[at] ^ 1):
            swallow(op, body[:at] + bytes([value]) + body[at + 1 :])


@pytest.mark.parametrize("opening", [b"\x91", b"\x81\x01", b"\x81\xa1a", b"\xdc\x00\x01"])
@pytest.mark.parametrize("op", list(Op))
def test_ten_thousand_levels_are_a_protocol_error(op: int, opening: bytes) -> None:
    """K03"""
    body = opening * 10_000 + b"\xc0"
    with pytest.raises(ProtocolError):
        m.decode_request(op, body)
    with pytest.raises(ProtocolError):
        m.decode_reply(op, body)


@pytest.mark.parametrize(
    "body",
    [
        b"\xdd\xff\xff\xff\xff",  # an array of 4 Gi
        b"\xdf\xff\xff\xff\xff",  # a map of 4 Gi
        b"\x91\xc6\xff\xff\xff\xff" + bytes(1024),  # a bin of 4 GiB with 1 kB of it
        b"\x91\xdb\xff\xff\xff\xff" + bytes(1024),  # text of 4 GiB
        b"\x91\xc9\xff\xff\xff\xff\x01",  # an ext of 4 GiB
        b"\xdd\x00\x0f\xff\xff" * 500,  # arrays of a million in each other
        b"\xdd\x00\x00\x0f\xff" * 1000,  # as large as may be, as deep as may be
    ],
)
def test_claimed_sizes_allocate_nothing(body: bytes) -> None:
    """K03, K09"""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tracemalloc.start()
    try:
        for op in Op:
            with pytest.raises(ProtocolError):
                m.decode_request(op, body)
            swallow(op, body)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64 << 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 128 << 10  # KiB


@pytest.mark.parametrize(
    "body",
    [
        b"\x91\xd6\xff\x00\x00\x00\x00",  # a timestamp
        b"\x91\xd4\x01\x00",  # an ext
        b"\x91\xa2\xff\xfe",  # text that is no UTF-8
        b"\x91\x82\xa1a\x01\xa1a\x02",  # a key twice
        b"\x81\x01\x02",  # a map with a number for a key
        b"\xc1",
        b"",
        b"\x01",
        b"\xc0",
        b"\x80",
    ],
)
def test_what_msgpack_allows_and_the_protocol_does_not_is_refused(body: bytes) -> None:
    """K03"""
    for op in Op:
        with pytest.raises(ProtocolError):
            m.decode_request(op, body)


def test_noise_of_every_size_is_swallowed() -> None:
    """K03"""
    for size in (1, 3, 96, 97, 4096, 1 << 20):
        swallow(Op.LOOKUP, os.urandom(size))


junk = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.binary(max_size=40),
    lambda inner: (
        st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=300)
@given(op=st.sampled_from(list(Op)), body=st.lists(junk, max_size=12))
def test_any_msgpack_is_a_message_or_a_typed_error(op: Op, body: list[Any]) -> None:
    """K03"""
    swallow(op, msgpack.packb(body))


@settings(max_examples=300)
@given(which=st.sampled_from(BODIES), position=st.integers(0, 20), value=junk, newer=st.booleans())
def test_any_value_in_any_field_is_a_message_or_a_typed_error(
    which: tuple[int, bytes], position: int, value: Any, newer: bool
) -> None:
    """K03"""
    op, body = which
    fields = msgpack.unpackb(body)
    if fields:
        fields[position % len(fields)] = value
    try:
        message = m.decode_request(op, msgpack.packb(fields), newer=newer)
    except TYPED:
        return
    assert m.decode_request(op, m.encode_request(message)) == message


class Bomb:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_never_runs(protocol: int, tmp_path: Path) -> None:
    """K06"""
    marker = tmp_path / "ran"
    bomb = pickle.dumps(Bomb(marker), protocol)
    for op in Op:
        swallow(op, bomb)
        swallow(op, msgpack.packb([bomb] * 10))
    swallow(0, encode_frame(Op.HELLO, bomb, request=1))
    assert not marker.exists()
    pickle.loads(bomb)  # the bomb is a real one
    assert marker.exists()

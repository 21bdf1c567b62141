"""The header: what holds, what is refused, and whom a refusal can be addressed to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.errors import LimitExceeded, ProtocolError, VersionError
from kvd.wire import (
    DEFAULT_LIMITS,
    HEADER_BYTES,
    MINOR,
    FrameFlag,
    Op,
    Trace,
    address_of,
    check_payload,
    check_version,
    common_features,
    decode_frame,
    encode_frame,
)

u64 = st.integers(0, 2**64 - 1)
REPLY = int(FrameFlag.REPLY)


@given(
    op=st.integers(0, 255),
    body=st.binary(max_size=64),
    session=st.binary(min_size=16, max_size=16),
    request=u64,
    ack=u64,
    epoch=u64,
    deadline=u64,
    trace=st.builds(
        Trace,
        st.binary(min_size=16, max_size=16),
        st.binary(min_size=8, max_size=8),
        st.integers(0, 255),
    ),
    frames=st.integers(0, DEFAULT_LIMITS.frames),
)
def test_a_frame_comes_back_as_it_went(
    op: int,
    body: bytes,
    session: bytes,
    request: int,
    ack: int,
    epoch: int,
    deadline: int,
    trace: Trace,
    frames: int,
) -> None:
    data = encode_frame(
        op,
        body,
        flags=REPLY,
        session=session,
        request=request,
        ack=ack,
        epoch=epoch,
        deadline=deadline,
        trace=trace,
        frames=frames,
    )
    assert len(data) == HEADER_BYTES + len(body)
    frame = decode_frame(data)
    assert frame[:7] == (MINOR, op, REPLY, session, request, ack, epoch)
    assert frame[7:] == (deadline, *trace, frames, body)
    assert address_of(data) == (1, MINOR, op, REPLY, session, request)


def test_a_header_cut_anywhere_is_a_typed_error() -> None:
    """K03"""
    data = encode_frame(Op.STAT, b"\x90", request=1)
    for size in range(len(data)):
        with pytest.raises(ProtocolError):
            decode_frame(data[:size])


def test_every_corrupted_byte_of_a_header_gives_a_frame_or_a_typed_error() -> None:
    """K03"""
    data = encode_frame(Op.STAT, b"\x90", request=1, epoch=5)
    for at in range(HEADER_BYTES):
        for value in (0, 1, 0x7F, 0xFF, data[at] ^ 0x10):
            broken = data[:at] + bytes([value]) + data[at + 1 :]
            try:
                frame = decode_frame(broken)
            except (ProtocolError, LimitExceeded, VersionError):
                continue
            assert frame.body == b"\x90"  # only fields that may be anything were hit


@pytest.mark.parametrize("claimed", [0, 2, 2**20 + 1, 2**32 - 1])
def test_a_claimed_body_length_is_not_believed(claimed: int) -> None:
    """K09: 4 GiB of body claimed, one byte sent."""
    data = bytearray(encode_frame(Op.STAT, b"\x90", request=1))
    data[88:92] = claimed.to_bytes(4, "little")
    with pytest.raises(ProtocolError, match="claims a body"):
        decode_frame(bytes(data))


def test_a_body_at_the_limit_passes_and_one_byte_more_does_not() -> None:
    """K09"""
    limits = DEFAULT_LIMITS._replace(body=1000)
    assert len(decode_frame(encode_frame(1, bytes(1000), request=1), limits).body) == 1000
    with pytest.raises(LimitExceeded, match="1001, at most 1000"):
        decode_frame(encode_frame(1, bytes(1001), request=1), limits)


def test_payload_frames_are_counted_and_weighed_before_they_are_used() -> None:
    """K09"""
    frame = decode_frame(encode_frame(Op.PUT, b"", request=1, frames=2))
    check_payload(frame, [10, 20])
    with pytest.raises(ProtocolError, match="announces 2"):
        check_payload(frame, [10])
    with pytest.raises(LimitExceeded, match="inline"):
        check_payload(frame, [DEFAULT_LIMITS.inline, 1])
    with pytest.raises(LimitExceeded, match="payload frames"):
        decode_frame(encode_frame(Op.PUT, b"", request=1, frames=DEFAULT_LIMITS.frames + 1))


def test_a_request_can_not_acknowledge_itself_or_a_later_one() -> None:
    decode_frame(encode_frame(Op.STAT, b"\x90", request=5, ack=4))
    with pytest.raises(ProtocolError, match="acknowledges"):
        decode_frame(encode_frame(Op.STAT, b"\x90", request=5, ack=6))


@pytest.mark.parametrize(("at", "value"), [(7, 8), (81, 1), (92, 1)])
def test_reserved_bits_are_refused_at_our_minor_and_ignored_at_a_newer_one(
    at: int, value: int
) -> None:
    """K04"""
    data = bytearray(encode_frame(Op.STAT, b"\x90", request=1))
    data[at] = value
    with pytest.raises(ProtocolError, match="reserved"):
        decode_frame(bytes(data))
    data[5] = MINOR + 1
    assert decode_frame(bytes(data)).newer


@pytest.mark.parametrize("major", [0, 2, 255])
@pytest.mark.parametrize("size", [40, 96, 97])
def test_another_major_is_refused_with_both_versions_and_can_be_answered(
    major: int, size: int
) -> None:
    """K04"""
    data = bytearray(encode_frame(Op.HELLO, b"\x90", request=7, session=bytes(range(16))))
    data[4:6] = bytes([major, 3])
    with pytest.raises(VersionError) as caught:
        decode_frame(bytes(data[:size]))
    assert f"{major}.3" in str(caught.value) and f"1.{MINOR}" in str(caught.value)
    address = address_of(bytes(data[:size]))
    assert address is not None and address.request == 7 and address.session == bytes(range(16))


def test_nobody_is_addressed_by_garbage() -> None:
    """K03"""
    assert address_of(b"") is None
    assert address_of(bytes(96)) is None
    assert address_of(b"KVD1" + bytes(27)) is None


def test_versions_and_features_are_settled() -> None:
    """K04"""
    assert check_version(1, 0) is False
    assert check_version(1, MINOR) is False
    assert check_version(1, MINOR + 1) is True
    with pytest.raises(VersionError):
        check_version(2, 0)
    assert common_features(("trace", "warp", "inline")) == ("inline", "trace")

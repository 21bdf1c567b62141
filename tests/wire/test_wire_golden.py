"""Protocol 1 to the byte, against fixed vectors and against a second way to read them."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import msgpack
import pytest
import wire_vectors as vectors

from kvd.errors import Busy, ProtocolError
from kvd.wire import HEADER_BYTES, Frame, decode_frame
from kvd.wire import messages as m
from kvd.wire.attach import decode_attach, decode_attach_reply

GOLDEN: dict[str, Any] = json.loads(Path(__file__).with_name("golden.json").read_text())


def test_every_vector_is_what_it_was_on_the_first_day() -> None:
    assert vectors.vectors() == GOLDEN


@pytest.mark.parametrize("version", vectors.ADDED)
def test_what_a_minor_version_added_is_what_it_was_on_its_first_day(version: str) -> None:
    golden = json.loads(Path(__file__).with_name(f"golden_{version}.json").read_text())
    assert vectors.vectors_of(version) == golden
    requests, replies = vectors.ADDED[version]
    for name, request in requests.items():
        body = bytes.fromhex(golden["requests"][name])
        assert m.decode_request(m.OP_OF[type(request)], body) == request
    for name, (op, message) in replies.items():
        assert m.decode_reply(op, bytes.fromhex(golden["replies"][name])) == message


def test_attach_names_a_namespace_and_an_error_when_to_ask_again() -> None:
    attach = bytes.fromhex("9aaa6b76642d6174746163680102a16301c0c405746f6b656ec0c3a67075626c6963")
    assert decode_attach(attach).namespace == "public"
    busy = m.decode_error(bytes.fromhex("930fa8746f6f2066617374cd05dc"))
    assert isinstance(busy, Busy) and busy.retry_after_s == 1.5e-6
    assert m.encode_error(15, "too fast", 1500).hex() == "930fa8746f6f2066617374cd05dc"


def test_an_older_peer_reads_an_error_without_when_to_ask_again() -> None:
    fields = msgpack.unpackb(m.encode_error(15, "too fast", 1500))
    busy = m.decode_error(msgpack.packb(fields[:2]))
    assert isinstance(busy, Busy) and busy.retry_after_s == 0


def test_a_lookup_answer_of_1_0_and_one_of_1_1_are_both_understood() -> None:
    """K04: an older peer cuts the added field off; a newer one does without it."""
    old = m.LookupReply(b"\x01\x02", 1, 3, 99, None, None)
    assert m.decode_reply(6, m.encode_reply(old)) == old
    fields = msgpack.unpackb(m.encode_reply(old._replace(tiers=b"\x01\x00")))
    assert len(fields) == 7
    assert m.decode_reply(6, msgpack.packb(fields[:6])) == old
    assert m.decode_reply(6, msgpack.packb([*fields, 5]), newer=True).tiers == b"\x01\x00"
    with pytest.raises(ProtocolError, match="tiers"):
        m.decode_reply(6, msgpack.packb([*fields[:6], b"\x01"]))


def test_the_header_is_where_the_document_says() -> None:
    data = bytes.fromhex(GOLDEN["frames"]["request"])
    assert data[:8] == b"KVD1\x01\x00\x06\x00"  # magic, major, minor, op, flags
    assert data[8:24] == vectors.SESSION
    assert struct.unpack_from("<4Q", data, 24) == (
        0x0102030405060708,
        0x0102030405060700,
        0x1112131415161718,
        0x2122232425262728,
    )
    assert data[56:72] == bytes(range(16)) and data[72:80] == bytes(range(8))
    assert data[80:84] == b"\x01\0\0\0"
    assert struct.unpack_from("<3I", data, 84) == (2, 1, 0)
    assert data[96:] == b"\x90" and HEADER_BYTES == 96


@pytest.mark.parametrize("name", list(vectors.REQUESTS))
def test_a_golden_request_decodes_to_its_message(name: str) -> None:
    message = vectors.REQUESTS[name]
    body = bytes.fromhex(GOLDEN["requests"][name])
    assert m.decode_request(m.OP_OF[type(message)], body) == message


@pytest.mark.parametrize("name", list(vectors.REPLIES))
def test_a_golden_reply_decodes_to_its_message(name: str) -> None:
    op, message = vectors.REPLIES[name]
    assert m.decode_reply(op, bytes.fromhex(GOLDEN["replies"][name])) == message


def test_golden_bodies_are_plain_msgpack_arrays() -> None:
    for body in (*GOLDEN["requests"].values(), *GOLDEN["replies"].values()):
        assert isinstance(msgpack.unpackb(bytes.fromhex(body)), list)


def test_golden_errors_and_attach_messages_decode() -> None:
    frame = decode_frame(bytes.fromhex(GOLDEN["frames"]["error"]))
    assert isinstance(frame, Frame)
    assert "at most 4096" in str(m.decode_error(frame.body))
    assert decode_attach(bytes.fromhex(GOLDEN["attach"]["request"])).name == "vllm-0"
    assert decode_attach(bytes.fromhex(GOLDEN["attach"]["bare"])).maps_memory is False
    assert decode_attach_reply(bytes.fromhex(GOLDEN["attach"]["reply"])).epoch == 7

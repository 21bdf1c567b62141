"""Whatever comes over the wire: a typed error or a hang-up, and the next request is served."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest
from daemon import DaemonProcess
from server_raw import Answer, RawClient, key, prints, spec

from kvd.errors import (
    BadKey,
    KvdError,
    LimitExceeded,
    ProtocolError,
    SpecError,
    StaleEpoch,
    UnknownHandle,
    UnknownSession,
    VersionError,
)
from kvd.wire import MINOR, Op, encode_frame
from kvd.wire import messages as m
from kvd.wire.frame import HEADER

STAT = m.encode_request(m.Stat())


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess() as found:
        yield found


@pytest.fixture
def client(daemon: DaemonProcess) -> Iterator[RawClient]:
    with RawClient(daemon.socket) as found:
        yield found


def header(**changes: int | bytes) -> bytes:
    """A header field by field, right or wrong."""
    fields: dict[str, int | bytes] = {
        "magic": b"KVD1",
        "major": 1,
        "minor": 0,
        "op": int(Op.STAT),
        "flags": 0,
        "session": bytes(16),
        "request": 1,
        "ack": 0,
        "epoch": 0,
        "deadline": 0,
        "trace": bytes(16),
        "span": bytes(8),
        "trace_flags": 0,
        "pad": b"\0\0\0",
        "frames": 0,
        "body_len": len(STAT),
        "reserved": 0,
        **changes,
    }
    return HEADER.pack(*fields.values())


GARBAGE: dict[str, list[bytes]] = {
    "one empty frame": [b""],
    "three empty frames": [b"", b"", b""],
    "an integer of three bytes": [b"\x01\x02\x03"],
    "half a header": [header()[:48]],
    "a header without its body": [header()],
    "a body longer than told": [header() + STAT + b"\0"],
    "a body of 4 GiB told": [header(body_len=2**32 - 1) + STAT],
    "payload that was not announced": [header() + STAT, b"x"],
    "payload that does not come": [header(frames=3) + STAT],
    "4 G payload frames announced": [header(frames=2**32 - 1) + STAT],
    "truncated msgpack": [header(body_len=1) + b"\xdd"],
    "an array of 2^32 elements": [header(body_len=5) + b"\xdd\xff\xff\xff\xff"],
    "a map": [header(body_len=1) + b"\x80"],
    "an unknown operation": [header(op=200) + STAT],
    "operation 0": [header(op=0) + STAT],
    "10,000 levels": [header(body_len=10_001) + b"\x91" * 10_000 + b"\x90"],
    "500,000 levels": [header(body_len=500_001) + b"\x91" * 500_000 + b"\x90"],
    "an extension type": [header(body_len=4) + b"\x91\xd4\x01\x00"],
    "noise": [os.urandom(4096)],
    "noise behind the magic": [b"KVD1\1\0\0\0" + os.urandom(4096)],
    "reserved bits": [header(reserved=7) + STAT],
    "request 0": [header(request=0) + STAT],
    "an acknowledgement of the future": [header(ack=2**63) + STAT],
    "5,000 frames": [header(frames=5000) + STAT] + [b"x"] * 5000,
}


@pytest.mark.parametrize("name", GARBAGE)
@pytest.mark.parametrize("known", [False, True], ids=["stranger", "session"])
def test_garbage_gets_a_typed_error_and_the_next_request_is_served(
    client: RawClient, name: str, known: bool
) -> None:
    """K03"""
    before = client.stat()["counters"]
    frames = list(GARBAGE[name])
    if known and frames[0][:4] == b"KVD1" and len(frames[0]) >= 32:
        # from within a session: the token stands at 8, the request id at 24
        frames[0] = frames[0][:8] + client.session + frames[0][24:]
    client.raw(*frames)
    error = client.recv().error
    assert isinstance(error, ProtocolError | LimitExceeded | UnknownSession | VersionError), error
    after = client.stat()["counters"]
    counted = ("malformed", "refused", "replayed")
    assert _sum(after, counted) > _sum(before, counted)


def _sum(counters: dict[str, object], names: tuple[str, ...]) -> int:
    total = 0
    for name in names:
        value = counters[name]
        total += sum(value.values()) if isinstance(value, dict) else int(str(value))
    return total


def test_64_mib_of_noise_leave_memory_flat(daemon: DaemonProcess, eventually) -> None:
    """K03"""
    with RawClient(daemon.socket) as client:
        client.stat()
        before = daemon.rss
        noise = os.urandom(1 << 20) * 64
        for _ in range(4):
            client.raw(noise)
            assert isinstance(client.recv(30).error, ProtocolError | LimitExceeded)
            client.stat()
        del noise
        eventually(lambda: daemon.rss < before + (24 << 20))


def test_a_frame_beyond_the_largest_is_not_even_received(daemon: DaemonProcess) -> None:
    """K03: libzmq hangs up; the daemon allocates nothing."""
    with RawClient(daemon.socket) as client, RawClient(daemon.socket) as other:
        before = daemon.rss
        client.raw(bytes(65 << 20))
        assert other.stat()["version"]
        assert daemon.rss < before + (24 << 20)


def test_a_pickle_in_any_frame_runs_nothing(client: RawClient, tmp_path: Path) -> None:
    """K06"""
    marker = tmp_path / "marker"

    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(marker),)

    bomb = pickle.dumps(Bomb())
    good = header(session=client.session, body_len=len(bomb)) + bomb
    for frames in ([bomb], [good], [header() + STAT, bomb], [bomb, bomb, bomb]):
        client.raw(*frames)
        assert isinstance(client.recv().error, KvdError)
    assert client.stat()["version"]
    assert not marker.exists()


def test_another_major_is_refused_naming_both_and_a_newer_minor_works(client: RawClient) -> None:
    """K04"""
    for major in (0, 2, 255):
        client.raw(header(major=major, session=client.session) + STAT)
        error = client.recv(1).error
        assert isinstance(error, VersionError)
        assert f"{major}." in str(error) and f"1.{MINOR}" in str(error)
    body = msgpack.packb(["future field"])
    raw = header(minor=9, session=client.session, request=1000, body_len=len(body), reserved=3)
    client.raw(raw + body)
    assert client.recv().message.stat["version"]


def test_a_stranger_is_told_to_attach(client: RawClient) -> None:
    for session in (bytes(16), os.urandom(16)):
        client.send(Op.STAT, STAT, session=session)
        assert isinstance(client.recv().error, UnknownSession)


def test_a_request_of_another_epoch_is_stale(client: RawClient) -> None:
    client.send(Op.STAT, STAT, epoch=12345)
    assert isinstance(client.recv().error, StaleEpoch)


def test_a_reply_is_never_answered(client: RawClient) -> None:
    client.send(Op.STAT, STAT, flags=1)
    with pytest.raises(TimeoutError):
        client.recv(0.3)
    assert client.stat()["counters"]["malformed"]


@pytest.mark.parametrize("count", [4096, 4097, 100_000, 1_000_000])
def test_too_many_keys_are_refused_by_the_limit_that_was_told(
    client: RawClient, count: int
) -> None:
    """K09"""
    digest = client.register(spec())
    assert client.hello_reply.limits.keys == 4096
    body = msgpack.packb([digest, 1, [0], bytes(32 * count), None, 0, 1, bytes(32), 0, 0])
    client.send(Op.LOOKUP, body)
    answer: Answer = client.recv()
    if count <= 4096:
        assert len(answer.message.outcomes) == count
    else:
        assert isinstance(answer.error, LimitExceeded)
    assert client.stat()["version"]


def test_a_chunk_beyond_the_largest_is_refused_and_the_largest_is_stored(
    client: RawClient,
) -> None:
    """K09"""
    largest = client.hello_reply.limits.chunk_bytes
    for nbytes, outcome in ((largest - 1, 3), (largest, 3), (largest + 1, 7), (2**32, 7)):
        digest = client.register(spec(nbytes))
        reserved = client.reserve(digest, 0, 1)
        assert reserved.outcomes == bytes([outcome])
        if reserved.write:
            client.call(m.Abort(reserved.write, None))


@pytest.mark.parametrize(
    "model",
    ["a@b", "#", " ", '"', "line\nbreak", "nul\0", "\N{ROCKET}", "\u202eabc", "x" * 4000],
)
def test_any_name_is_accepted_whole_or_refused(client: RawClient, model: str) -> None:
    """K23"""
    kv = spec(model=model)
    try:
        digest = client.register(kv)
    except (SpecError, BadKey):
        pass
    else:
        assert digest == kv.digest
        client.store(digest, 0, 2)
        assert client.lookup(digest, 0, 2).leading == 2
    assert client.stat()["version"]


def test_handles_that_were_never_given_are_refused(client: RawClient) -> None:
    with pytest.raises(UnknownHandle):
        client.ask(m.Load(2**40, None, None))
    with pytest.raises(UnknownHandle):
        client.ask(m.Commit(2**40, None, None))
    with pytest.raises(UnknownHandle):
        client.ask(m.Wait(2**40, 0, 1))


def test_a_spec_that_was_never_registered_is_refused(client: RawClient) -> None:
    body = m.Lookup(bytes(32), 1, (0,), key(1), prints(1), 0, 1, bytes(32), 0, 0)
    with pytest.raises(SpecError):
        client.ask(body)


@pytest.mark.parametrize("cut", range(0, 96, 7))
def test_a_message_cut_at_any_length_is_an_error(client: RawClient, cut: int) -> None:
    """K03"""
    whole = encode_frame(int(Op.STAT), STAT, session=client.session, request=900 + cut)
    client.raw(whole[:cut])
    assert isinstance(client.recv().error, KvdError)


def test_every_byte_of_a_header_may_be_wrong(client: RawClient) -> None:
    """K03"""
    whole = encode_frame(int(Op.STAT), STAT, session=client.session, request=5000)
    for at in range(len(whole)):
        for value in (0x00, 0x7F, 0xFF):
            broken = whole[:at] + bytes([value]) + whole[at + 1 :]
            client.raw(broken)
    while True:  # answers, errors, or nothing for what looks like a reply
        try:
            client.recv(0.3)
        except TimeoutError:
            break
        except KvdError:
            continue
    with RawClient(client.path) as other:
        assert other.stat()["loop"]["faults"] == 0

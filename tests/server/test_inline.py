"""Inline put and get: for clients that can't map the arena."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from daemon import DaemonProcess
from server_raw import NS, RawClient, key, prints, spec

from kvd.chunk import Outcome
from kvd.errors import Draining, KvdError, ProtocolError, SpecError
from kvd.wire import GetFlag
from kvd.wire import messages as m

NBYTES = 100_000


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess() as found:
        yield found


@pytest.fixture
def client(daemon: DaemonProcess) -> Iterator[RawClient]:
    with RawClient(daemon.socket, maps=False) as found:
        yield found


def put(client: RawClient, digest: bytes, first: int, parts: list[bytes]) -> bytes:
    hashes = b"".join(key(first + i) for i in range(len(parts)))
    parent = bytes(32) if first % 100 == 0 else key(first - 1)
    outcomes: bytes = client.ask(
        m.Put(
            digest, 1, (0,), hashes, parent, first % 100, prints(len(parts)), None, None, 0, 30 * NS
        ),
        tuple(parts),
    ).outcomes
    return outcomes


def get(
    client: RawClient, digest: bytes, first: int, count: int, flags: int = 0
) -> tuple[bytes, list[bytes]]:
    hashes = b"".join(key(first + i) for i in range(count))
    answer = client.call(m.Get(digest, 1, (0,), hashes, None, flags), timeout_s=30)
    return answer.message.outcomes, answer.payload


def test_what_was_put_is_got_byte_for_byte(client: RawClient) -> None:
    assert client.descriptors == []
    digest = client.register(spec(NBYTES))
    parts = [os.urandom(NBYTES) for _ in range(8)]
    assert put(client, digest, 100, parts) == bytes([Outcome.OK]) * 8
    outcomes, payload = get(client, digest, 100, 8)
    assert outcomes == bytes([Outcome.OK]) * 8
    assert payload == parts
    stat = client.stat()
    assert stat["tiers"][0]["leased_chunks"] == 0
    assert stat["tiers"][0]["writing_bytes"] == 0


def test_a_get_delivers_the_leading_run_or_every_hit(client: RawClient) -> None:
    digest = client.register(spec(NBYTES))
    put(client, digest, 200, [bytes([i]) * NBYTES for i in range(2)])
    put(client, digest, 203, [bytes([3]) * NBYTES])
    outcomes, payload = get(client, digest, 200, 4)
    assert [part[0] for part in payload] == [0, 1]
    assert outcomes[:2] == bytes([Outcome.OK]) * 2 and Outcome.OK not in outcomes[2:]
    outcomes, payload = get(client, digest, 200, 4, int(GetFlag.EVERY))
    assert [part[0] for part in payload] == [0, 1, 3]
    ok, miss = Outcome.OK, Outcome.MISS
    assert outcomes == bytes([ok, ok, miss, ok])


def test_a_get_of_nothing_is_a_miss_without_payload(client: RawClient) -> None:
    digest = client.register(spec(NBYTES))
    outcomes, payload = get(client, digest, 9000, 3)
    assert payload == [] and outcomes[0] == Outcome.MISS and Outcome.OK not in outcomes


def test_a_put_of_what_is_there_says_exists(client: RawClient) -> None:
    digest = client.register(spec(NBYTES))
    assert put(client, digest, 300, [bytes(NBYTES)]) == bytes([Outcome.OK])
    assert put(client, digest, 300, [b"\1" * NBYTES, bytes(NBYTES)]) == bytes(
        [Outcome.EXISTS, Outcome.OK]
    )
    assert get(client, digest, 300, 1)[1] == [bytes(NBYTES)]


def test_a_part_of_another_length_is_a_mismatch_and_leaves_nothing(client: RawClient) -> None:
    digest = client.register(spec(NBYTES))
    outcomes = put(client, digest, 400, [bytes(NBYTES), b"short"])
    assert outcomes == bytes([Outcome.OK, Outcome.MISMATCH])
    assert put(client, digest, 450, [b"", b""]) == bytes([Outcome.MISMATCH]) * 2
    assert client.stat()["tiers"][0]["writing_bytes"] == 0
    assert get(client, digest, 400, 2)[1] == [bytes(NBYTES)]


def test_parts_must_be_as_many_as_results(client: RawClient) -> None:
    digest = client.register(spec(NBYTES))
    with pytest.raises(ProtocolError):
        client.ask(
            m.Put(digest, 1, (0,), key(1), bytes(32), 0, prints(1), None, None, 0, NS),
            (b"a", b"b"),
        )
    with pytest.raises(SpecError):
        put(client, bytes(32), 500, [bytes(NBYTES)])


def test_a_reply_holds_64_mib_at_most_and_says_what_it_left_out() -> None:
    nbytes = 4 << 20
    with DaemonProcess(arena_size="256MiB") as daemon:
        with RawClient(daemon.socket, maps=False) as client:
            digest = client.register(spec(nbytes))
            for i in range(20):
                put(client, digest, 600 + i, [bytes([i]) * nbytes])
            outcomes, payload = get(client, digest, 600, 20)
            assert outcomes == bytes([Outcome.OK]) * 16 + bytes([Outcome.SKIPPED]) * 4
            assert [part[0] for part in payload] == list(range(16))
            assert client.stat()["tiers"][0]["leased_chunks"] == 0


def test_mapped_and_inline_clients_see_the_same_bytes(daemon: DaemonProcess) -> None:
    with RawClient(daemon.socket, maps=False) as inline, RawClient(daemon.socket) as mapped:
        digest = inline.register(spec(NBYTES))
        data = os.urandom(NBYTES)
        put(inline, digest, 700, [data])
        from kvd.chunk import unpack_refs

        found = mapped.lookup(digest, 700, 1, 3)
        [ref] = unpack_refs(found.load.refs)
        arena = mapped.descriptors[0]
        assert os.pread(arena, int(ref["length"]), int(ref["offset"])) == data


def test_an_inline_client_killed_in_mid_put_leaves_no_write(
    daemon: DaemonProcess, eventually
) -> None:
    with RawClient(daemon.socket) as watcher:
        for i in range(20):
            client = RawClient(daemon.socket, maps=False)
            digest = client.register(spec(NBYTES))
            hashes = b"".join(key(5000 + 40 * i + j) for j in range(20))
            body = m.encode_request(
                m.Put(digest, 1, (0,), hashes, bytes(32), 0, prints(20), None, None, 0, 30 * NS)
            )
            client.send(16, body, (os.urandom(NBYTES),) * 20)
            client.close()
        eventually(lambda: watcher.stat()["sessions"] == 1)
        eventually(lambda: watcher.stat()["loop"]["locks_watched"] == 0)
        tier = watcher.stat()["tiers"][0]
        assert tier["writing_bytes"] + tier["condemned_bytes"] == 0
        assert watcher.stat()["loop"]["faults"] == 0


assert issubclass(Draining, KvdError)

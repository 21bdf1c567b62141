"""Reported failures of storing and loading, end to end: a real daemon, real clients, real memory.

Each test is a case of docs/cases.md, named in its docstring.
"""

from __future__ import annotations

import random
import threading
import time

import numpy as np
import pytest
from cases_kit import (
    MISS,
    OK,
    SIZE,
    SKIPPED,
    Prompt,
    blank,
    in_threads,
    make_spec,
    soon,
    tier,
    untouched,
)
from daemon import DaemonProcess

from kvd.chunk import Outcome, chain_fingerprints, chain_hashes
from kvd.client import Client, Selector
from kvd.errors import KvdError, LeaseLost, StaleEpoch, UnknownHandle
from kvd.wire import messages as m

# -- correctness --------------------------------------------------------------------------------


def test_a_reader_sees_a_whole_value_or_a_miss() -> None:
    """K27: a writer fills a chunk slowly while readers poll it; then it changes again and again."""
    nbytes = 4 << 20
    with DaemonProcess(arena_size="128MiB") as daemon, Client(daemon.socket) as writer:
        handle = writer.register(make_spec(nbytes))
        prompt = Prompt(1, 1, nbytes)
        committed, stop = threading.Event(), threading.Event()
        seen: list[str] = []

        def read(number: int) -> None:
            buffer = blank(1, nbytes)
            with Client(daemon.socket) as reader:
                reader.register(make_spec(nbytes))
                while not stop.is_set():
                    early = not committed.is_set()
                    (said,) = reader.load_chunks(handle.digest, prompt.hashes, buffer)
                    if said is OK:
                        assert (buffer[0] == buffer[0][0]).all(), "torn"
                        seen.append("whole")
                        if early and not committed.is_set():
                            seen.append("too early")
                    else:
                        seen.append("miss")

        def write(number: int) -> None:
            try:
                with writer.reserve(handle, prompt.hashes, prompt.prints) as slots:
                    view = slots.array(0, np.uint8, (nbytes,))
                    for part in np.array_split(view, 20):
                        part[:] = 7
                        time.sleep(0.02)
                    committed.set()
                    assert slots.commit() == [OK]
                for value in range(8, 28):
                    writer.evict(Selector(keys=(prompt.hashes[0],)))
                    prompt.data[0][:] = value
                    assert prompt.store(writer, handle) in ([OK], [Outcome.EXISTS])
                    time.sleep(0.02)
            finally:
                stop.set()

        in_threads(4, lambda i: write(i) if i == 0 else read(i))
        assert "too early" not in seen
        assert {"whole", "miss"} <= set(seen)


def test_a_load_says_chunk_by_chunk_what_was_delivered(client: Client) -> None:
    """K31"""
    handle = client.register(make_spec())
    prompt = Prompt(1, 10)
    assert prompt.store(client, handle) == [OK] * 10
    assert client.lookup(handle, prompt.hashes, lease=False).leading == 10

    client.evict(Selector(subtree=prompt.hashes[5]))
    target = blank(10)
    said = client.load_chunks(handle, prompt.hashes, target)
    assert said == [OK] * 5 + [MISS] + [SKIPPED] * 4
    assert [bool((t == d).all()) for t, d in zip(target, prompt.data, strict=True)] == [
        True, True, True, True, True, False, False, False, False, False,
    ]  # fmt: skip
    assert all(map(untouched, target[5:]))

    client.evict(Selector(everything=True))
    target = blank(10)
    said = client.load_chunks(handle, prompt.hashes, target, every=True)
    assert said == [MISS] * 10
    assert all(map(untouched, target))


def test_a_handle_that_is_not_valid_now_is_an_error_and_no_bytes(daemon: DaemonProcess) -> None:
    """K32: a random lease, an index beyond its chunks, a released lease, a stranger's, one whose
    memory went to others, and one from before a restart."""
    with Client(daemon.socket, timeout_s=20) as client, Client(daemon.socket) as stranger:
        handle = client.register(make_spec())
        prompt = Prompt(1, 4)
        prompt.store(client, handle)

        with pytest.raises(UnknownHandle):
            client.submit(m.Load(987654321, None, None)).result()
        lease = client.lookup(handle, prompt.hashes).lease
        assert lease is not None
        with pytest.raises(KvdError):
            lease.load([4])
        with pytest.raises(UnknownHandle):
            stranger.submit(m.Load(lease.id, None, None)).result()
        lease.release(wait=True)
        with pytest.raises(UnknownHandle):
            client.submit(m.Load(lease.id, None, None)).result()

        short = client.lookup(handle, prompt.hashes, lease_s=0.2, load=True)
        assert short.lease is not None and short.transfer is not None
        assert set(short.transfer.outcomes) == {OK}
        time.sleep(0.3)
        for number in range(2, 12):  # more than the arena holds
            Prompt(number, 30).store(client, handle)
        with pytest.raises(LeaseLost):
            short.transfer.check()
        with pytest.raises(UnknownHandle):
            client.submit(m.Load(short.lease.id, None, None)).result()

        Prompt(50, 2).store(client, handle)
        old = client.lookup(handle, Prompt(50, 2).hashes, load=True)
        assert old.lease is not None and old.transfer is not None
        daemon.kill()
        daemon.start()
        soon(lambda: _answers(client))
        with pytest.raises((UnknownHandle, StaleEpoch)):
            old.lease.load()
        with pytest.raises(LeaseLost):
            old.transfer.check()


def _answers(client: Client) -> bool:
    try:
        client.ping()
    except KvdError:
        return False
    return True


def test_the_tail_of_a_prompt_never_passes_for_a_full_chunk(client: Client) -> None:
    """K34: 14,820 tokens are 57 full chunks of 256; the 228 left over have no key, and when the
    prompt grows its next chunk is another one."""
    tokens = np.arange(14_820, dtype=np.uint32)
    longer = np.arange(15_120, dtype=np.uint32)
    short_hashes, long_hashes = chain_hashes(tokens, 256), chain_hashes(longer, 256)
    assert len(short_hashes) == 57 and len(long_hashes) == 59
    assert long_hashes[:57] == short_hashes
    handle = client.register(make_spec(4096, chunk_tokens=256))
    prints = chain_fingerprints(tokens, 256)
    client.store_chunks(handle, short_hashes, prints, blank(57, 4096))
    assert client.lookup(handle, long_hashes, lease=False).leading == 57
    # padding the tail does not make it the chunk that follows
    tail = chain_hashes(np.concatenate([tokens, np.zeros(28, np.uint32)]), 256)[57]
    assert tail != long_hashes[57]


# -- eviction -----------------------------------------------------------------------------------


def test_a_chain_goes_from_its_end_and_its_rest_is_usable(client: Client) -> None:
    """K38: what is left of a prompt is a contiguous prefix, however its parts were touched."""
    handle = client.register(make_spec())
    first = Prompt(1, 150)
    for begin in range(0, 150, 25):  # chunked prefill
        assert first.store(client, handle, begin, begin + 25) == [OK] * 25
    for _ in range(2):
        client.load_chunks(handle, first.hashes[:25], blank(25))
    number = 2
    while sum(client.stat()["counters"]["chunks_evicted"].values()) < 75:
        Prompt(number, 30).store(client, handle)
        number += 1
    found = client.lookup(handle, first.hashes, lease=False, every=True)
    resident = sum(outcome is OK for outcome in found.outcomes)
    assert 0 < resident < 150
    assert found.outcomes[:resident] == (OK,) * resident
    assert client.lookup(handle, first.hashes, lease=False).leading == resident


def test_leased_chunks_stay_until_they_are_released(daemon: DaemonProcess, client: Client) -> None:
    """K40: hits that were promised are there, whatever others store meanwhile."""
    handle = client.register(make_spec())
    kept = Prompt(1, 100)
    assert kept.store(client, handle) == [OK] * 100
    with client.lookup(handle, kept.hashes) as found:
        assert found.leading == 100 and found.lease is not None
        with Client(daemon.socket, timeout_s=20) as other:
            other.register(make_spec())
            for number in range(2, 12):
                said = set(Prompt(number, 40).store(other, handle))
                assert said <= {OK, Outcome.NO_SPACE}
        assert tier(client)["leased_chunks"] == 100
        transfer = found.lease.load()
        for index in transfer:
            assert (transfer.array(index, np.uint8) == kept.data[index][0]).all()
        transfer.check()
    soon(lambda: tier(client)["leased_chunks"] == 0)
    for number in range(20, 30):
        assert Prompt(number, 40).store(client, handle) == [OK] * 40
    assert client.lookup(handle, kept.hashes, lease=False).leading == 0


@pytest.mark.parametrize("over", [1, 1 << 20])
def test_what_can_not_fit_is_refused_before_anything_goes(client: Client, over: int) -> None:
    """K43"""
    handle = client.register(make_spec())
    for number in range(8):
        Prompt(number, 30).store(client, handle)
    before = tier(client)
    limit = client.info().limits.chunk_bytes
    large = client.register(make_spec(limit + over))
    for _ in range(2):
        with client.reserve(large, [b"x" * 32], [b"y" * 16]) as slots:
            assert list(slots.outcomes) == [Outcome.TOO_LARGE]
    after = tier(client)
    assert (after["chunks"], after["used_bytes"]) == (before["chunks"], before["used_bytes"])
    # and the largest that fits is stored
    largest = client.register(make_spec(limit))
    assert Prompt(90, 1, limit).store(client, largest) == [OK]


# -- leases, shards, duplicates -----------------------------------------------------------------


def test_a_release_is_by_lease_and_one_that_matches_nothing_is_an_error(
    daemon: DaemonProcess, client: Client
) -> None:
    """K48"""
    handle = client.register(make_spec())
    prompt = Prompt(1, 20)
    prompt.store(client, handle)
    lease = client.lookup(handle, prompt.hashes).lease
    assert lease is not None and tier(client)["leased_chunks"] == 20
    with Client(daemon.socket) as other:
        for wrong in (lease.id, lease.id + 1000):
            with pytest.raises(UnknownHandle):
                other.submit(m.Release(wrong)).result()
    assert tier(client)["leased_chunks"] == 20
    lease.release(wait=True)
    assert tier(client)["leased_chunks"] == 0
    with pytest.raises(UnknownHandle):
        client.submit(m.Release(lease.id)).result()
    assert client.evict(Selector(everything=True)).evicted == 20


def test_writers_of_the_same_keys_agree_chunk_by_chunk(daemon: DaemonProcess) -> None:
    """K100: one wins, the others are told `exists` (or `busy` while it writes)."""
    prompt = Prompt(1, 100)
    told: list[Outcome] = []

    def work(number: int) -> None:
        order = list(range(10))
        random.Random(number).shuffle(order)
        with Client(daemon.socket, timeout_s=30) as client:
            handle = client.register(make_spec())
            for part in order:
                told.extend(prompt.store(client, handle, part * 10, part * 10 + 10))

    in_threads(16, work)
    assert set(told) <= {OK, Outcome.EXISTS, Outcome.BUSY}
    assert told.count(OK) == 100
    with Client(daemon.socket) as client:
        target = blank(100)
        assert client.load_chunks(make_spec().digest, prompt.hashes, target) == [OK] * 100
        assert all((t == d).all() for t, d in zip(target, prompt.data, strict=True))
        assert tier(client)["used_bytes"] == 100 * SIZE


def test_a_lookup_over_ranks_gives_one_number(daemon: DaemonProcess, client: Client) -> None:
    """K102: the prefix that all ranks have, leased for all; no lease for a surplus."""
    spec = make_spec(4096, ranks=4)
    handle = client.register(spec)
    prompt = Prompt(1, 20, 4096)
    for rank in range(4):
        for chunk in range(20):
            if (rank, chunk) != (2, 7):
                parent = prompt.hashes[chunk - 1] if chunk else None
                said = client.store_chunks(
                    handle, [prompt.hashes[chunk]], [prompt.prints[chunk]], [prompt.data[chunk]],
                    shards=(rank,), parent=parent, index0=chunk,
                )  # fmt: skip
                assert said == [OK]
    for _ in range(4):
        with Client(daemon.socket) as rank_client:
            rank_client.register(spec)
            with rank_client.lookup(handle, prompt.hashes, shards=(0, 1, 2, 3)) as found:
                assert found.leading == 7
                assert found.outcomes[7] is Outcome.PARTIAL
                assert tier(client)["leased_chunks"] == 7
        soon(lambda: tier(client)["leased_chunks"] == 0)
    said = client.store_chunks(
        handle, [prompt.hashes[7]], [prompt.prints[7]], [prompt.data[7]],
        shards=(2,), parent=prompt.hashes[6], index0=7,
    )  # fmt: skip
    assert said == [OK]
    assert client.lookup(handle, prompt.hashes, shards=(0, 1, 2, 3), lease=False).leading == 20

"""Sessions that come and go, in every phase, leave nothing behind."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest
from daemon import DaemonProcess
from server_raw import RawClient, dial, spec

from kvd.wire import LookupFlag
from kvd.wire.attach import AttachRequest, encode_attach

ROUNDS = 150
PHASES = 8


@pytest.fixture
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess() as found:
        yield found


def churn(daemon: DaemonProcess, round_: int) -> None:
    """One short session in each phase, all open at the same time."""
    open_: list[RawClient | socket.socket] = []
    for phase in range(PHASES):
        if phase == 0:
            open_.append(dial(daemon.socket))
            continue
        if phase == 1:
            half = dial(daemon.socket)
            half.send(encode_attach(AttachRequest(1, 0, "half", 0, None, None, None))[:20])
            open_.append(half)
            continue
        client = RawClient(daemon.socket, hello=phase > 2, maps=phase != 7)
        open_.append(client)
        if phase < 4:
            continue
        digest = client.register(spec())
        first = 1000 * round_ + 100 * phase
        if phase in (5, 7):
            client.reserve(digest, first, 3)
        if phase == 6:
            client.store(digest, first, 3)
            client.lookup(digest, first, 3, int(LookupFlag.LEASE | LookupFlag.LOAD))
    for each in open_:
        each.close()


def test_churn_leaves_descriptors_threads_sessions_and_memory_as_they_were(
    daemon: DaemonProcess, eventually
) -> None:
    """K107"""
    with RawClient(daemon.socket) as watcher:

        def quiet() -> bool:
            stat = watcher.stat()
            tier = stat["tiers"][0]
            return (
                stat["sessions"] == 1
                and tier["writing_bytes"] + tier["condemned_bytes"] + tier["leased_chunks"] == 0
            )

        for round_ in range(10):  # what is allocated once is there afterwards
            churn(daemon, round_)
        eventually(quiet)
        descriptors, threads, rss = daemon.descriptors, daemon.threads, daemon.rss
        for round_ in range(10, 10 + ROUNDS):
            churn(daemon, round_)
        eventually(quiet)
        eventually(lambda: daemon.descriptors <= descriptors + 2)
        assert daemon.threads == threads
        assert daemon.rss < rss + (8 << 20)
        assert (
            os.listdir(str(daemon.arena_base) + ".s")
            and len(os.listdir(str(daemon.arena_base) + ".s")) <= 2
        )
        assert watcher.stat()["loop"]["faults"] == 0


def test_sessions_beyond_the_limit_are_refused_and_a_place_becomes_free(eventually) -> None:
    from kvd.errors import LimitExceeded

    with DaemonProcess(args=("--limits-sessions", "2")) as daemon:
        one, two = RawClient(daemon.socket), RawClient(daemon.socket)
        with pytest.raises(LimitExceeded, match=r"limits\.sessions"):
            RawClient(daemon.socket)
        one.close()

        def another() -> bool:
            try:
                RawClient(daemon.socket).close()
            except LimitExceeded:
                return False
            return True

        eventually(another)
        two.close()

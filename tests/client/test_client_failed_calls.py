"""What a call that failed leaves behind: nothing that only a garbage collector would find. Engines
freeze it or turn it off, and what a failed call kept alive was a lock, or an engine's buffers."""

from __future__ import annotations

import gc
import os
import signal
import time
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
from daemon import DaemonProcess
from fake_daemon import keys, make_spec

from kvd.client import Client, SpecHandle
from kvd.client.call import Call
from kvd.errors import Busy, KvdError, Unavailable, UnknownHandle
from kvd.wire import messages as m

SIZE = 65536


@pytest.fixture
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess(arena_size="16MiB") as process:
        yield process


class Buffer(np.ndarray):  # type: ignore[type-arg]
    """An engine's: of a class that can be referred to weakly."""


def asks(client: Client, message: m.Request, timeout_s: float) -> weakref.ref[Buffer]:
    """An engine's call that fails, beside a buffer of its own; that buffer."""
    buffer = np.zeros(4096, np.uint8).view(Buffer)
    call = client.submit(message, [memoryview(buffer)], timeout_s)
    try:
        call.result()
    except KvdError:
        return weakref.ref(buffer)
    raise AssertionError("it did not fail")


@pytest.mark.usefixtures("uncollected")
def test_the_frames_of_a_call_that_failed_are_free_at_once(daemon: DaemonProcess) -> None:
    with Client(daemon.socket) as client:
        client.ping()
        assert asks(client, m.Release(12345), 5.0)() is None  # the daemon's own error
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            assert asks(client, m.Stat(), 0.2)() is None  # its deadline
        finally:
            os.kill(daemon.pid, signal.SIGCONT)


def reserves(daemon: DaemonProcess, client: Client, handle: SpecHandle) -> None:
    """A write that is left as it is, since the daemon answers no more."""
    write = client.reserve(handle, keys(4), [bytes(16)] * 4)
    assert len(write.granted) == 4
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        client.stat(timeout_s=0.2)
    except Unavailable:
        pass
    finally:
        os.kill(daemon.pid, signal.SIGCONT)


@pytest.mark.usefixtures("uncollected")
def test_what_nobody_writes_into_any_more_is_given_back_though_a_call_failed_beside_it(
    daemon: DaemonProcess,
) -> None:
    """Else its slots stay condemned for as long as that process lives."""
    with Client(daemon.socket) as looker:
        client = Client(daemon.socket)
        reserves(daemon, client, client.register(make_spec(nbytes=SIZE)))
        client.close()
        end = time.monotonic() + 5
        while (tier := looker.stat()["tiers"][0])["used_bytes"]:
            assert time.monotonic() < end, (tier["condemned_bytes"], tier["writing_bytes"])
            time.sleep(0.02)


@pytest.mark.usefixtures("uncollected")
def test_a_load_leaves_nothing_to_collect(daemon: DaemonProcess) -> None:
    with Client(daemon.socket) as client:
        handle = client.register(make_spec(nbytes=SIZE))
        payloads = [bytes(SIZE)] * 4
        client.store_chunks(handle, keys(4), [bytes(16)] * 4, payloads)
        gc.collect()
        for _ in range(3):
            client.load_chunks(handle, keys(4), [bytearray(SIZE) for _ in payloads])
            with client.lookup(handle, keys(4), load=True) as found:
                assert found.transfer is not None and len(list(found.transfer)) == 4
            del found
        assert gc.collect() == 0


def test_each_asking_for_a_result_raises_an_error_of_its_own_that_says_the_same(
    daemon: DaemonProcess,
) -> None:
    with Client(daemon.socket) as client:
        call = client.submit(m.Release(12345))
        seen = []
        for _ in range(2):
            with pytest.raises(UnknownHandle) as told:
                call.result()
            seen.append(told.value)
        first, second = seen
        assert first is not second and first.args == second.args and str(first)


def test_an_error_that_is_kept_says_all_that_it_said() -> None:
    call = Call(None, m.Heartbeat(), (), 0, None)  # type: ignore[arg-type]
    told = Busy("asks for too much", 1.5)
    told.__cause__ = OSError("why")
    call.fail(told)
    with pytest.raises(Busy, match="asks for too much") as seen:
        call.answer()
    assert seen.value.retry_after_s == 1.5 and seen.value.__cause__ is told.__cause__

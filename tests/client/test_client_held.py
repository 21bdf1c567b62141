"""What is held back to go out with the next question, and who asks whether an answer is there."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from fake_daemon import SLOT, FakeDaemon, Hold, in_child, keys, make_spec

from kvd.chunk import Outcome
from kvd.client import Client
from kvd.wire import messages as m

QUIET_S = 0.1  # what was sent is there long before


def eventually(what: Callable[[], object], timeout_s: float = 10) -> None:
    end = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < end, "did not come true in time"
        time.sleep(0.01)


def stored(client: Client, count: int) -> Any:
    handle = client.register(make_spec())
    said = client.store_chunks(handle, keys(count), None, [bytes(SLOT)] * count)
    assert said == [Outcome.OK] * count
    return handle


def released(client: Client) -> Any:
    """The handle of a chunk whose lease's end is held back."""
    handle = stored(client, 1)
    found = client.lookup(handle, keys(1))
    assert found.lease is not None
    found.lease.release(hold=True)
    return handle


def interrupt(client: Client, monkeypatch: pytest.MonkeyPatch, asked: int) -> None:
    """Instead of the question of that number."""
    submit, count = client.submit_at, 0

    def interrupted(*args: Any, **more: Any) -> Any:
        nonlocal count
        count += 1
        if count == asked:
            raise KeyboardInterrupt
        return submit(*args, **more)

    monkeypatch.setattr(client, "submit_at", interrupted)


def test_a_held_word_goes_out_with_the_next_question_and_before_it(
    fake: FakeDaemon, client: Client
) -> None:
    released(client)
    time.sleep(QUIET_S)
    assert fake.leases
    client.heartbeat()
    assert not fake.leases
    assert [type(seen.message) for seen in fake.executed[-2:]] == [m.Release, m.Heartbeat]


def test_a_held_word_goes_out_with_a_flush_that_waits_for_nothing(
    fake: FakeDaemon, client: Client
) -> None:
    handle = released(client)
    written = client.reserve(handle, keys(1, 50))
    assert not fake.leases
    call = written.submit_commit(hold=True)
    time.sleep(QUIET_S)
    assert fake.writes and not call.done
    client.flush()
    eventually(lambda: not fake.writes)
    assert written.committed(call) == [Outcome.OK]


def test_a_flush_of_a_client_that_is_closed_or_anothers_does_nothing(client: Client) -> None:
    client.heartbeat()
    assert in_child(lambda: client.flush()) == 0
    client.close()
    client.flush()


@pytest.mark.parametrize("what", ["load", "store"])
@pytest.mark.parametrize("asked", [2, 3, 4])
def test_a_stream_that_is_interrupted_between_a_held_word_and_its_question_leaves_nothing_behind(
    fake: FakeDaemon, client: Client, monkeypatch: pytest.MonkeyPatch, what: str, asked: int
) -> None:
    """By a signal, as a rule: nobody asks anything after it."""
    handle = stored(client, 32)
    interrupt(client, monkeypatch, asked)
    with pytest.raises(KeyboardInterrupt):
        if what == "load":
            client.load_chunks(handle, keys(32), lambda place, view: None, batch=4)
        else:
            client.store_chunks(handle, keys(32, 500), None, lambda place, view: None, batch=4)
    assert not client._channel._queue
    eventually(lambda: not fake.leases and not fake.writes)
    monkeypatch.undo()
    assert client.lookup(handle, keys(32), lease=False).leading == 32


def test_an_interrupted_load_of_what_is_not_there_lets_go_of_what_came_before(
    fake: FakeDaemon, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a batch of misses there is no lease with whose release the held one would go."""
    handle = stored(client, 4)
    interrupt(client, monkeypatch, 3)
    hashes = [*keys(4), *keys(8, 100)]
    with pytest.raises(KeyboardInterrupt):
        client.load_chunks(
            handle, hashes, lambda place, view: time.sleep(QUIET_S / 4), batch=4, every=True
        )
    eventually(lambda: not fake.leases, 2)


def test_whether_an_answer_is_there_is_asked_without_waiting(
    fake: FakeDaemon, client: Client
) -> None:
    client.heartbeat()
    hold = Hold()
    fake.script = lambda seen: hold if isinstance(seen.message, m.Stat) else None
    call = client.submit(m.Stat())
    assert hold.arrived.wait(10)
    begin = time.monotonic()
    assert not client.arrived(call)
    assert time.monotonic() - begin < 1
    hold.go()
    eventually(lambda: client.arrived(call))  # nobody else looks
    assert isinstance(call.result(), m.StatReply)


def test_an_answer_that_will_not_come_is_there(fake: FakeDaemon, client: Client) -> None:
    """Whoever takes its result is told why: nobody need wait for that."""
    client.heartbeat()
    fake.script = lambda seen: Hold()
    call = client.submit(m.Stat())
    assert not client.arrived(call)
    assert in_child(lambda: None if client.arrived(call) else 1 / 0) == 0
    client.close()
    assert client.arrived(call)

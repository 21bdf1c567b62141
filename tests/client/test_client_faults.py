"""What a client does when answers are lost or late, daemons stop, restart, or are the wrong one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from fake_daemon import SLOT, SWALLOW, FakeDaemon, Hold, Seen, in_child, keys, make_spec, readable

from kvd.chunk import Outcome
from kvd.client import Client
from kvd.errors import (
    AuthError,
    Draining,
    ErrorCode,
    LeaseLost,
    ProtocolError,
    StaleEpoch,
    Unavailable,
    UnknownHandle,
    VersionError,
    WrongInstance,
)
from kvd.wire import messages as m
from kvd.wire.attach import encode_attach_error

OK = Outcome.OK


def eventually(what: Any, timeout_s: float = 10) -> None:
    end = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < end, "did not come true in time"
        time.sleep(0.01)


def stored(client: Client, count: int) -> Any:
    handle = client.register(make_spec())
    said = client.store_chunks(handle, keys(count), None, [bytes([i]) * SLOT for i in range(count)])
    assert said == [OK] * count
    return handle


def only(kind: type, verdict: Any, times: int = 1) -> Any:
    """A script: the first `times` requests of one type get `verdict`."""
    left = [times]

    def script(seen: Seen) -> Any:
        if isinstance(seen.message, kind) and left[0] > 0:
            left[0] -= 1
            return verdict
        return None

    return script


# -- lost and late answers ------------------------------------------------------------------------


def test_a_lost_reply_ends_its_call_and_harms_no_later_one(
    fake: FakeDaemon, client: Client
) -> None:
    """K01"""
    handle = stored(client, 100)
    fake.script = only(m.Lookup, SWALLOW)
    begin = time.monotonic()
    with pytest.raises(Unavailable, match="no answer"):
        client.lookup(handle, keys(5), lease=False, timeout_s=0.3)
    assert time.monotonic() - begin < 3
    for count in range(1, 101):
        assert client.lookup(handle, keys(count), lease=False).leading == count


def test_a_lost_reply_is_asked_for_again_and_the_request_is_carried_out_once(
    fake: FakeDaemon, client: Client
) -> None:
    """K07"""
    handle = client.register(make_spec())
    fake.script = only(m.Reserve, SWALLOW)
    with client.reserve(handle, keys(3), timeout_s=10) as reservation:
        assert reservation.granted == [0, 1, 2]
    assert len(fake.requests(m.Reserve)) == 1
    assert client.counters.resends >= 1


def test_one_in_fifty_answers_lost_and_every_call_ends(fake: FakeDaemon, client: Client) -> None:
    """K07"""
    handle = stored(client, 50)
    count = [0]

    def script(seen: Seen) -> Any:
        count[0] += 1
        return SWALLOW if count[0] % 50 == 0 else None

    fake.script = script
    calls = [
        client.submit(
            m.Lookup(handle.digest, 1, (0,), b"".join(keys(50)), None, 0, 0, bytes(32), 0, 0),
            deadline_s=15,
        )
        for _ in range(300)
    ]
    done: list[Any] = []
    end = time.monotonic() + 15
    while len(done) < len(calls) and time.monotonic() < end:
        done += client.poll(1)
    assert set(done) == set(calls)
    assert all(call.result().leading == 50 for call in done)  # type: ignore[union-attr]
    link = client._channel._link
    assert link is not None and not link.pending


@pytest.mark.parametrize("what", ["reserve", "lookup", "lookup and reserve"])
def test_a_late_reply_to_an_abandoned_request_gives_back_what_it_granted(
    fake: FakeDaemon, client: Client, what: str
) -> None:
    handle = stored(client, 2)
    hold = Hold()
    fake.script = only(m.Reserve if what == "reserve" else m.Lookup, hold)
    with pytest.raises(Unavailable):
        if what == "reserve":
            client.reserve(handle, keys(3, 50), timeout_s=0.2)
        else:
            client.lookup(
                handle, keys(5), reserve_misses=what == "lookup and reserve", timeout_s=0.2
            )
    assert hold.arrived.wait(5) and (fake.writes or fake.leases)
    hold.go()

    def given_back() -> bool:
        client.heartbeat()
        return not fake.writes and not fake.leases

    eventually(given_back)
    assert client.counters.late == 1
    assert client.counters.given_back == (2 if what == "lookup and reserve" else 1)


def test_a_late_reply_to_a_load_cancels_its_transfer(fake: FakeDaemon, client: Client) -> None:
    handle = stored(client, 2)
    found = client.lookup(handle, keys(2))
    assert found.lease is not None
    fake.pending_load = True
    hold = Hold()
    fake.script = only(m.Load, hold)
    with pytest.raises(Unavailable):
        found.lease.load(timeout_s=0.2)
    assert hold.arrived.wait(5)
    hold.go()

    def cancelled() -> bool:
        client.heartbeat()
        return bool(fake.requests(m.Cancel))

    eventually(cancelled)


def test_a_cancelled_call_gives_back_what_it_was_granted_already(
    fake: FakeDaemon, client: Client
) -> None:
    handle = client.register(make_spec())
    message = m.Reserve(
        handle.digest, 1, (0,), keys(1)[0], bytes(32), 0, bytes(16), None, None, 0, 10**9
    )
    call = client.submit(message)
    eventually(lambda: client.poll(0.1) or call.done)
    assert fake.writes
    call.cancel()
    client.heartbeat()
    assert not fake.writes


def test_an_answer_that_comes_twice_is_taken_once(fake: FakeDaemon, client: Client) -> None:
    client.info()
    hold = Hold()
    fake.script = only(m.Stat, hold)
    call = client.submit(m.Stat())
    eventually(lambda: client.poll(0.01) or hold.arrived.is_set())
    hold.go()
    hold.go()
    assert call.result() == m.StatReply({"instance": fake.instance, "chunks": 0})
    client.heartbeat()
    client.heartbeat()
    assert client.counters.stray == 1


def test_lost_answers_do_not_hold_up_the_acknowledgement_for_ever(
    fake: FakeDaemon, client: Client
) -> None:
    client.info()
    fake.script = only(m.Stat, SWALLOW)
    with pytest.raises(Unavailable):
        client.stat(timeout_s=0.1)
    for _ in range(400):
        client.heartbeat()
    last = fake.seen[-1]
    assert last.ack > last.request - 250


# -- leases ----------------------------------------------------------------------------------------


def test_leaving_a_lease_that_ran_out_raises_lease_lost(fake: FakeDaemon, client: Client) -> None:
    handle = stored(client, 2)
    fake.lease_ns = 100_000_000
    with pytest.raises(LeaseLost), client.lookup(handle, keys(2), load=True) as found:
        assert found.transfer is not None
        time.sleep(0.15)
        with pytest.raises(LeaseLost):
            found.transfer.check(0)
    fake.lease_ns = None
    with client.lookup(handle, keys(2), load=True) as found:
        assert found.transfer is not None
        found.transfer.check()


@pytest.mark.parametrize("change", ["generation", "epoch"])
def test_a_slot_that_changed_under_a_lease_is_lease_lost(
    fake: FakeDaemon, client: Client, change: str
) -> None:
    handle = stored(client, 2)
    owner = fake.owner
    assert owner is not None
    with pytest.raises(LeaseLost), client.lookup(handle, keys(2), load=True) as found:
        transfer = found.transfer
        assert transfer is not None
        transfer.check()
        record = transfer._slots.ref(1)[1]
        if change == "generation":
            owner.table["generation"][record] = 99
            transfer.check(0)
            with pytest.raises(LeaseLost):
                transfer.check(1)
        else:
            fake.restart()
            with pytest.raises(LeaseLost):
                transfer.check(0)


def test_a_stream_calls_stale_what_changed_while_it_was_copied(
    fake: FakeDaemon, client: Client
) -> None:
    handle = stored(client, 8)
    owner = fake.owner
    assert owner is not None

    def take(index: int, view: memoryview) -> None:
        if index == 2:
            owner.table["generation"][fake.chunks[keys(8)[1], 0].record] = 5

    said = client.load_chunks(handle, keys(8), take, batch=4)
    assert said == [OK, Outcome.STALE, *[OK] * 6]


def test_an_error_inside_a_lease_is_not_hidden_by_its_loss(
    fake: FakeDaemon, client: Client
) -> None:
    handle = stored(client, 1)
    fake.lease_ns = 1
    with pytest.raises(RuntimeError, match="mine"), client.lookup(handle, keys(1)):
        raise RuntimeError("mine")


def test_a_release_that_is_waited_for_says_if_the_lease_had_ended(
    fake: FakeDaemon, client: Client
) -> None:
    handle = stored(client, 1)
    lease = client.lookup(handle, keys(1)).lease
    assert lease is not None
    fake.call(fake.leases.clear)
    with pytest.raises(LeaseLost):
        lease.release(wait=True)


# -- restarts and lost sessions --------------------------------------------------------------------


def test_a_restarted_daemon_is_found_and_told_the_specs_again(
    fake: FakeDaemon, client: Client
) -> None:
    """K92"""
    handle = stored(client, 3)
    epoch = client.info().epoch
    for _ in range(5):
        fake.restart()
        assert client.lookup(handle, keys(3), lease=False).leading == 0
        assert len([r for r in fake.executed if isinstance(r.message, m.RegisterSpec)]) >= 1
        assert client.store_chunks(handle, keys(3), None, [bytes(SLOT)] * 3) == [OK] * 3
    assert client.info().epoch > epoch
    assert client.counters.links == 6
    assert len(fake.sessions) == 1


def test_calls_in_flight_over_a_restart_are_asked_again_or_end(
    fake: FakeDaemon, client: Client
) -> None:
    """K92"""
    handle = stored(client, 1)
    lease = client.lookup(handle, keys(1)).lease
    assert lease is not None
    fake.script = lambda seen: SWALLOW if isinstance(seen.message, (m.Lookup, m.Renew)) else None
    message = m.Lookup(handle.digest, 1, (0,), keys(1)[0], None, 0, 0, bytes(32), 0, 0)
    asked = client.submit(message)
    held = client.submit(m.Renew(lease.id, 10**9))
    eventually(lambda: client.poll(0.01) or len(fake.requests(m.Renew)) == 1)
    fake.script = lambda seen: None
    fake.restart()
    assert asked.result() == m.LookupReply(b"\x02", 0, 0, 0, None, None)
    with pytest.raises(Unavailable, match="session ended"):
        held.result()


def test_a_handle_of_an_earlier_session_is_stale(fake: FakeDaemon, client: Client) -> None:
    """K97: nothing of a dead session is accepted in the next one."""
    handle = stored(client, 1)
    lease = client.lookup(handle, keys(1)).lease
    reservation = client.reserve(handle, keys(1, 50))
    assert lease is not None
    fake.restart()
    client.heartbeat()
    with pytest.raises(StaleEpoch):
        lease.renew(10)
    with pytest.raises(StaleEpoch):
        reservation.commit()
    reservation.abort()
    lease.release()
    client.heartbeat()
    assert not [r for r in fake.executed if isinstance(r.message, (m.Abort, m.Release))]


@pytest.mark.parametrize("how", ["dropped", "forgotten"])
def test_a_session_that_the_daemon_ended_is_replaced(
    fake: FakeDaemon, client: Client, how: str
) -> None:
    handle = stored(client, 2)
    if how == "dropped":
        fake.drop_sessions()
    else:
        fake.forget_sessions()
    assert client.lookup(handle, keys(2), lease=False).leading == 2
    assert client.counters.lost == 1 and client.counters.links == 2


def test_the_mapping_of_an_adopted_arena_survives_a_restart(
    fake: FakeDaemon, client: Client
) -> None:
    handle = stored(client, 1)
    before = client._memory.maps[0]
    fake.restart()
    client.lookup(handle, keys(1))
    assert client._memory.maps[0] is before


def test_a_daemon_that_comes_back_within_the_deadline_is_only_slow(
    fake: FakeDaemon, client: Client
) -> None:
    """K92"""
    handle = stored(client, 1)
    fake.stop()
    back = threading.Timer(0.5, fake.start)
    back.start()
    try:
        assert client.lookup(handle, keys(1), lease=False, timeout_s=15).leading == 0
    finally:
        back.join()


def test_a_daemon_that_is_away_costs_a_deadline_and_no_more(
    fake: FakeDaemon, client: Client
) -> None:
    handle = stored(client, 1)
    fake.stop()
    for _ in range(3):
        begin = time.monotonic()
        with pytest.raises(Unavailable):
            client.lookup(handle, keys(1), timeout_s=0.2)
        assert time.monotonic() - begin < 2
    assert not client.connected
    fake.start()
    assert client.lookup(handle, keys(1)).leading == 0


def test_the_descriptor_tells_whoever_only_polls_that_the_session_ended(
    fake: FakeDaemon, client: Client
) -> None:
    client.info()
    assert client.poll() == [] and client.connected
    fake.restart()
    assert readable(client.fileno(), 5)
    client.poll()
    assert not client.connected
    call = client.submit(m.Stat())
    eventually(lambda: call in client.poll(0.1))
    assert isinstance(call.result(), m.StatReply)


# -- refusals --------------------------------------------------------------------------------------


def test_the_wrong_instance_is_refused_and_gets_nothing_from_us() -> None:
    """K98"""
    with FakeDaemon() as one, FakeDaemon() as other:
        with Client(one.socket, expected_instance=one.instance) as client:
            assert client.info().instance == one.instance
        begin = time.monotonic()
        with Client(other.socket, expected_instance=one.instance) as client:
            handle = make_spec()
            with pytest.raises(WrongInstance, match=one.instance):
                client.lookup(handle, keys(1))
            with pytest.raises(WrongInstance):
                client.info()
        assert time.monotonic() - begin < 3
        assert not other.requests(m.Lookup) and not other.requests(m.RegisterSpec)


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (ErrorCode.VERSION, VersionError),
        (ErrorCode.AUTH, AuthError),
        (ErrorCode.WRONG_INSTANCE, WrongInstance),
        (ErrorCode.PROTOCOL, ProtocolError),
    ],
)
def test_a_refusal_is_everyones_answer_at_once(
    fake: FakeDaemon, code: ErrorCode, error: type[Exception]
) -> None:
    """K04"""
    fake.attach_script = lambda request: encode_attach_error(code, "versions 2.0 and 1.0")
    with Client(fake.socket, timeout_s=30) as client:
        begin = time.monotonic()
        calls = [client.submit(m.Stat()) for _ in range(3)]
        for call in calls:
            with pytest.raises(error, match=r"2\.0 and 1\.0"):
                call.result()
        assert time.monotonic() - begin < 15, "and not at the deadline"
        assert not fake.executed
        fake.attach_script = lambda request: None
        assert client.info().instance == fake.instance


@pytest.mark.parametrize("garbage", [b"x", b"\x91\xa2ok", os.urandom(4000), b"\x00" * 5000])
def test_a_daemon_that_answers_garbage_is_a_typed_error(fake: FakeDaemon, garbage: bytes) -> None:
    """K03"""
    fake.attach_script = lambda request: garbage
    with Client(fake.socket, timeout_s=5) as client, pytest.raises(ProtocolError):
        client.info()


@pytest.mark.parametrize("garbage", [b"", b"\xc1", b"\x91\xa2ok", b"\x92\x01"])
def test_an_error_that_can_not_be_read_ends_its_call_and_the_session(
    fake: FakeDaemon, client: Client, garbage: bytes
) -> None:
    """And is raised to nobody else: neither who holds something back, nor who asks anew."""
    handle = stored(client, 1)
    fake.script = only(m.Stat, garbage)
    call = client.submit(m.Stat())

    def ended() -> bool:
        client.flush()
        return call.done

    eventually(ended)
    with pytest.raises(ProtocolError):
        call.result()
    assert client.lookup(handle, keys(1)).leading == 1
    assert client.counters.links == 2 and client.counters.lost == 1


def test_errors_of_a_request_leave_the_session_as_it_is(fake: FakeDaemon, client: Client) -> None:
    handle = stored(client, 1)
    for error in (Draining("ends"), UnknownHandle("no"), ProtocolError("bad")):
        fake.script = only(m.Lookup, error)
        with pytest.raises(type(error)):
            client.lookup(handle, keys(1))
        assert client.lookup(handle, keys(1)).leading == 1
    assert client.counters.links == 1 and client.counters.lost == 0


def test_a_socket_that_one_may_not_use_is_an_auth_error_at_once(fake: FakeDaemon) -> None:
    if os.getuid() != 0:
        pytest.skip("needs root, to become somebody else")
    os.chmod(fake.directory, 0o755)
    os.chmod(fake.socket + ".a", 0o600)

    def child() -> None:
        os.setuid(65534)
        begin = time.monotonic()
        with Client(fake.socket, timeout_s=20) as client, pytest.raises(AuthError, match="group"):
            client.info()
        assert time.monotonic() - begin < 5

    assert in_child(child) == 0


# -- a peer that is stopped -----------------------------------------------------------------------


def test_a_stopped_daemon_is_unavailable_and_its_late_answers_are_given_back(
    tmp_path: Path,
) -> None:
    """K01: a real process, stopped by a real signal."""
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from fake_daemon import FakeDaemon\n"
        "with FakeDaemon() as fake:\n"
        "    print(fake.socket, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        try:
            with Client(process.stdout.readline().strip()) as client:
                handle = stored(client, 3)
                os.kill(process.pid, signal.SIGSTOP)
                os.waitpid(process.pid, os.WUNTRACED)
                begin = time.monotonic()
                with pytest.raises(Unavailable):
                    client.lookup(handle, keys(3), timeout_s=0.3)
                with pytest.raises(Unavailable):
                    client.stat(timeout_s=0.3)
                assert time.monotonic() - begin < 4
                os.kill(process.pid, signal.SIGCONT)
                assert client.lookup(handle, keys(3), lease=False, timeout_s=10).leading == 3
                eventually(lambda: client.heartbeat() or client.counters.late == 2)
                assert client.counters.given_back == 1
        finally:
            os.kill(process.pid, signal.SIGCONT)
            process.stdin.close()
            process.wait(20)

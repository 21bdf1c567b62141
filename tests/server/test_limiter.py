"""How many requests a tenant may make in a second, and that nothing is lost by it."""

from __future__ import annotations

import threading

import pytest
from daemon import DaemonProcess
from server_raw import RawClient

from kvd.chunk import KVSpec, Outcome, ShardSpec
from kvd.client import Client
from kvd.errors import Busy
from kvd.server.limiter import LIMITED, Limiter
from kvd.wire import Op
from kvd.wire import messages as m

S = 1_000_000_000


def test_a_seconds_worth_at_once_and_then_one_at_a_time() -> None:
    limiter = Limiter(lambda name: 10.0)
    now = 5 * S
    for _ in range(10):
        limiter.take("a", now)
    with pytest.raises(Busy) as busy:
        limiter.take("a", now)
    assert busy.value.retry_after_s == pytest.approx(0.1)
    limiter.take("a", now + S // 10)
    with pytest.raises(Busy):
        limiter.take("a", now + S // 10)
    limiter.take("b", now)  # another tenant's bucket


def test_what_was_told_is_when_it_works() -> None:
    limiter = Limiter(lambda name: 3.0)
    now, done = 0, 0
    for _ in range(100):
        try:
            limiter.take("a", now)
            done += 1
        except Busy as busy:
            now += round(busy.retry_after_s * S) + 1
    assert done >= 50 and done <= 3 + 3 * now / S + 1


def test_no_bound_and_a_bound_that_changes() -> None:
    rates = {"a": 0.0}
    limiter = Limiter(lambda name: rates[name])
    for _ in range(1000):
        limiter.take("a", 0)
    rates["a"] = 1.0
    limiter.take("a", 0)
    with pytest.raises(Busy):
        limiter.take("a", 0)


def test_what_gives_back_or_finishes_is_never_held_up() -> None:
    assert not LIMITED & {
        Op.ABORT, Op.RELEASE, Op.CANCEL, Op.BYE, Op.COMMIT, Op.RENEW, Op.WAIT, Op.HEARTBEAT,
        Op.HELLO, Op.REGISTER_SPEC,
    }  # fmt: skip


CONFIG = """
[tenants.default]
requests_s = 20
inflight = "128KiB"
"""


def test_a_daemon_tells_when_to_ask_again_and_a_client_does() -> None:
    shard = ShardSpec(0, 0, 0, 0, 0, 1, 0, 1, 65536)
    spec = KVSpec("m", "", "w", "e", "bf16", "", "c", 16, 1, 1, 1, (), (), (shard,))
    with DaemonProcess(arena_size="16MiB", config=CONFIG) as daemon:
        with RawClient(daemon.socket) as raw:
            refused = 0
            for _ in range(60):
                try:
                    raw.ask(m.Stat())
                except Busy as busy:
                    refused += 1
                    assert 0 < busy.retry_after_s <= 1
            assert refused >= 20
        with Client(daemon.socket, timeout_s=30) as client:
            handle = client.register(spec)
            keys = [bytes([n]) * 32 for n in range(40)]
            outcomes: list[Outcome] = []

            def store(part: list[bytes]) -> None:
                got = client.store_chunks(handle, part, None, [bytes(65536)] * len(part), batch=1)
                outcomes.extend(got)

            threads = [threading.Thread(target=store, args=(keys[n::2],)) for n in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert len(outcomes) == 40 and set(outcomes) <= {Outcome.OK, Outcome.OVER_QUOTA}
            assert client.counters.delayed > 0
            counters = client.stat()["counters"]
            assert counters["requests_delayed"] > 0

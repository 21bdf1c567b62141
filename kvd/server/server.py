"""The daemon: `startup`, `main_loop`, `shutdown`.

The law of this module: everything that may be refused is refused in `startup`, before readiness is
told; `main_loop` ends only by a signal; `shutdown` leaves nothing behind but the arena, which the
next start adopts.
"""

from __future__ import annotations

import gc
import logging
import signal
import time
from contextlib import ExitStack
from pathlib import Path

import zmq

from kvd.arena import ArenaOwner
from kvd.core import events as ev
from kvd.errors import ConfigError
from kvd.server import holding
from kvd.server.adoption import check_arena_path, open_core, policy_of
from kvd.server.attach import AttachServer
from kvd.server.carry import Carrier
from kvd.server.config import Config
from kvd.server.counters import Counters
from kvd.server.desk import Desk
from kvd.server.dispatch import Dispatcher
from kvd.server.doors import LOCAL_SHARE, Door, mark, raise_limit
from kvd.server.endpoint import Endpoint
from kvd.server.inline import Inline
from kvd.server.ladder import RECOVER_AGAIN_S, WATCH_S, Ladder
from kvd.server.limiter import Limiter
from kvd.server.lockwatch import LockWatch
from kvd.server.loop import Loop
from kvd.server.memory import Memory
from kvd.server.notify import Notifier
from kvd.server.recording import Recorder, no_record
from kvd.server.remembering import Keeper
from kvd.server.respond import Responder, new_router
from kvd.server.sessions import Sessions
from kvd.server.tcp import TcpEndpoint, TcpKeys, read_clients, read_secret_key
from kvd.server.telemetry import Telemetry
from kvd.server.tenancy import Tenancy, open_access, open_registry
from kvd.server.tiers import check_plans, plan_directory, plan_tiers
from kvd.server.transfers import Transfers
from kvd.slices import short
from kvd.wire import DEFAULT_LIMITS, Limits

__all__ = ["Server", "limits_of"]

log = logging.getLogger(__name__)

NS = 1_000_000_000
IDLE_MS = 1000
HAND_OVER_MS = 1
STOP_WORKERS_S = 5.0
DOOR_S = 0.5
HANDSHAKE_MS = 5000  # of who connects locally: until then it takes a descriptor, and says nothing
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def limits_of(config: Config, chunk_bytes: int) -> Limits:
    """The limits that this daemon tells its clients."""
    return DEFAULT_LIMITS._replace(
        inflight=config.max_inflight,
        lease_default_ns=int(config.lease_s * NS),
        lease_max_ns=int(config.lease_max_s * NS),
        ttl_default_ns=int(config.write_s * NS),
        ttl_max_ns=int(config.write_max_s * NS),
        chunk_bytes=chunk_bytes,
    )


class Server:
    """One daemon. `startup` raises ConfigError or ArenaError, and has then undone what it did."""

    def __init__(self, config: Config, notifier: Notifier | None = None) -> None:
        self.config = config
        self._notifier = notifier or Notifier()
        self._undo = ExitStack()
        self._draining_until: float | None = None
        self._stop = False

    # -- startup --------------------------------------------------------------------------------

    def startup(self) -> None:
        try:
            self._startup()
        except BaseException:
            self._undo.close()
            raise

    def _startup(self) -> None:
        config, undo = self.config, self._undo
        started_unix_ns = time.time_ns()
        undo.enter_context(short())  # the loop, and what it starts
        raise_limit()
        registry = open_registry(config)
        access = open_access(config, registry)
        keys = _tcp_keys(config)
        plans = plan_tiers(config)
        check_plans(config, plans)
        policy_of(config)
        self.endpoint = Endpoint(config.socket)
        self.endpoint.claim()
        undo.callback(self.endpoint.close)
        self.telemetry = Telemetry(config)
        undo.callback(self.telemetry.close)

        self.context = zmq.Context(io_threads=1)
        undo.callback(self.context.term)
        self.loop = Loop()
        undo.callback(self.loop.close)
        self.tcp = self._open_tcp(keys)

        check_arena_path(config)
        self.arena = ArenaOwner.open(
            config.arena_base,
            config.arena_size,
            slab_size=config.slab_size,
            instance=config.instance,
            now_unix_ns=time.time_ns(),
            huge_pages=config.huge_pages,
            sessions=config.max_sessions,
        )
        undo.callback(self._close_arena)
        self._served = False
        limits = limits_of(config, self.arena.slab_size)
        self.counters = Counters()
        self.transfers = Transfers(config.workers, stuck_s=config.stuck_s)
        undo.callback(self.transfers.close, STOP_WORKERS_S)
        self.ladder = Ladder(
            plans,
            self.arena.view,
            Path(config.arena_base),
            min(RECOVER_AGAIN_S, config.retry_s),
        )
        undo.callback(self.ladder.close)
        self.ladder.start()
        holding.prefer(held=bool(plans))
        self.directory = plan_directory(config, plans)
        if self.directory is not None:
            undo.callback(self.directory.close)
        opened = open_core(
            config,
            self.arena,
            access.namespaces + self.tcp_namespaces(keys),
            self.counters,
            [plan.config for plan in plans],
            registry.tenants(),
        )
        self.keeper = Keeper(
            Path(config.policy_file), config.instance, self.transfers.submit, self.counters
        )
        self.carrier = Carrier(
            opened.core, self.arena, self.transfers, self.counters, self.ladder, self.keeper
        )
        self.carrier.run(opened.actions)
        self.ladder.feed = self.carrier.feed
        self.ladder.recover(opened.core, self.carrier.run, self.transfers)
        self.ladder.watch()
        if self.directory is not None:
            self.directory.core, self.directory.feed = opened.core, self.carrier.feed
            self.ladder.completed = self.directory.completed
        self.adopted = opened
        self.lockwatch = LockWatch(
            lambda public_id: self.desk.lock_is_free(public_id),
            lambda public_id: self.carrier.feed(ev.LockFreed(public_id)),
        )
        for public_id in opened.locked:
            self.lockwatch.add(public_id, time.monotonic())

        self.sessions = Sessions(config.max_sessions, limits.inflight, limits.cached)
        responder = Responder(
            self.arena.epoch, self.counters, lambda session, why: self.desk.lost(session, why)
        )
        self.tenancy = Tenancy(registry, access, self.tcp, self.ladder.weigh)
        memory = Memory(self.arena, opened.core, self.transfers)
        self.desk = Desk(
            config=config,
            access=access,
            arena=self.arena,
            memory=memory,
            carrier=self.carrier,
            ladder=self.ladder,
            counters=self.counters,
            directory=self.directory,
            limits=limits,
            lockwatch=self.lockwatch,
            loop=self.loop,
            registry=opened.registry,
            started_unix_ns=started_unix_ns,
            tenancy=self.tenancy,
            sessions=self.sessions,
            telemetry=self.telemetry,
            transfers=self.transfers,
        )
        self.tenancy.host = self.desk
        inline = Inline(self.desk, self.arena, responder, limits)
        recorder = self._record()
        self.dispatcher = Dispatcher(
            self.desk,
            self.sessions,
            responder,
            inline,
            self.counters,
            limits,
            self.arena.epoch,
            Limiter(lambda name: registry.get(name).requests_s),
            recorder,
        )
        self._listen(limits)
        self.telemetry.start(self.loop, self.desk.figures, responder)
        self._timers()
        memory.start()
        if config.gc_freeze:
            gc.collect()
            gc.freeze()
            undo.callback(gc.unfreeze)
        self._served = True

    def tcp_namespaces(self, keys: TcpKeys | None) -> list[str]:
        return list(dict.fromkeys(keys.clients.values())) if keys is not None else []

    def _record(self) -> Recorder | None:
        """What records requests, if that is wanted. ConfigError if it can't."""
        config = self.config
        if config.trace_record is None:
            return None
        try:
            recorder = Recorder(
                Path(config.trace_record),
                config.trace_limit,
                self.carrier.core.chunk_tokens,
                lambda what: self.counters.reason("requests_recorded", what),
            )
        except OSError as error:
            raise no_record(config.trace_record, error) from None
        self._undo.callback(recorder.close)
        return recorder

    def _open_tcp(self, keys: TcpKeys | None) -> TcpEndpoint | None:
        if keys is None or self.config.tcp_endpoint is None:
            return None
        tcp = TcpEndpoint(
            self.context,
            self.config.tcp_endpoint,
            keys,
            heartbeat_s=self.config.tcp_heartbeat_s,
            max_frame=_max_frame(DEFAULT_LIMITS),
        )
        self._undo.callback(tcp.close)
        return tcp

    def _close_arena(self) -> None:
        """An arena that was made by a start that failed is of use to nobody."""
        if self._served or self.arena.adopted:
            self.arena.close()
        else:
            self.arena.destroy()

    def _listen(self, limits: Limits) -> None:
        self.router = new_router(self.context, _max_frame(limits))
        self.router.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        self._undo.callback(self.router.close)
        self._bind_local()
        self.door = Door("daemon.socket", self.router, mark(LOCAL_SHARE), self._bind_local)
        self._undo.callback(self.door.close)
        self.attach = AttachServer(self.loop, self.endpoint.listen_attach(), self.desk)
        self._undo.callback(self.attach.close)
        self.desk.attach_server = self.attach
        loop = self.loop
        loop.add_socket(self.router, lambda: self.dispatcher.drain(self.router))
        loop.add_socket(self.door.monitor, self.door.hear)
        loop.every(DOOR_S, self.door.watch)
        if self.tcp is not None:
            loop.add_socket(self.tcp.zap, self.tcp.answer_zap)
            loop.add_socket(self.tcp.monitor, self._tcp_gone)
            loop.every(DOOR_S, self.tcp.door.watch)
            loop.add_socket(self.tcp.socket, self._tcp_ready)
        loop.watch(self.ladder.completions.fileno(), lambda events: self.ladder.drain())
        loop.watch(self.ladder.news, lambda events: self.ladder.hear())
        if (directory := self.directory) is not None:
            loop.watch(directory.news, lambda events: directory.hear())
        loop.watch(self.transfers.wakeup, lambda events: self.transfers.drain())
        loop.on_signals(STOP_SIGNALS, self._on_signal)

    def _bind_local(self) -> None:
        path = self.config.socket
        self.endpoint.bind(path, lambda: self.router.bind(f"ipc://{path}"))

    def _tcp_gone(self) -> None:
        assert self.tcp is not None
        self.desk.tcp_gone(self.tcp.disconnected())

    def _tcp_ready(self) -> None:
        assert self.tcp is not None
        # ends first: libzmq may have given a dead connection's descriptor to a new one
        self._tcp_gone()
        self.dispatcher.drain(self.tcp.socket, tcp=True)

    def _timers(self) -> None:
        self.loop.every(1.0, self.transfers.watch)
        if self.ladder.tiers:
            self.loop.every(WATCH_S, self.ladder.watch)
        if self.directory is not None:
            self.loop.every(min(WATCH_S, self.config.directory_wait_s / 2), self.directory.watch)
        if self.config.eviction_keep_s:
            self.loop.every(
                self.config.eviction_keep_s, lambda now: self.carrier.feed(ev.Remember())
            )
        if self._notifier.watchdog_s is not None:
            self.loop.every(self._notifier.watchdog_s, lambda now: self._notifier.alive())

    # -- main loop ------------------------------------------------------------------------------

    def main_loop(self) -> None:
        """Serve until a signal ends it, and what it lets finish has finished."""
        self._notifier.ready(f"serving on {self.config.socket}")
        log.info("serving on %s, epoch %d", self.config.socket, self.arena.epoch)
        while not self._finished():
            self.loop.turn(self._wait_ms())
            core = self.carrier.core
            due = core.next_deadline()
            if core.busy or (due is not None and due <= time.monotonic_ns()):
                self.loop.requests()
                self.carrier.feed(ev.Tick())
            if len(self.lockwatch):
                self.lockwatch.poll(time.monotonic())

    def _wait_ms(self) -> int:
        core = self.carrier.core
        handed_over, self.ladder.handed_over = self.ladder.handed_over, False
        if core.busy:  # a worker that has just been given a job begins it while we wait
            return HAND_OVER_MS if handed_over else 0
        wait_ms = IDLE_MS
        lock_s = self.lockwatch.wait_s(time.monotonic()) if len(self.lockwatch) else None
        if lock_s is not None:
            wait_ms = min(wait_ms, int(lock_s * 1000) + 1)
        due = core.next_deadline()
        if due is not None:
            wait_ms = min(wait_ms, max(0, -(-(due - time.monotonic_ns()) // 1_000_000)))
        return wait_ms

    def _on_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        if self._draining_until is not None:
            log.warning("%s again: stopping at once", name)
            self._stop = True
            return
        log.info("%s: no more stores; loads have %g s", name, self.config.drain_s)
        self._draining_until = time.monotonic() + self.config.drain_s
        self.desk.draining = True
        self._notifier.stopping()
        self.carrier.feed(ev.Drain())

    def _finished(self) -> bool:
        if self._stop:
            return True
        if self._draining_until is None:
            return False
        if time.monotonic() >= self._draining_until:
            log.warning("drain_s is over; %d requests are cut off", self.sessions.inflight)
            return True
        return self.desk.idle

    # -- shutdown -------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Close everything; the arena stays for the next start."""
        sessions = len(self.sessions)
        for session in self.sessions.all():
            self.desk.end(session, "shutdown")
        self._keep_policies()
        self.arena.set_clean()
        self.telemetry.close(last=True)
        self._undo.close()
        log.info("stopped; %d sessions were open", sessions)

    def _keep_policies(self) -> None:
        try:
            self.keeper.write(self.carrier.core.remember())
        except Exception:  # a policy's fault must not leave sockets behind
            log.exception("what the policies know is not kept")


def _max_frame(limits: Limits) -> int:
    return max(limits.inline, limits.body + 4096)


def _tcp_keys(config: Config) -> TcpKeys | None:
    if config.tcp_endpoint is None:
        return None
    assert config.tcp_secret_key_file is not None and config.tcp_clients_file is not None
    if not zmq.has("curve"):
        raise ConfigError("tcp.endpoint: this libzmq has no CURVE; install pyzmq's own wheel")
    return TcpKeys(
        read_secret_key(config.tcp_secret_key_file), read_clients(config.tcp_clients_file)
    )

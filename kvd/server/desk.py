"""The desk where sessions are opened and closed, and where the server's own questions are answered.

The law of this module: whatever ends a session ends it here, once, and in this order: its token
means nothing any more, its connection is closed, the core lets its leases go. What it was writing
is reclaimed only when nothing can still write there: neither its process nor one of our threads.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass
from typing import Any

from kvd import __version__
from kvd.arena import ArenaOwner
from kvd.chunk import KVSpec
from kvd.core import events as ev
from kvd.core.actions import Result, StatResult, TierResult
from kvd.core.lower import unknown_tier
from kvd.errors import (
    ArenaError,
    AuthError,
    Draining,
    ErrorCode,
    InternalError,
    KvdError,
    LimitExceeded,
    WrongInstance,
)
from kvd.server.access import Access, Grant, Peer
from kvd.server.adoption import SpecRegistry
from kvd.server.attach import Attached, AttachServer
from kvd.server.carry import Carrier
from kvd.server.config import Config
from kvd.server.counters import Counters
from kvd.server.directory import SharedDirectory
from kvd.server.figures import Figures, Own
from kvd.server.ladder import Ladder
from kvd.server.lockwatch import LockWatch
from kvd.server.loop import Loop
from kvd.server.memory import Memory
from kvd.server.requests import Request
from kvd.server.sessions import Route, Session, Sessions
from kvd.server.shown import shown_settings
from kvd.server.tcp import namespace_of_user
from kvd.server.telemetry import Telemetry
from kvd.server.tenancy import Tenancy
from kvd.server.transfers import Job, Transfers
from kvd.tiers.base import Answer, Completion
from kvd.wire import Limits, common_features
from kvd.wire import messages as m
from kvd.wire.attach import ArenaTold, AttachReply, AttachRequest, encode_attach_reply

__all__ = ["Desk"]

log = logging.getLogger(__name__)

ARENA_NUMBER = 0
NS = 1_000_000_000
PROBE_S = 10.0


@dataclass(slots=True, eq=False, kw_only=True)
class Desk:
    """Implements what attach, dispatch and inline ask of the server."""

    config: Config
    access: Access
    arena: ArenaOwner
    carrier: Carrier
    counters: Counters
    directory: SharedDirectory | None
    ladder: Ladder
    limits: Limits
    lockwatch: LockWatch
    memory: Memory
    loop: Loop
    registry: SpecRegistry
    started_unix_ns: int
    tenancy: Tenancy
    sessions: Sessions
    telemetry: Telemetry
    transfers: Transfers
    attach_server: AttachServer | None = None
    draining: bool = False

    # -- attach ---------------------------------------------------------------------------------

    def attach(self, request: AttachRequest, peer: Peer) -> Attached:
        self._check_open(request.expected_instance, looks=not request.maps_memory)
        grant = self.access.grant(peer, request.token, request.namespace)
        session = self._open(grant, request.name, request.group_secret, peer, request.maps_memory)
        maps = request.maps_memory
        try:
            lock = [self.arena.session_lock_create(session.public_id)] if maps else []
        except (KvdError, OSError) as error:
            self.end(session, "lock")
            log.error("can't make a session lock: %s", error)
            raise InternalError(f"the daemon could not make the session's lock: {error}") from error
        reply = AttachReply(
            session.token,
            session.public_id,
            self.config.instance,
            self.arena.epoch,
            grant.namespace,
            grant.admin,
            self._arenas() if maps else (),
            time.monotonic_ns(),
        )
        descriptors = [self.arena.fd_arena, self.arena.fd_table, *lock] if maps else []
        log.info(
            "session %d: %r, pid %d, uid %d, namespace %r%s",
            session.number,
            session.name,
            peer.pid,
            peer.uid,
            grant.namespace,
            ", admin" if grant.admin else "",
        )
        return Attached(session, encode_attach_reply(reply), descriptors, lock)

    def attach_failed(self, error: KvdError) -> None:
        self.counters.reason("attach_refused", error.code.name.lower())
        log.info("attach refused: %s", error)

    def _arenas(self) -> tuple[ArenaTold, ...]:
        arena = self.arena
        return (ArenaTold(ARENA_NUMBER, arena.id, arena.size, arena.slab_size),)

    def _check_open(self, expected_instance: str | None, *, looks: bool = False) -> None:
        """`looks`: on this machine and without the arena, as an operator's tools do. They may
        watch a drain; engines are told to come back."""
        if self.draining and not looks:
            raise Draining("the daemon is shutting down; attach again when it is back")
        if expected_instance not in (None, self.config.instance):
            raise WrongInstance(
                f"this is kvd instance {self.config.instance!r}, not {expected_instance!r}"
            )
        if self.sessions.full:
            raise LimitExceeded(
                f"sessions: {len(self.sessions)} are open, limits.sessions allows no more"
            )

    def _open(
        self, grant: Grant, name: str, secret: bytes | None, peer: Peer | None, maps: bool
    ) -> Session:
        session = self.sessions.open(
            grant=grant,
            name=name,
            group_secret=secret,
            peer=peer,
            maps_memory=maps,
            now_s=time.monotonic(),
        )
        self.feed(
            ev.OpenSession(
                session.number,
                session.public_id,
                grant.namespace,
                session.group,
                grant.admin,
                session.name,
                maps,
            )
        )
        return session

    # -- the end of a session -------------------------------------------------------------------

    def lost(self, session: Session, why: str) -> None:
        self.end(session, why)

    def end(self, session: Session, why: str) -> None:
        if session.closed:
            return
        self.sessions.remove(session)
        self.counters.reason("sessions_ended", why)
        if session.connection is not None and self.attach_server is not None:
            self.attach_server.drop(session.connection)
            session.connection = None
        stopped = not session.maps_memory or self.lock_is_free(session.public_id)
        stopped = stopped and session.copies == 0
        self.feed(ev.CloseSession(session.number, stopped))
        if not stopped:
            self.lockwatch.add(session.public_id, time.monotonic(), copies=session.copies)
        log.info("session %d ended: %s", session.number, why)

    def lock_is_free(self, public_id: bytes) -> bool:
        """Whether no process can hold that session's mapping; what can't be asked is not free."""
        try:
            return self.arena.session_lock_free(public_id)
        except (ArenaError, OSError) as error:
            log.error("session lock %s: %s", public_id.hex(), error)
            return False

    # -- hello ----------------------------------------------------------------------------------

    def hello(self, request: Request, message: m.Hello) -> None:
        session = request.session
        if message.expected_instance not in (None, self.config.instance):
            raise WrongInstance(
                f"this is kvd instance {self.config.instance!r}, not {message.expected_instance!r}"
            )
        request.respond.result(
            request,
            m.HelloReply(
                self.config.instance,
                __version__,
                common_features(message.features),
                time.monotonic_ns(),
                self.limits,
                session.grant.namespace,
                session.grant.admin,
                self.limits.lease_default_ns,
                session.token,
            ),
            (),
        )

    def hello_tcp(self, route: Route, source: int, user: str, message: m.Hello) -> Session:
        for session in self.sessions.all():
            if session.peer is None and session.route == route:
                return session  # the first hello's reply was lost, or the client is not sure
        self._check_open(message.expected_instance)
        if not user:
            raise AuthError("no CURVE key was proved on this connection")
        namespace = namespace_of_user(user)
        if message.token is not None:
            namespace = self.access.by_token(message.token)
        namespace = self.access.choose(namespace, message.namespace, admin=False)
        session = self._open(
            Grant(namespace, False), message.client_name, message.group_secret, None, False
        )
        session.source = source
        log.info("session %d: %r over tcp, %r", session.number, session.name, namespace)
        return session

    def tcp_gone(self, sources: list[int]) -> None:
        """These connections have ended."""
        for source in sources:
            for session in self.sessions.all():
                if session.peer is None and session.source == source:
                    self.end(session, "connection")

    # -- requests that the server has a part in -------------------------------------------------

    def register_spec(self, request: Request, spec: KVSpec) -> None:
        step = _Then(request, lambda result: self.registry.store())
        self.feed(ev.RegisterSpec(request.session.number, step, spec))

    def stat(self, request: Request) -> None:
        self.feed(ev.Stat(request.session.number, _StatStep(request, self)))

    def tier(self, request: Request, message: m.Tier) -> None:
        number = request.session.number
        if message.command != "probe":
            self.feed(ev.TierCommand(number, request, message.tier, message.command))
            return
        if not request.session.grant.admin:
            raise AuthError("commands to tiers need the admin role")
        tier = self.ladder.number(message.tier)
        if tier is None:
            raise unknown_tier(message.tier, [one.name for one in self.ladder.tiers])

        def done(completion: Completion) -> None:
            self.ladder.watch()
            ok = completion.answer is Answer.OK
            detail = completion.detail or completion.answer.value
            request.result(TierResult(ok, detail, 0))

        self.ladder.probe(tier, done, PROBE_S)

    def tenant(self, request: Request, message: m.Tenant) -> None:
        reply = self.tenancy.carry_out(message, request.session, self.carrier.core)
        request.respond.result(request, reply, ())

    def own_stat(self, stat: dict[str, Any], *, admin: bool) -> dict[str, Any]:
        """The core's answer and what only the server knows. How busy the daemon is with others is
        an admin's business: a tenant sees what it did itself."""
        if not admin:
            return {
                **stat,
                "tiers": self.ladder.stat(stat["tiers"], admin=False),
                "version": __version__,
                "pid": os.getpid(),
                "draining": self.draining,
                "loop": {"faults": self.loop.faults + self.counters.of("faults")},
            }
        return self._own(stat["tiers"]).added_to(stat)

    def figures(self) -> Figures:
        """A copy of what an administrator is shown, to be worked out elsewhere."""
        reading = self.carrier.core.reading()
        return Figures(reading, self._own(reading.tiers), self.config.tenant_metrics)

    def _own(self, tiers: list[dict[str, Any]]) -> Own:
        counted: dict[str, Any] = self.counters.snapshot()
        transfers = self.transfers.counters
        counted["transfers"] = {
            "done": transfers.done,
            "failed": transfers.failed,
            "stuck": transfers.stuck,
        }
        sections: dict[str, Any] = {
            "version": __version__,
            "pid": os.getpid(),
            "draining": self.draining,
            "loop": {
                "turns": self.loop.turns,
                "faults": self.loop.faults + self.counters.of("faults"),
                "longest_turn_ms": round(self.loop.longest_turn_s * 1000, 3),
                "requests_in_flight": self.sessions.inflight,
                "transfers_pending": self.transfers.pending,
                "workers_stuck": self.transfers.stuck,
                "locks_watched": len(self.lockwatch),
            },
            "started_unix_ns": self.started_unix_ns,
            "telemetry": self.telemetry.stat(),
            "arena": self.memory.origin(),
        }
        counted.update(self.telemetry.counted())
        if self.directory is not None:
            sections["directory"] = self.directory.stat()
        rows = self.ladder.stat(tiers, admin=True)
        rows[0] = {**rows[0], **self.memory.shown()}
        return Own(rows, counted, sections)

    # -- for inline transfers -------------------------------------------------------------------

    def feed(self, event: Any) -> None:
        directory = self.directory
        if directory is not None and type(event) is ev.Lookup and directory.ask_first(event):
            return
        self.carrier.feed(event)

    def submit(self, job: Job) -> None:
        self.transfers.submit(job)

    def copy_begins(self, request: Request) -> None:
        request.session.copies += 1

    def copy_ends(self, request: Request) -> None:
        session = request.session
        session.copies -= 1
        if session.closed:
            self.lockwatch.copy_done(session.public_id)

    # -- drain ----------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Nobody waits for an answer, and nobody holds what a stop would take away."""
        core = self.carrier.core
        return self.sessions.inflight == 0 and core.leases == 0 and not core.moving


class _Then:
    """A request with something to do before its reply goes out."""

    __slots__ = ("before", "request")

    def __init__(self, request: Request, before: Any) -> None:
        self.request = request
        self.before = before

    def result(self, result: Result) -> None:
        self.before(result)
        self.request.result(result)

    def fail(self, code: ErrorCode, message: str, retry_ns: int = 0) -> None:
        self.request.fail(code, message, retry_ns)


class _StatStep:
    __slots__ = ("desk", "request")

    def __init__(self, request: Request, desk: Desk) -> None:
        self.request = request
        self.desk = desk

    def result(self, result: StatResult) -> None:
        admin = self.request.session.grant.admin
        stat = self.desk.own_stat(result.stat, admin=admin)
        if admin:
            stat["config"] = shown_settings(self.desk.config)
        self.request.result(StatResult(stat))

    def fail(self, code: ErrorCode, message: str, retry_ns: int = 0) -> None:
        self.request.fail(code, message, retry_ns)

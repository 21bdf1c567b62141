"""Inline put and get: for clients that can't map the arena.

The law of this module: they are the same reserve, commit, lookup, load and release as everybody's,
taken in steps on the client's behalf, with a worker thread doing the one copy. A chunk is
delivered only if its slot's generation held after the last byte was copied. While a worker copies
for a session its slots are not given to anybody else, even if the session ends meanwhile.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import zmq

from kvd.chunk import Outcome, SlotRef, unpack_refs
from kvd.core import events as ev
from kvd.core.actions import (
    LoadResult,
    LookupResult,
    OutcomesResult,
    ReserveResult,
    Result,
    WaitResult,
)
from kvd.errors import Busy, ErrorCode, ProtocolError
from kvd.server.requests import Request
from kvd.server.respond import Responder
from kvd.server.transfers import Job
from kvd.server.unread import Waiting
from kvd.wire import GetFlag, Limits, LookupFlag
from kvd.wire import messages as m

if TYPE_CHECKING:
    from kvd.arena import ArenaOwner

__all__ = ["Inline", "InlineHost"]

log = logging.getLogger(__name__)

WAIT_NS = 30_000_000_000  # for the verification of what is loaded, without a deadline


class InlineHost(Protocol):
    def feed(self, event: Any) -> None: ...

    def submit(self, job: Job) -> None: ...

    def copy_begins(self, request: Request) -> None: ...

    def copy_ends(self, request: Request) -> None: ...


class Inline:
    """Starts puts and gets."""

    def __init__(
        self, host: InlineHost, arena: ArenaOwner, responder: Responder, limits: Limits
    ) -> None:
        self.host = host
        self.arena = arena
        self.responder = responder
        self.limits = limits

    def put(self, request: Request, message: m.Put, payload: list[zmq.Frame]) -> None:
        """One payload frame for each result, chunk-major."""
        due = len(message.hashes) // 32 * len(message.shards)
        if len(payload) != due:
            raise ProtocolError(f"put of {due} results came with {len(payload)} payload frames")
        step = _Put(self, request, [part.buffer for part in payload])
        self.host.feed(ev.Reserve(request.session.number, step, *message))

    def get(self, request: Request, message: m.Get) -> None:
        flags = LookupFlag.LEASE | LookupFlag.LOAD
        if message.flags & GetFlag.EVERY:
            flags |= LookupFlag.EVERY
        if message.flags & GetFlag.PUBLIC:
            flags |= LookupFlag.PUBLIC
        step = _Get(self, request, len(message.shards), message.flags)
        self.host.feed(
            ev.Lookup(
                session=request.session.number,
                request=step,
                spec=message.spec,
                kind=message.kind,
                shards=message.shards,
                hashes=message.hashes,
                fingerprints=message.fingerprints,
                flags=int(flags),
                lease_ns=self.limits.lease_default_ns,
                parent=ev.NO_PARENT,
                index0=0,
                ttl=0,
            )
        )


class _Step:
    """One answer of the core on the way; a failure of any ends the request."""

    __slots__ = ("inline", "request", "then")

    def __init__(
        self, inline: Inline, request: Request, then: Callable[[Any], None] | None = None
    ) -> None:
        self.inline = inline
        self.request = request
        self.then = then

    def result(self, result: Result) -> None:
        if self.then is not None:
            self.then(result)

    def fail(self, code: ErrorCode, message: str, retry_ns: int = 0) -> None:
        if self.then is not None:
            self.request.fail(code, message, retry_ns)

    def _copy_by_worker(
        self,
        what: str,
        run: Callable[[], Any],
        then: Callable[[Any], None],
        waiting: Waiting | None = None,
    ) -> None:
        """`then` gets what `run` returned, None if it failed; not called if the session has ended
        meanwhile. The request is answered even if `then` fails. `waiting`: over with the copy."""
        host, request = self.inline.host, self.request

        def done(result: Any) -> None:
            host.copy_ends(request)
            if waiting is not None:
                waiting.over = True
            if request.session.closed:
                return
            try:
                then(result)
            except Exception as error:
                log.exception("fault in %s", what)
                request.fail(ErrorCode.INTERNAL, f"unexpected {type(error).__name__} in the daemon")

        host.copy_begins(request)
        host.submit(Job(what, run, done))


def _ignored(inline: Inline, request: Request) -> _Step:
    """For a request whose answer changes nothing any more."""
    return _Step(inline, request, None)


class _Put(_Step):
    __slots__ = ("outcomes", "parts", "write")

    def __init__(self, inline: Inline, request: Request, parts: list[memoryview]) -> None:
        super().__init__(inline, request, self._reserved)
        self.parts = parts
        self.outcomes = bytearray()
        self.write = 0

    def _reserved(self, result: ReserveResult) -> None:
        self.outcomes = bytearray(result.outcomes)
        self.write = result.write
        granted = [i for i, o in enumerate(result.outcomes) if o == Outcome.GRANTED]
        refs = [SlotRef(*map(int, ref)) for ref in unpack_refs(result.refs)]
        fits: list[int] = []
        moves: list[tuple[memoryview, memoryview]] = []
        for item, ref in zip(granted, refs, strict=True):
            part = self.parts[item]
            if part.nbytes != ref.length:
                self.outcomes[item] = Outcome.MISMATCH
                continue
            fits.append(item)
            moves.append((self.inline.arena.view[ref.offset : ref.offset + ref.length], part))
        self.parts = []
        if len(fits) < len(granted):
            self._abort([item for item in granted if item not in fits])
        if not fits:
            self.request.respond.result(self.request, OutcomesResult(bytes(self.outcomes)), ())
            return
        self._copy_by_worker(
            "inline put", lambda: _copy_all(moves), lambda done: self._copied(fits, done)
        )

    def _copied(self, items: list[int], done: object) -> None:
        session = self.request.session
        if done is None:
            self._abort(items)
            self._answer(items, bytes([Outcome.FAILED]) * len(items))
            return
        committed = _Step(
            self.inline, self.request, lambda result: self._answer(items, result.outcomes)
        )
        self.inline.host.feed(
            ev.Commit(session.number, committed, self.write, _packed(items), None)
        )

    def _abort(self, items: list[int]) -> None:
        self.inline.host.feed(
            ev.Abort(
                self.request.session.number,
                _ignored(self.inline, self.request),
                self.write,
                _packed(items),
            )
        )

    def _answer(self, items: list[int], outcomes: bytes) -> None:
        for item, outcome in zip(items, outcomes, strict=True):
            self.outcomes[item] = outcome
        self.request.respond.result(self.request, OutcomesResult(bytes(self.outcomes)), ())


class _Get(_Step):
    __slots__ = ("flags", "keys", "known", "lease", "loaded", "outcomes", "refs", "shards")

    def __init__(self, inline: Inline, request: Request, shards: int, flags: int) -> None:
        super().__init__(inline, request, self._found)
        self.shards = shards
        self.flags = flags
        self.keys: list[int] = []  # position in the request of each leased key
        self.outcomes = bytearray()
        self.lease = 0
        self.loaded = bytearray()  # outcome of each result of the load
        self.refs: dict[int, SlotRef] = {}  # by result of the load
        self.known = 0

    def _found(self, result: LookupResult) -> None:
        self.outcomes = bytearray(
            outcome for outcome in result.outcomes for _ in range(self.shards)
        )
        self.lease = result.lease
        if result.load is None or not result.lease:
            # nothing is delivered, so nothing may say OK
            self._reply(bytearray(_not_ok(self.outcomes)), [])
            return
        if self.flags & GetFlag.EVERY:
            self.keys = [i for i, o in enumerate(result.outcomes) if o == Outcome.OK]
        else:
            self.keys = list(range(result.leading))
        load: LoadResult = result.load
        self.loaded = bytearray(load.outcomes)
        self._learn([i for i, o in enumerate(load.outcomes) if o == Outcome.OK], load.refs)
        if load.done or not load.transfer:
            self._copy()
        else:
            self.known = sum(outcome != Outcome.FAILED for outcome in load.outcomes)
            self._wait(load.transfer)

    def _wait(self, transfer: int) -> None:
        deadline = self.request.deadline or time.monotonic_ns() + WAIT_NS
        step = _Step(self.inline, self.request, lambda result: self._more(transfer, result))
        self.inline.host.feed(
            ev.Wait(self.request.session.number, step, transfer, self.known, deadline)
        )

    def _more(self, transfer: int, result: WaitResult) -> None:
        items = np.frombuffer(result.items, dtype="<u4").tolist()
        for item, outcome in zip(items, result.outcomes, strict=True):
            self.loaded[item] = outcome
        self._learn([i for i in items if self.loaded[i] == Outcome.OK], result.refs)
        self.known = result.known
        if result.done or not items:  # nothing new: the deadline
            self._copy()
        else:
            self._wait(transfer)

    def _learn(self, items: Sequence[int], refs: bytes) -> None:
        for item, ref in zip(items, unpack_refs(refs), strict=True):
            self.refs[item] = SlotRef(*map(int, ref))

    def _copy(self) -> None:
        """Deliver what fits one reply, from the start; what doesn't is SKIPPED."""
        self.outcomes = bytearray(_not_ok(self.outcomes))
        take: list[tuple[int, SlotRef]] = []
        room = self.inline.limits.inline
        for item, outcome in enumerate(self.loaded):
            at = self.keys[item // self.shards] * self.shards + item % self.shards
            ref = self.refs.get(item)
            if outcome != Outcome.OK or ref is None:
                self.outcomes[at] = outcome if outcome != Outcome.OK else Outcome.FAILED
            elif ref.length > room:
                room = 0
                self.outcomes[at] = Outcome.SKIPPED
            else:
                room -= ref.length
                take.append((at, ref))
        if not take:
            self._release()
            self._reply(self.outcomes, [])
            return
        arena, unread = self.inline.arena, self.inline.responder.unread
        try:
            size = sum(ref.length for _, ref in take)
            waiting = unread.copying(self.request.session, size)
        except Busy as busy:
            self._release()
            self.fail(busy.code, str(busy), int(busy.retry_after_s * 1e9))
            return
        self._copy_by_worker(
            "inline get",
            lambda: [_copy_out(arena, ref) for _, ref in take],
            lambda copied: self._copied([at for at, _ in take], copied),
            waiting,
        )

    def _copied(self, places: list[int], copied: list[bytes | None] | None) -> None:
        payload: list[bytes] = []
        for at, data in zip(places, copied or [None] * len(places), strict=True):
            if data is None:
                self.outcomes[at] = Outcome.FAILED if copied is None else Outcome.STALE
            else:
                self.outcomes[at] = Outcome.OK
                payload.append(data)
        self._release()
        self._reply(self.outcomes, payload)

    def _release(self) -> None:
        self.inline.host.feed(
            ev.Release(self.request.session.number, _ignored(self.inline, self.request), self.lease)
        )

    def _reply(self, outcomes: bytearray, payload: list[bytes]) -> None:
        self.request.respond.result(self.request, OutcomesResult(bytes(outcomes)), payload)


def _not_ok(outcomes: bytes | bytearray) -> bytes:
    """A hit that is not delivered is FAILED: the default of every result."""
    return bytes(outcomes).replace(bytes([Outcome.OK]), bytes([Outcome.FAILED]))


def _packed(items: Sequence[int]) -> bytes:
    return np.array(items, dtype="<u4").tobytes()


def _copy_all(moves: list[tuple[memoryview, memoryview]]) -> int:
    for target, source in moves:
        target[:] = source
    return len(moves)


def _copy_out(arena: ArenaOwner, ref: SlotRef) -> bytes | None:
    """The bytes of a slot, or None if it was not that slot any more after the last byte."""
    data = bytes(arena.view[ref.offset : ref.offset + ref.length])
    return data if int(arena.table[ref.record]["generation"]) == ref.generation else None

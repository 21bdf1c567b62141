"""Carries out what the core wants: replies, records, work for the threads.

The law of this module: actions are carried out in the order given, and the core is never entered
while a list of its actions is under way; an event that comes up meanwhile waits its turn. So what a
reply tells is already true in shared memory.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from kvd.chunk import State, payload_digest
from kvd.core import CoreFault
from kvd.core import actions as ac
from kvd.core import events as ev
from kvd.errors import ErrorCode
from kvd.native import named
from kvd.server.counters import Counters
from kvd.server.transfers import Job, Transfers

if TYPE_CHECKING:
    from kvd.arena import ArenaOwner
    from kvd.core import Core
    from kvd.server.ladder import Ladder
    from kvd.server.remembering import Keeper

__all__ = ["Carrier"]

log = logging.getLogger(__name__)

_STORES = frozenset({ev.Reserve, ev.Commit})  # behind or before them a client copies
_LOAD = int(ev.LookupFlag.LOAD)
_FORERUN = 8  # keys of a lookup that takes so long that its first read is begun before it
_SEAL_BYTES = 32 << 20  # hashed in one go, so that a store that comes waits some ms at most
_SEALS = 32
_RECORDS = (ac.AssignSlab, ac.WriteRecord, ac.PatchRecord)
_PATCH: Final = ac.PatchRecord  # most actions are one of these two
_WRITE: Final = ac.WriteRecord
_FREE: Final = State.FREE


def _freed(action: Any, then: Any) -> bool:
    """Whether an action frees a slot whose record is written anew right after it."""
    return (
        type(then) is _WRITE
        and type(action) is _PATCH
        and action.record == then.record
        and action.state is _FREE
    )


class Carrier:
    """Owns the core. `feed` is the only way to it."""

    def __init__(
        self,
        core: Core,
        arena: ArenaOwner,
        transfers: Transfers,
        counters: Counters,
        ladder: Ladder | None = None,
        keeper: Keeper | None = None,
    ) -> None:
        self.core = core
        self._ladder = ladder
        self._arena = arena
        self._transfers = transfers
        self._counters = counters
        self._waiting: deque[Any] = deque()
        self._busy = False
        self._seals: list[ac.Seal] = []  # of the list under way
        # Slots (record, generation) whose seals wait for a pause, and those of them that somebody
        # could not wait for: these need not be hashed once more.
        self._put_off: set[tuple[int, int]] = set()
        self._overtaken: set[tuple[int, int]] = set()
        self._carry: dict[type, Callable[[Any], None]] = {
            ac.Reply: self._reply,
            ac.Fail: self._fail,
            ac.AssignSlab: self._assign_slab,
            ac.LeaseHorizon: self._lease_horizon,
            ac.Seal: self._start_seal,
            ac.Verify: self._start_verify,
            ac.Copy: self._start_copy,
            ac.PolicyFailed: self._policy_failed,
        }
        if keeper is not None:
            self._carry[ac.Remembered] = lambda action: keeper.add(action.part)
        if ladder is not None:
            for kind in (ac.TierWrite, ac.TierRead, ac.TierScrub, ac.TierDelete):
                self._carry[kind] = ladder.add
            self._carry[ac.ScrubCursor] = ladder.scrubbed_to

    def feed(self, event: Any) -> None:
        """Give the core an event and carry out what it wants, now or after what is under way."""
        if self._busy:
            self._waiting.append(event)
            return
        self._busy = True
        try:
            self._handle(event)
            while self._waiting:
                self._handle(self._waiting.popleft())
        finally:
            self._busy = False

    def _handle(self, event: Any) -> None:
        kind = type(event)
        if kind in _STORES:
            self._transfers.hush_stores(self.core.writing_bytes)
            self.run(self._actions(self.core.handle, event))
            self._transfers.hush_stores(self.core.writing_bytes)
            return
        loads = kind is ev.Lookup and event.flags & _LOAD
        if loads or kind is ev.Load:
            self._transfers.hush()
        if kind is ev.Lookup and self._ladder is not None:
            self._ladder.asked()
        if loads and self._ladder is not None and self._ladder.tiers:
            if len(event.hashes) >= _FORERUN * ev.HASH_BYTES:
                self._forerun(event)
        self.run(self._actions(self.core.handle, event))

    def _actions(self, take: Callable[[Any, int], list[Any]], event: Any) -> list[Any]:
        """What the core wants of us for an event."""
        try:
            return take(event, time.monotonic_ns())
        except CoreFault as fault:  # what it did until then is true: the rest goes on from there
            log.exception("fault of the core in %s", type(event).__name__)
            self._counters.reason("faults", "core")
            return fault.actions

    def _forerun(self, lookup: ev.Lookup) -> None:
        """The first read of a load is on its way before all that it asks for is looked up."""
        actions = self._actions(self.core.forerun, lookup)
        if actions:
            self.run(actions)
            assert self._ladder is not None
            self._ladder.give_way()

    def _give_up(self, request: Any, error: Exception) -> None:
        """Each request is answered, come what may."""
        request.fail(ErrorCode.INTERNAL, f"unexpected {type(error).__name__} in the daemon")

    def run(self, actions: Sequence[Any]) -> None:
        """Carry out a list of actions. One that fails is logged; the ones after it still go, but
        what a reply behind a failed record would tell is not true: it becomes an error."""
        broken: Exception | None = None
        last = len(actions) - 1
        for n, action in enumerate(actions):
            kind = type(action)
            try:
                if kind is _PATCH:
                    if n == last or not _freed(action, actions[n + 1]):
                        self._patch_record(action)
                    # else the next one replaces all of the record, or goes wrong
                elif kind is _WRITE:
                    self._arena.write_record(action.record, action.header)
                elif broken is not None and kind is ac.Reply:
                    self._give_up(action.request, broken)
                else:
                    self._carry[kind](action)
            except Exception as error:  # must not take the actions behind it along
                log.exception("action failed: %s", type(action).__name__)
                self._counters.reason("faults", "action")
                if isinstance(action, ac.Reply):
                    self._give_up(action.request, error)
                elif isinstance(action, _RECORDS):
                    broken = error
                    if n and _freed(actions[n - 1], action):
                        self._free_after_all(actions[n - 1])
        if self._seals:
            self._submit_seals()
        if self._ladder is not None:
            self._ladder.flush()

    # -- replies --------------------------------------------------------------------------------

    def _reply(self, action: ac.Reply) -> None:
        action.request.result(action.result)  # type: ignore[attr-defined]

    def _fail(self, action: ac.Fail) -> None:
        action.request.fail(action.code, action.message, action.retry_ns)  # type: ignore[attr-defined]

    # -- records --------------------------------------------------------------------------------

    def _patch_record(self, action: ac.PatchRecord) -> None:
        # all fields in order; compiled, a star would make a list of them, and a tuple of that
        fields: tuple[Any, Any, Any, Any, Any] = action
        record, state, generation, flags, digest = fields
        self._arena.patch_record(record, state, generation, flags, digest)

    def _assign_slab(self, action: ac.AssignSlab) -> None:
        self._arena.assign_slab(action.slab, action.slot_size)

    def _lease_horizon(self, action: ac.LeaseHorizon) -> None:
        self._arena.lease_horizon = action.until

    def _policy_failed(self, action: ac.PolicyFailed) -> None:
        log.error(
            "eviction policy of tier %s has failed; LRU takes over until the next start: %s",
            action.tier,
            action.error,
            exc_info=action.fault,
        )

    def _free_after_all(self, action: ac.PatchRecord) -> None:
        """What was to replace this record could not be written: it must not stay as it was."""
        try:
            self._patch_record(action)
        except Exception:  # the actions behind it still go
            log.exception("action failed: PatchRecord")
            self._counters.reason("faults", "action")

    # -- work for the threads -------------------------------------------------------------------

    def _start_seal(self, action: ac.Seal) -> None:
        if action.urgent:
            self._submit_seal([action], background=False)
        else:
            self._seals.append(action)

    def _submit_seals(self) -> None:
        """Those of one list together: a job and an event for each cost more than the hashing."""
        seals, self._seals = self._seals, []
        group: list[ac.Seal] = []
        nbytes = 0
        for seal in seals:
            if group and (nbytes + seal.length > _SEAL_BYTES or len(group) >= _SEALS):
                self._submit_seal(group, background=True)
                group, nbytes = [], 0
            group.append(seal)
            nbytes += seal.length
        self._submit_seal(group, background=True)

    def _submit_seal(self, seals: list[ac.Seal], *, background: bool) -> None:
        view, overtaken = self._arena.view, self._overtaken
        views = [view[seal.offset : seal.offset + seal.length] for seal in seals]
        slots = [(seal.record, seal.generation) for seal in seals]
        if background:
            self._put_off.update(slots)
        else:
            overtaken.update(self._put_off.intersection(slots))

        def run() -> list[bytes | None]:
            """None where a job that somebody waits for has come in between."""
            return [
                None if background and slot in overtaken else payload_digest(view)
                for slot, view in zip(slots, views, strict=True)
            ]

        def done(digests: list[bytes | None] | None) -> None:
            if digests is None:
                digests = [None if background and slot in overtaken else b"" for slot in slots]
            told = [
                named(ev.Sealed, (*slot, digest))
                for slot, digest in zip(slots, digests, strict=True)
                if digest is not None
            ]
            if background:
                self._put_off.difference_update(slots)
                overtaken.difference_update(slots)
            if told:
                self.feed(ev.SealedMany(told))

        self._transfers.submit(
            Job(
                f"seal record {seals[0].record}",
                run,
                done,
                background=background,
                gathers=background,
            )
        )

    def _start_verify(self, action: ac.Verify) -> None:
        view = self._arena.view[action.offset : action.offset + action.length]
        self._transfers.submit(
            Job(
                f"verify record {action.record}",
                lambda: payload_digest(view) == action.digest,
                lambda ok: self.feed(ev.Verified(action.record, action.generation, bool(ok))),
            )
        )

    def _start_copy(self, action: ac.Copy) -> None:
        source = self._arena.view[action.source : action.source + action.length]
        target = self._arena.view[action.target : action.target + action.length]

        def run() -> bool:
            target[:] = source
            return True

        self._transfers.submit(
            Job(
                f"copy {action.copy}",
                run,
                lambda ok: self.feed(ev.Copied(action.copy, bool(ok))),
            )
        )

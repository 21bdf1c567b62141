"""Reserves, commits and aborts, as they are asked for.

The law of this module: a request is checked whole before it has any effect; a tenant that has as
much in flight as it may is told when to ask again, and its request is not begun.
"""

from __future__ import annotations

from typing import Final

from kvd.core import events as ev
from kvd.core.answers import Answers
from kvd.core.checks import Checks
from kvd.core.reserves import Reserves
from kvd.core.reuses import Reuses
from kvd.core.store import Store
from kvd.core.write import Write
from kvd.core.writes import Writes
from kvd.errors import Busy, UnknownHandle

_RETRY_S: Final = 0.02  # a write takes about so long to be committed


class Stores:
    """Carries out what clients ask in order to store."""

    def __init__(
        self,
        store: Store,
        answers: Answers,
        checks: Checks,
        reserves: Reserves,
        writes: Writes,
        reuses: Reuses,
    ) -> None:
        self._store = store
        self._answers = answers
        self._checks = checks
        self._reserves = reserves
        self._writes = writes
        self._reuses = reuses

    def reserve(self, event: ev.Reserve) -> None:
        """Slots for a leading run of keys."""
        session = self._checks.session(event.session)
        space = self._checks.space(session, event.spec, event.kind)
        ask = self._checks.request(
            space,
            event.shards,
            event.hashes,
            event.parent,
            event.index0,
            event.fingerprints,
            event.tokens,
            event.pos0,
            event.flags,
            event.ttl,
        )
        if self._store.shares.room_in_flight(space.tenant) == 0:
            most = self._store.shares.rules(space.namespace).inflight
            raise Busy(
                f"bytes in flight: unfinished writes of the tenant hold all {most} bytes that they "
                "may; commit some, and ask again",
                _RETRY_S,
            )
        self._reuses.note(space, event.hashes, self._store.now, stored=True)
        self._answers.start(event, self._reserves.reserve(session, ask))

    def _write(self, event: ev.Commit | ev.Abort) -> tuple[Write, list[int]]:
        session = self._checks.session(event.session)
        write = session.writes.get(event.write)
        if write is None:
            raise UnknownHandle(f"write {event.write} is not an unfinished one of this session")
        if event.items is None:
            return write, write.granted()
        return write, self._checks.items(event.items, len(write.items))

    def commit(self, event: ev.Commit) -> None:
        """What was granted is written: it is readable from now on."""
        write, items = self._write(event)
        if event.digests is not None:
            self._checks.column("digests", event.digests, ev.DIGEST_BYTES, len(items))
        self._answers.start(event, self._writes.commit(write, items, event.digests))

    def abort(self, event: ev.Abort) -> None:
        """What was granted is not wanted any more."""
        write, items = self._write(event)
        self._answers.start(event, self._writes.abort(write, items))

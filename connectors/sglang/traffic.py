"""Pages between SGLang's host memory and the daemon.

The law of this module: every page has its own answer; True is said of a page only when the daemon
acknowledged it, or when it was checked after its last byte. What is in the way (another engine
stores the same page now, a page lies in another place of a chain) is waited for or gone around
within the deadline, never forgotten silently.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from kvd.chunk import KVSpec, Outcome
from kvd.client import Client, Selector
from kvd.connectors.sglang.config import Options
from kvd.connectors.sglang.daemon import Daemon
from kvd.connectors.sglang.keys import ROOT, Place
from kvd.connectors.sglang.stats import Stats

__all__ = ["Traffic"]

Copy = Callable[[int, memoryview], None]  # position in the batch, slot

_COPY_BYTES_PER_S = 512 << 20  # slower than any copy seen
_BATCH_BYTES = 32 << 20  # reserved or leased at a time
_THERE = (Outcome.OK, Outcome.EXISTS)
_POLL_S = (0.005, 0.05)


class Traffic:
    """The pages of one identity and shard."""

    def __init__(
        self, daemon: Daemon, spec: KVSpec, shard: int, options: Options, stats: Stats
    ) -> None:
        self.spec, self.shard = spec, shard
        self.nbytes = spec.shards[shard].nbytes  # of a page
        self._daemon, self._options, self._stats = daemon, options, stats
        self._batch = max(1, min(128, _BATCH_BYTES // self.nbytes))

    def start(self) -> bool:
        """Make the first contact; whether the daemon is there."""

        def hello(client: Client) -> bool:
            timeout_s = self._options.start_deadline_s
            self._daemon.admit(client, timeout_s)
            client.register(self.spec, timeout_s=timeout_s)
            return True

        return self._daemon.ask("start", hello, False)

    def leading(self, hashes: Sequence[bytes]) -> int:
        """How many of the leading pages are there. Takes no lease and touches nothing."""
        found = self._daemon.ask("lookup", lambda client: self._leading(client, hashes), 0)
        self._stats.add("asked", len(hashes))
        self._stats.add("found", found)
        return found

    def present(self, hashes: Sequence[bytes]) -> list[bool]:
        """Which pages are there, each for itself."""
        nothing = [False] * len(hashes)
        return self._daemon.ask("lookup", lambda client: self._present(client, hashes), nothing)

    def load(self, hashes: Sequence[bytes], take: Copy, *, every: bool) -> list[bool]:
        """Copy out the leading run (or `every` page that is there); True for what was delivered.
        What `take` wrote for any other page is worthless."""

        def question(client: Client) -> list[Outcome]:
            timeout_s = self._bound_s(self._options.load_deadline_s, len(hashes))
            self._daemon.admit(client, timeout_s)
            return client.load_chunks(
                self.spec, hashes, take, batch=self._batch, shards=(self.shard,), every=every,
                verify=self._options.verify, timeout_s=timeout_s,
            )  # fmt: skip

        begin = time.monotonic()
        outcomes = self._daemon.ask("load", question, [Outcome.FAILED] * len(hashes))
        got = outcomes.count(Outcome.OK)
        self._stats.loaded(got, got * self.nbytes, time.monotonic() - begin)
        self._count("load", outcomes, (Outcome.OK, Outcome.SKIPPED))
        return [outcome is Outcome.OK for outcome in outcomes]

    def store(self, hashes: Sequence[bytes], fill: Copy, place: Place) -> list[bool]:
        """Store pages of one chain that begins at `place`; True for each that is readable now."""
        begin = time.monotonic()
        nothing = [Outcome.FAILED] * len(hashes)
        outcomes = self._daemon.ask(
            "store", lambda client: self._store(client, list(hashes), fill, place), nothing
        )
        new = outcomes.count(Outcome.OK)
        self._stats.stored(new, new * self.nbytes, time.monotonic() - begin)
        self._stats.add("present", outcomes.count(Outcome.EXISTS))
        self._count("store", outcomes, _THERE)
        return [outcome in _THERE for outcome in outcomes]

    def clear(self) -> bool:
        """Evict every page of this identity, of all ranks; whether the daemon did. Pages that
        somebody is loading stay."""

        def question(client: Client) -> bool:
            client.evict(Selector(spec=self.spec.digest), timeout_s=30.0)
            return True

        return self._daemon.ask("clear", question, False)

    # -- questions, to be asked through the daemon ------------------------------------------------

    def _leading(self, client: Client, hashes: Sequence[bytes]) -> int:
        found = 0
        for part, leading, _ in self._looked_up(client, hashes, every=False):
            found += leading
            if leading < len(part):
                break
        return found

    def _present(self, client: Client, hashes: Sequence[bytes]) -> list[bool]:
        said: list[bool] = []
        for _, _, outcomes in self._looked_up(client, hashes, every=True):
            said += [outcome is Outcome.OK for outcome in outcomes]
        return said

    def _looked_up(
        self, client: Client, hashes: Sequence[bytes], *, every: bool
    ) -> Iterator[tuple[Sequence[bytes], int, Sequence[Outcome]]]:
        """Lookups of as many pages at a time as a request may name, within one deadline."""
        end = time.monotonic() + self._options.lookup_deadline_s
        step = self._daemon.admit(client, self._options.lookup_deadline_s).limits.keys
        for at in range(0, len(hashes), step):
            part = hashes[at : at + step]
            found = client.lookup(
                self.spec, part, shards=(self.shard,), lease=False, every=every,
                timeout_s=max(0.0, end - time.monotonic()),
            )  # fmt: skip
            yield part, found.leading, found.outcomes

    def _store(
        self, client: Client, hashes: list[bytes], fill: Copy, place: Place
    ) -> list[Outcome]:
        timeout_s = self._bound_s(self._options.store_deadline_s, len(hashes))
        end = time.monotonic() + timeout_s
        self._daemon.admit(client, timeout_s)
        said = self._put(client, hashes, range(len(hashes)), fill, place, end)
        if Outcome.MISMATCH in said:
            self._elsewhere(client, hashes, fill, said, end)
        if Outcome.BUSY in said:
            self._busy(client, hashes, fill, place, said, end)
        return said

    def _put(
        self, client: Client, hashes: list[bytes], which: range, fill: Copy, place: Place,
        end: float,
    ) -> list[Outcome]:  # fmt: skip
        """Store the pages `which` of the batch as a chain that begins at `place`."""
        return client.store_chunks(
            self.spec, hashes[which.start : which.stop], None,
            lambda item, slot: fill(which.start + item, slot),
            batch=self._batch, shards=(self.shard,), parent=place.parent, index0=place.number,
            timeout_s=max(0.0, end - time.monotonic()),
        )  # fmt: skip

    def _elsewhere(
        self, client: Client, hashes: list[bytes], fill: Copy, said: list[Outcome], end: float
    ) -> None:
        """Pages that were refused for their place: the same hash was stored with another parent or
        number (by an engine that passes no prefix keys). The hash covers all tokens before, so what
        is there is the same page; what is not there is stored as a chain of its own."""
        odd = [i for i, outcome in enumerate(said) if outcome is Outcome.MISMATCH]
        self._stats.add("elsewhere", len(odd))
        for i, there in zip(odd, self._present(client, [hashes[i] for i in odd]), strict=True):
            if there:
                said[i] = Outcome.EXISTS
        for run in _runs([i for i in odd if said[i] is Outcome.MISMATCH]):
            said[run.start : run.stop] = self._put(client, hashes, run, fill, ROOT, end)

    def _busy(
        self, client: Client, hashes: list[bytes], fill: Copy, place: Place,
        said: list[Outcome], end: float,
    ) -> None:  # fmt: skip
        """Pages that another engine is storing now: wait until they are there, or until it gave
        up, and store them then."""
        until = min(end, time.monotonic() + self._options.busy_wait_s)
        pause = _POLL_S[0]
        waiting = [i for i, outcome in enumerate(said) if outcome is Outcome.BUSY]
        while waiting and time.monotonic() < until:
            time.sleep(pause)
            pause = min(2 * pause, _POLL_S[1])
            there = self._present(client, [hashes[i] for i in waiting])
            for i, is_there in zip(waiting, there, strict=True):
                if is_there:
                    said[i] = Outcome.EXISTS
            waiting = [i for i in waiting if said[i] is Outcome.BUSY]
        for run in _runs(waiting):
            there_ = self._put(client, hashes, run, fill, place.at(run.start, hashes), end)
            said[run.start : run.stop] = there_

    def _bound_s(self, deadline_s: float, pages: int) -> float:
        return deadline_s + pages * self.nbytes / _COPY_BYTES_PER_S

    def _count(self, what: str, outcomes: Sequence[Outcome], but: tuple[Outcome, ...]) -> None:
        for outcome in set(outcomes).difference(but):
            self._stats.add(f"{what}.{outcome.name.lower()}", outcomes.count(outcome))


def _runs(numbers: Sequence[int]) -> Iterator[range]:
    """Ascending numbers as ranges without a gap."""
    begin = 0
    for at in range(1, len(numbers) + 1):
        if at == len(numbers) or numbers[at] != numbers[at - 1] + 1:
            yield range(numbers[begin], numbers[at - 1] + 1)
            begin = at

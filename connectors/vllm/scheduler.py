"""The scheduler's side: what is there, and what to load; what to store is planned beside it.

The law of this module: it runs inside the engine's loop, so nothing waits for the daemon; a match
is a lease, and every lease is released on every path: loaded, not used, local hit as long,
aborted, preempted, expired with the session. A match never says more than is leased, never more
than the prompt less one token, and is the same however often it is asked for in a step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from itertools import count
from typing import Any

from kvd.chunk import NO_PARENT, Kind, KVSpec
from kvd.client import Client
from kvd.connectors.vllm.config import Options
from kvd.connectors.vllm.daemon import Daemon
from kvd.connectors.vllm.identity import other_seeds
from kvd.connectors.vllm.keys import Adapters, ChunkKeys
from kvd.connectors.vllm.metadata import LoadJob, StepPlan, WorkerReport
from kvd.connectors.vllm.request import Entry, Phase
from kvd.connectors.vllm.room import Room
from kvd.connectors.vllm.stats import Counts
from kvd.connectors.vllm.stores import Stores
from kvd.connectors.vllm.written import written_by
from kvd.errors import DeadlineExceeded, KvdError, Unavailable
from kvd.wire import LookupFlag
from kvd.wire import messages as m

__all__ = ["SchedulerSide"]

log = logging.getLogger("vllm.kvd")

_LOAD_TIME_S = 5.0  # a lease must have that much left when its load begins


class SchedulerSide:
    """`block_tokens`: of each KV group; `hash_block`: tokens of one of vLLM's block hashes;
    `room`: for loads, where the engine itself does not see to it."""

    def __init__(
        self, options: Options, client: Client, *, chunk_tokens: int, block_tokens: Sequence[int],
        hash_block: int, room: Room | None = None,
    ) -> None:  # fmt: skip
        self.options = options
        self.counts = Counts()
        self.daemon = Daemon(client, options.lease_s)
        self.spec: KVSpec | None = None  # None: this engine goes without kvd
        self._client = client
        self._chunk = chunk_tokens
        self._block_tokens = tuple(block_tokens)
        self._hash_block = hash_block
        self._room = room
        self._checked = False  # that the session's namespace is the one that was meant
        self._encoding = b""
        self._shards: tuple[int, ...] = ()
        self._most = 0  # chunks in a lookup
        self._adapters = Adapters()
        self._entries: dict[str, Entry] = {}
        self._loads: list[LoadJob] = []
        self._written: set[int] = set()
        self._numbers = count(1)  # of jobs
        self._stores = Stores(
            options, self.daemon, self.counts, self._numbers, chunk_tokens, self._block_tokens
        )

    def start(self, spec: KVSpec, ranks: int, seed: str = "", timeout_s: float = 2.0) -> None:
        """From now on requests are served. Waits `timeout_s` for a daemon at most; one that comes
        later will do. `seed`: of vLLM's none-hash, compared with that of other engines."""
        self.spec, self._encoding, self._stores.ranks = spec, spec.encode(), ranks
        self._shards = tuple(range(len(spec.shards)))
        self._most = min(4096, 16384 // len(spec.shards))
        try:
            self._client.register(spec, timeout_s=timeout_s)
            self._check_namespace()
            self._compare_seeds(spec, seed, timeout_s)
        except KvdError as error:
            self.daemon.failed(error)

    def _compare_seeds(self, spec: KVSpec, seed: str, timeout_s: float) -> None:
        rows = self._client.list("specs", limit=1000, timeout_s=timeout_s).rows
        others = other_seeds(spec, {row["spec"] for row in rows}, seed)
        if others:
            log.warning(
                "kvd: this engine's block hashes start from seed %r (PYTHONHASHSEED, or vLLM's "
                "default), other engines' of this model from %s: they share nothing. Set "
                "PYTHONHASHSEED alike, or nowhere", seed, ", ".join(map(repr, others)),
            )  # fmt: skip

    def _check_namespace(self) -> None:
        """Once, as soon as there is a session."""
        wanted = self.options.namespace
        if self._checked or not wanted:
            return
        self._checked = True
        given = self._client.info().namespace
        if given != wanted:
            self.spec = None
            log.warning("kvd: this engine runs without kvd: the daemon gives it namespace %r, not "
                        "%r; see token_file", given, wanted)  # fmt: skip

    # -- matching -------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """A request came in: its lookup begins now, unless many others wait with a match."""
        entry = self._entry(request)
        if not self._serves(entry) or self.options.load_policy == "never":
            return
        holding = sum(e.holds_match for e in self._entries.values())
        if holding < self.options.lookahead:
            self._look_up(entry)

    def match(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """Tokens to load beyond the first `computed`, and whether that is done between steps;
        (None, False): not known yet."""
        entry = self._entry(request)
        if not self._serves(entry) or self.options.load_policy == "never" or entry.no_load:
            return 0, False
        if entry.phase in (Phase.SETTLED, Phase.LOADING):
            entry.restart(self.daemon)
        limit = self._limit(entry)
        if limit * self._chunk - computed < max(self.options.min_load_tokens, 1):
            return 0, False
        if entry.phase is Phase.KNOWN and entry.leading and not self._lease_holds(entry):
            entry.restart(self.daemon)
        if entry.phase is Phase.FRESH:
            self._look_up(entry)
        if entry.phase is Phase.ASKED:
            self._take_answer(entry)
            if entry.phase is Phase.ASKED:
                return None, False
        gain = min(entry.leading, limit) * self._chunk - computed
        if gain < max(self.options.min_load_tokens, 1):
            return 0, False
        if self._room is not None and not self._room.has(
            entry.request.num_tokens, (e.holds for e in self._entries.values() if e is not entry)
        ):
            return 0, False
        entry.local = computed
        return gain, True

    def allocated(self, request: Any, blocks: Sequence[Sequence[int]], external: int) -> None:
        """The request got its blocks (all of them, by group); `external` tokens are to be loaded.
        Called a second time, with 0, when they are."""
        entry = self._entry(request)
        if external <= 0:
            entry.holds = 0
            if entry.phase is not Phase.LOADING:
                self._settle(entry)
            return
        entry.holds = request.num_tokens
        begin, end = entry.local, entry.local + external
        first, last = begin // self._chunk, -(-end // self._chunk)
        rows = []
        for size, ids in zip(self._block_tokens, blocks, strict=True):
            width = self._chunk // size
            wanted = range(begin // size, -(-end // size))
            rows.append(tuple(ids[i] if i in wanted and i < len(ids) else 0
                              for i in range(first * width, last * width)))  # fmt: skip
        lease = entry.lease
        entry.job = next(self._numbers)
        entry.phase = Phase.LOADING
        entry.load_blocks = frozenset(i for row in rows for i in row if i)
        entry.stored = max(entry.stored, min(entry.leading, last))
        shared = lease.share() if lease is not None else (0, 0, 0)
        self._loads.append(
            LoadJob(entry.job, request.request_id, shared, first, last - first, tuple(rows))
        )
        self._written |= entry.load_blocks
        self.counts.add("loads")
        self.counts.add("matched_tokens", external)

    def break_load(self, request: Any, blocks: Sequence[Sequence[int]]) -> None:
        """The engine waits for a load that could not be planned: it is told to have failed."""
        rows = tuple(tuple(ids) for ids in blocks)
        job = LoadJob(next(self._numbers), request.request_id, (0, 0, 0), 0, 1, rows)
        self._loads.append(job)
        entry = self._entries.get(request.request_id)
        if entry is not None:
            entry.phase, entry.load_blocks = Phase.LOADING, frozenset(i for r in rows for i in r)

    def _settle(self, entry: Entry) -> None:
        """It runs without (another) load."""
        if entry.phase in (Phase.ASKED, Phase.KNOWN, Phase.FRESH):
            if entry.phase is Phase.KNOWN:
                entry.stored = max(entry.stored, entry.leading)
            if entry.let_go(self.daemon):
                self.counts.add("unused_matches")
            entry.phase = Phase.SETTLED

    def _entry(self, request: Any) -> Entry:
        entry = self._entries.get(request.request_id)
        if entry is None or entry.request is not request:
            if entry is not None:  # an id that was used before
                entry.let_go(self.daemon)
            entry = Entry(request, self._keys_of(request))
            self._entries[request.request_id] = entry
        return entry

    def _keys_of(self, request: Any) -> ChunkKeys | None:
        adapter = None
        if request.lora_request is not None:
            adapter = self._adapters.digest(request.lora_request)
            if adapter is None:
                self.counts.add("bypassed")
                return None
        return ChunkKeys(request, self._chunk, self._hash_block, adapter)

    def _serves(self, entry: Entry) -> bool:
        return self.spec is not None and entry.keys is not None

    def _limit(self, entry: Entry) -> int:
        """Chunks that may come out of kvd: the last token is always computed."""
        assert entry.keys is not None
        return min(entry.keys.available, (entry.request.num_tokens - 1) // self._chunk, self._most)

    def _lease_holds(self, entry: Entry) -> bool:
        return entry.lease_good_for(min(_LOAD_TIME_S, self.daemon.lease_s / 2))

    def _look_up(self, entry: Entry) -> None:
        """Send the lookup: ASKED, or KNOWN with nothing when there is nobody to ask."""
        assert self.spec is not None and entry.keys is not None
        limit = self._limit(entry)
        call = None
        if limit > 0:
            message = m.Lookup(
                self.spec.digest,
                int(Kind.PREFIX),
                self._shards,
                entry.keys.hashes(0, limit),
                entry.keys.fingerprints(0, limit),
                int(LookupFlag.LEASE),
                int(self.daemon.lease_s * 1e9),
                NO_PARENT,
                0,
                0,
            )
            call = self.daemon.ask(message, self.options.lookup_deadline_s)
        if call is None:
            entry.phase = Phase.KNOWN
            return
        self.counts.add("lookups")
        entry.call, entry.phase = call, Phase.ASKED
        entry.give_up_ns = call.deadline_ns

    def _take_answer(self, entry: Entry) -> None:
        """KNOWN as soon as the answer is there or its time is up."""
        call = entry.call
        assert call is not None
        if not call.done:
            self.daemon.look()
        if not call.done:
            if time.monotonic_ns() < entry.give_up_ns:
                return
            self.counts.add("lookup_timeouts")
            entry.let_go(self.daemon)
            entry.phase = Phase.KNOWN
            self.daemon.failed(Unavailable("a lookup was not answered in time"))
            return
        entry.call, entry.phase = None, Phase.KNOWN
        try:
            found = self._client.lookup_of(call)
        except (Unavailable, DeadlineExceeded) as error:
            self.counts.add("lookup_timeouts")
            self.daemon.failed(error)
        except KvdError as error:
            self.counts.add("lookup_errors")
            log.warning("kvd: lookup failed: %s", error)
        else:
            self.daemon.worked()
            entry.lease, entry.leading = found.lease, found.leading if found.lease else 0
            self._check_namespace()
            if self.spec is None:
                entry.let_go(self.daemon)
                entry.leading = 0

    # -- a step ---------------------------------------------------------------------------------

    def plan(self, output: Any) -> StepPlan:
        """The work of this step. Per-step state begins anew."""
        if self.daemon.expected:
            self.daemon.look()
        loads, self._loads = self._loads, []
        written, self._written = self._written, set()
        plan = StepPlan(self._encoding, loads)
        try:
            if self._stores:
                plan.written = frozenset(written | written_by(output, self._block_tokens))
            if self.spec is not None and self.options.store_policy != "never":
                plan.stores = self._stores.plan(output, self._entries)
        except Exception:  # the loads are promised, and the stores in flight must not go wrong
            log.exception("kvd: unexpected error while planning stores; going on without them")
            self.counts.add("errors")
            plan.stores, plan.all_written = [], True
        if not loads and not plan.stores:
            plan.spec = b""
        return plan

    def worker_output(
        self, received: Iterable[str], failed: Iterable[str], invalid: Iterable[int],
        report: WorkerReport | None,
    ) -> None:  # fmt: skip
        """What the workers have finished, once all of them have."""
        lost, invalid = set(failed), set(invalid)
        for name in received:
            entry = self._entries.get(name)
            if entry is None or entry.phase is not Phase.LOADING:
                continue
            entry.let_go(self.daemon)
            entry.phase = Phase.SETTLED
            if name in lost or not invalid.isdisjoint(entry.load_blocks):
                entry.no_load = True  # or it would be tried for ever
                entry.stored = 0
            entry.load_blocks = frozenset()
            if entry.ended:
                del self._entries[name]
        if report is None:
            return
        self._stores.told(report)
        if report.lost_daemon:
            self.daemon.failed(Unavailable("a worker lost the daemon"))

    def finished(self, request: Any) -> None:
        """The request is over, in whatever state: aborted before it was scheduled, while it loads,
        or done. Its blocks may go: stores are fenced from them."""
        entry = self._entries.get(request.request_id)
        if entry is None or entry.request is not request:
            return
        if entry.phase is Phase.LOADING:
            entry.ended = True  # the lease is needed until the workers are through
            return
        del self._entries[request.request_id]
        if entry.let_go(self.daemon):
            self.counts.add("unused_matches")

    @property
    def has_push_work(self) -> bool:
        """Stores are on their way, and not for longer than they may be; or a grant that nobody
        wants any more."""
        return self.daemon.expected or self._stores.awaited

    def reset(self) -> bool:
        """Forget what is stored under this identity (weights changed, or an operator asks)."""
        if self.spec is None:
            return True
        for entry in self._entries.values():
            if entry.phase in (Phase.ASKED, Phase.KNOWN):
                entry.restart(self.daemon)
        try:
            selector = m.Selector(spec=self.spec.digest)
            self._client.evict(selector, timeout_s=self.options.load_deadline_s)
        except KvdError as error:
            log.warning("kvd: the cache could not be reset: %s", error)
            return False
        return True

    def close(self) -> None:
        for entry in self._entries.values():
            entry.let_go(self.daemon)
        self._entries.clear()
        self._client.close()

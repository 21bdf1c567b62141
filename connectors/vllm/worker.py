"""The worker's side: pages to slots and back.

The law of this module: it does what the plan says and decides nothing. The model's thread only
queues, fences and collects; bytes move in two threads. A load is reported once, when nothing of it
is still copied, and as failed unless every chunk was checked after its last byte. A store never
reads a block that may be written to again: before such a step its copy ends or is given up.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from kvd.chunk import KVSpec, Outcome, payload_digest
from kvd.client import Client, SharedLease, SpecHandle, Transfer
from kvd.connectors.vllm.config import Options
from kvd.connectors.vllm.metadata import LoadJob, StepPlan, StoreJob, WorkerReport
from kvd.connectors.vllm.mover import Mover
from kvd.connectors.vllm.paging import HostCopier, Pages
from kvd.connectors.vllm.stats import Counts
from kvd.errors import AuthError, ClientClosed, DeadlineExceeded, KvdError, LeaseLost, Unavailable

__all__ = ["WorkerSide"]

log = logging.getLogger("vllm.kvd")

_BATCH = 8  # chunks reserved at once
_BYTES_A_SECOND = 512 << 20  # a load's deadline grows by this
_QUIET = (Outcome.EXISTS, Outcome.BUSY)
_AWAY = (Unavailable, DeadlineExceeded, ClientClosed, OSError)


class _Fenced(Exception):
    """A store's blocks are needed."""


class _Load(NamedTuple):
    job: LoadJob
    spec: bytes


class _Store:
    """A job in the store thread. `lock` is held while a chunk of it is copied."""

    def __init__(self, job: StoreJob, spec: bytes) -> None:
        self.job, self.spec = job, spec
        self.blocks = frozenset(i for row in job.blocks for i in row)
        self.begun = time.monotonic()
        self.lock = threading.Lock()
        self.given_up = False
        self.copied = 0  # chunks


class Results(NamedTuple):
    """What ended since the last call."""

    received: set[str]
    failed: set[str]  # of those
    invalid: set[int]  # blocks that hold nothing good


class WorkerSide:
    """`shard`: (pp, tp) of this rank's shard; `writes`: whether this rank stores (of ranks that
    hold the same bytes only one does)."""

    def __init__(
        self, options: Options, client: Client, pages: Pages, *, shard: tuple[int, int],
        writes: bool,
    ) -> None:  # fmt: skip
        self.counts = Counts()
        self._options = options
        self._client = client
        self._pages = pages
        self._place = shard
        self._writes = writes
        self._loader, self._storer = _copier(pages), _copier(pages)
        self._spec: tuple[bytes, SpecHandle, int] | None = None  # encoding, handle, shard
        self._lock = threading.Lock()  # of the results
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._invalid: set[int] = set()
        self._report = WorkerReport()
        self._open: dict[int, _Store] = {}  # stores whose copy may not be over
        self._loads = Mover[_Load]("kvd-load", self._load, self._load_broken)
        self._stores = Mover[_Store]("kvd-store", self._store, self._store_broken)

    # -- the model's thread ---------------------------------------------------------------------

    def before_step(self, plan: StepPlan) -> None:
        """Blocks are about to be written to: no store reads them any more when this returns. It
        waits for the copy of one chunk a job at most, never for the daemon."""
        if not self._open or not (plan.written or plan.all_written):
            return
        with self._lock:
            jobs = list(self._open.values())
        for store in jobs:
            touched = plan.all_written or not plan.written.isdisjoint(store.blocks)
            if touched and not store.given_up:
                with store.lock:
                    store.given_up = True
        self._storer.fence()

    def start_loads(self, plan: StepPlan) -> None:
        """Begin what the plan wants; a load that can't even begin has failed."""
        if not plan.loads:
            return
        try:
            self._loader.ready()
        except RuntimeError as error:  # what CUDA raises
            for job in plan.loads:
                self._load_broken(_Load(job, plan.spec), error)
            return
        for job in plan.loads:
            if not self._loads.put(_Load(job, plan.spec)):
                self._ended(job, range(job.chunks))

    def submit_stores(self, plan: StepPlan) -> None:
        """The step's forward is launched: its chunks may be stored."""
        if not plan.stores:
            return
        self._storer.ready()
        queued = sum(store.job.chunks for store in self._stores.waiting())
        for job in plan.stores:
            store = _Store(job, plan.spec)
            if not self._writes:
                self._stored(store)
                continue
            queued += job.chunks
            with self._lock:
                self._open[job.job] = store
            if queued > self._options.store_queue or not self._stores.put(store):
                self.counts.add("dropped_chunks", job.chunks)
                self._stored(store)

    def results(self) -> Results:
        """Each load once, after its end."""
        with self._lock:
            results = Results(self._received, self._failed, self._invalid)
            self._received, self._failed, self._invalid = set(), set(), set()
        return results

    def report(self) -> WorkerReport | None:
        """For the scheduler; None when there is nothing to say."""
        with self._lock:
            report, self._report = self._report, WorkerReport()
        return report if report.stored or report.lost_daemon else None

    def close(self, timeout_s: float = 3.0) -> None:
        """Finish the stores that are queued, within `timeout_s`, then end the threads."""
        end = time.monotonic() + timeout_s
        self._stores.drain(timeout_s)
        for mover in (self._stores, self._loads):
            mover.close(max(0.1, end - time.monotonic()))
        self._client.close()

    # -- loading --------------------------------------------------------------------------------

    def _load(self, load: _Load) -> None:
        with self._measured():
            self._carry_in(load)

    def _carry_in(self, load: _Load) -> None:
        job, begun = load.job, time.monotonic()
        nbytes = job.chunks * self._pages.chunk_bytes
        limit_s = self._options.load_deadline_s + nbytes / _BYTES_A_SECOND
        until = begun + limit_s
        if not job.lease[0]:
            raise LeaseLost("the match had no lease")
        _, shard = self._registered(load.spec, limit_s)
        lease = self._client.join(SharedLease(*job.lease), timeout_s=limit_s)
        transfer = lease.load(
            range(job.first, job.first + job.chunks),
            shards=(shard,),
            timeout_s=max(0.0, until - time.monotonic()),
        )
        taken: list[int] = []
        try:
            while True:
                ready = transfer.wait(max(0.0, until - time.monotonic()))
                for index in ready:
                    if self._take(transfer, job, index):
                        taken.append(index)
                if transfer.done or not ready:
                    break
        finally:
            self._loader.finish()
            transfer.cancel()
        good = self._checked(transfer, taken)
        bad = [chunk for chunk in range(job.chunks) if chunk not in good]
        self.counts.add("loaded_chunks", len(good))
        self.counts.add("loaded_bytes", len(good) * self._pages.chunk_bytes)
        self.counts.add("load_seconds", time.monotonic() - begun)
        if bad:
            log.warning("kvd: %d of %d chunks of request %s could not be loaded and are computed",
                        len(bad), job.chunks, job.request)  # fmt: skip
        self._ended(job, bad)

    def _take(self, transfer: Transfer, job: LoadJob, index: int) -> bool:
        view = transfer.view(index)
        self._loader.scatter(view, job.blocks, index)
        if not self._options.verify:
            return True
        digest = transfer.digest(index)
        return digest is None or digest == payload_digest(view)

    @staticmethod
    def _checked(transfer: Transfer, taken: list[int]) -> set[int]:
        """Those of the copied chunks whose bytes were theirs until after the last one."""
        try:
            transfer.check()
        except LeaseLost:
            good = set()
            for index in taken:
                try:
                    transfer.check(index)
                except LeaseLost:
                    continue
                good.add(index)
            return good
        return set(taken)

    def _load_broken(self, load: _Load, error: BaseException) -> None:
        log.warning("kvd: a load failed, it is computed instead: %s", error)
        self._note(error)
        self._ended(load.job, range(load.job.chunks))

    def _ended(self, job: LoadJob, bad: Any) -> None:
        """Report a load, with the blocks of the chunks that were not loaded."""
        lost = set()
        for row in job.blocks:
            width = len(row) // job.chunks
            lost |= {i for chunk in bad for i in row[chunk * width : (chunk + 1) * width] if i}
        if len(bad):
            self.counts.add("failed_loads")
            self.counts.add("failed_chunks", len(bad))
        with self._lock:
            self._received.add(job.request)
            if lost:
                self._failed.add(job.request)
                self._invalid |= lost

    # -- storing --------------------------------------------------------------------------------

    def _store(self, store: _Store) -> None:
        with self._measured():
            self._carry_out(store)

    def _carry_out(self, store: _Store) -> None:
        job, begun = store.job, time.monotonic()
        until = store.begun + self._options.store_deadline_s
        if begun >= until or store.given_up:
            reason = "fenced_chunks" if store.given_up else "dropped_chunks"
            self.counts.add(reason, job.chunks)
            self._stored(store)
            return
        handle, shard = self._registered(store.spec, until - begun)

        def fill(index: int, view: memoryview) -> None:
            with store.lock:
                if store.given_up:
                    raise _Fenced
                self._storer.gather(job.blocks, index, view)
            store.copied = index + 1

        try:
            outcomes = self._client.store_chunks(
                handle,
                job.hashes,
                job.fingerprints,
                fill,
                batch=_BATCH,
                shards=(shard,),
                parent=job.parent if job.index0 else None,
                index0=job.index0,
                timeout_s=until - time.monotonic(),
            )
        except _Fenced:
            self.counts.add("fenced_chunks", job.chunks - store.copied)
            self._stored(store)
            return
        stored = sum(outcome is Outcome.OK for outcome in outcomes)
        known = sum(outcome in _QUIET for outcome in outcomes)
        self.counts.add("stored_chunks", stored)
        self.counts.add("stored_bytes", stored * self._pages.chunk_bytes)
        self.counts.add("known_chunks", known)
        self.counts.add("unstored_chunks", len(outcomes) - stored - known)
        self.counts.add("store_seconds", time.monotonic() - begun)
        if Outcome.TOO_LARGE in outcomes:
            self._say_too_large()
        self._stored(store)

    def _say_too_large(self) -> None:
        if not self.counts.total.get("failed_stores"):
            log.warning(
                "kvd: a chunk has %d bytes, the daemon takes no larger one than %d: lower "
                "chunk_tokens, or give the daemon a larger arena (--arena-size, --arena-slab-size)",
                self._pages.chunk_bytes, self._client.info().limits.chunk_bytes,
            )  # fmt: skip
        self.counts.add("failed_stores")

    def _store_broken(self, store: _Store, error: BaseException) -> None:
        if not self.counts.total.get("failed_stores"):
            log.warning("kvd: a store failed (further ones are only counted): %s", error)
        self.counts.add("failed_stores")
        self._note(error)
        self._stored(store)

    def _stored(self, store: _Store) -> None:
        with self._lock:
            self._open.pop(store.job.job, None)
            self._report.stored[store.job.job] = 1

    # -- both -----------------------------------------------------------------------------------

    @contextmanager
    def _measured(self) -> Iterator[None]:
        begun = time.thread_time()
        try:
            yield
        finally:
            if self._options.measure:
                self.counts.add("hook_cpu_seconds", time.thread_time() - begun)

    def _note(self, error: BaseException) -> None:
        if isinstance(error, _AWAY):
            with self._lock:
                self._report.lost_daemon = True
        elif not isinstance(error, KvdError):
            log.error("kvd: unexpected in a worker", exc_info=error)
            self.counts.add("errors")

    def _registered(self, encoding: bytes, timeout_s: float) -> tuple[SpecHandle, int]:
        """The scheduler's spec, registered here, and the number of this rank's shard in it."""
        if self._spec is None or self._spec[0] != encoding:
            spec = KVSpec.decode(encoding)
            handle = self._client.register(spec, timeout_s=timeout_s)
            wanted, given = self._options.namespace, self._client.info(timeout_s).namespace
            if wanted and given != wanted:
                raise AuthError(f"the daemon gives this worker namespace {given!r}, not {wanted!r}")
            self._spec = (encoding, handle, spec.shard_index(*self._place))
        return self._spec[1], self._spec[2]


def _copier(pages: Pages) -> Any:
    if pages.device.type == "cpu":
        return HostCopier(pages)
    from kvd.connectors.vllm.device import DeviceCopier

    return DeviceCopier(pages)

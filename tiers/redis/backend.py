"""RedisBackend: a chunk is one string, its record and then its payload.

The law of this module: written only if absent, deleted only if it is ours, and counted from before
it is written until it is known not to lie there: what was sent and not answered counts, and is
deleted when the server works again, for nobody knows that it is there. Nothing is kept beside the
chunks, so that what a flush, an expiry or an eviction takes leaves nothing behind. Reads are
verified like every other tier's.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from kvd.chunk import HEADER_BYTES, IDENTITY_DTYPE, ChunkHeader, HeaderFlag, State
from kvd.errors import ConfigError
from kvd.tiers.backend import Backend, Found, Refused, Stored, failed
from kvd.tiers.base import NOWHERE, Answer, Key, Place, ProbeReport, Reason, Recovered, Usage
from kvd.tiers.redis.config import RedisConfig, ask, connect, shown
from kvd.tiers.tally import Tally

log = logging.getLogger(__name__)

# Delete a string only if its record's session (16 bytes at 216) is the owner's, and, when one is
# given, only that very record: a check and an act that nobody comes between.
_DELETE = """
local raw = redis.call('GETRANGE', KEYS[1], 0, 511)
if #raw < 512 then
  if #raw > 0 and ARGV[2] ~= '' and raw == ARGV[2] then redis.call('UNLINK', KEYS[1]) end
  return 0
end
if string.sub(raw, 217, 232) ~= ARGV[1] and ARGV[2] == '' then return 0 end
if ARGV[2] ~= '' and raw ~= ARGV[2] then return 0 end
redis.call('UNLINK', KEYS[1])
return 1
"""
_SCAN = 500
_UNTOLD = {Reason.SLOW, Reason.UNREACHABLE, Reason.OTHER}  # it may have been carried out
SETTLED_NS = 1_000_000_000  # a request that was given up may still be carried out for so long


class RedisBackend(Backend):
    by_key = True
    delete_batch = 64

    def __init__(self, config: RedisConfig) -> None:
        if config.limit_bytes < 1 << 20:
            raise ConfigError(
                f"tier redis: limit {config.limit_bytes} is too small: at least 1 MiB"
            )
        self._config = config
        self._owner = hashlib.sha256(b"kvd-installation-1" + config.installation.encode()).digest()[
            :16
        ]
        self._old_accounts = f"{config.prefix}:m1:{self._owner.hex()}"  # of earlier versions
        self._client: Any = None
        self._delete_script: Any = None
        self._lock = threading.Lock()
        self._mine: dict[bytes, int] = {}
        self._unsure: dict[bytes, tuple[int, int]] = {}  # name -> bytes, since when
        self._looked_at: set[bytes] = set()  # of those, the ones that are being deleted
        self._used = 0
        self._notes = Tally()
        for name in ("bad_records", "vanished", "taken_back"):
            self._notes.add(name, 0)

    @property
    def engine(self) -> str:
        return "redis"

    def _name(self, key: Key) -> bytes:
        digest = hashlib.sha256(b"kvd-object-1" + key.pack()).hexdigest()
        return f"{self._config.prefix}:c1:{digest}".encode()

    # -- opening --------------------------------------------------------------------------------

    def check(self) -> None:
        connect(self._config).close()

    def open(self) -> ProbeReport:
        if self._client is None:
            self._client = connect(self._config)
            self._delete_script = self._client.register_script(_DELETE)
        try:
            report = self.probe(0, write=True)
            ask("UNLINK", lambda: self._client.unlink(self._old_accounts))
            return report
        except Refused as refused:
            if refused.permanent:
                self.close()
                raise ConfigError(
                    f"tier redis: {shown(self._config.url)}: {refused.detail}"
                ) from refused
            raise

    def probe(self, deadline: int, *, write: bool) -> ProbeReport:
        client = self._client
        if client is None:
            raise failed(Reason.OTHER, "not open")
        name = f"{self._config.prefix}:probe:{self._owner.hex()}"
        began = time.perf_counter()
        ask("PING", client.ping)
        if write:
            value = str(time.time_ns()).encode()
            try:
                ask("SET", lambda: client.set(name, value, px=60_000))
            except Refused as refused:
                if refused.answer is not Answer.NO_SPACE:  # full is no fault: it still reads
                    raise
            else:
                if ask("GET", lambda: client.get(name)) != value:
                    raise failed(Reason.IO, "what was set is not what was got")
            self._tidy()
        took = (time.perf_counter() - began) * 1000
        return ProbeReport("redis", f"{shown(self._config.url)}, probed in {took:.1f} ms")

    # -- put, get, delete -----------------------------------------------------------------------

    def put(self, key: Key, header: ChunkHeader, source: memoryview, deadline: int) -> Stored:
        name, nbytes = self._name(key), self.cost(len(source))
        with self._lock:
            if name in self._looked_at:
                raise failed(Reason.CONFLICT, "an earlier write of it is being taken back")
            self._used -= self._unsure.pop(name, (0, 0))[0]
            known = self._mine.get(name)
            if known is None and self._used + nbytes > self._config.limit_bytes:
                raise Refused(Answer.NO_SPACE, Reason.NONE, "the tier's limit is reached")
            if known is None:
                self._used += nbytes
        record = header._replace(session=self._owner, generation=1, epoch=0).pack()
        written = unsure = False
        try:
            written = self._set_absent(name, key, header, record, source)
        except Refused as refused:
            unsure = known is None and refused.reason in _UNTOLD
            raise
        finally:
            with self._lock:
                if known is None and name in self._mine:  # a recovery has found, and counted, it
                    self._used -= nbytes
                elif written:
                    self._mine[name] = nbytes
                elif unsure:
                    self._unsure[name] = (nbytes, time.monotonic_ns())
                elif known is None:
                    self._used -= nbytes
        self._tidy()
        return Stored(NOWHERE, existed=not written)

    def _tidy(self) -> None:
        """The server works: delete what may have been written while it did not. What lies there and
        is ours is no chunk that anybody knows of."""
        with self._lock:
            before = time.monotonic_ns() - SETTLED_NS
            due = [name for name, (_, since) in self._unsure.items() if since <= before]
            due = due[: self.delete_batch]
            self._looked_at.update(due)
        if not due:
            return
        done: list[int] = []
        try:
            done = self._delete_names(due)
        except Refused as refused:
            log.info("tier redis: what became of a write is not known yet: %s", refused.detail)
        finally:
            with self._lock:
                self._looked_at.difference_update(due)
                for name in due if done else ():
                    self._used -= self._unsure.pop(name, (0, 0))[0]
        self._notes.add("taken_back", sum(done))

    def _set_absent(
        self, name: bytes, key: Key, header: ChunkHeader, record: bytes, source: memoryview
    ) -> bool:
        client = self._client
        life = int(self._config.ttl_s * 1000) or None
        value = b"".join((record, source))
        if not ask("SET", lambda: client.set(name, value, nx=True, px=life)):
            raw = ask("GETRANGE", lambda: client.getrange(name, 0, HEADER_BYTES - 1))
            try:
                there = ChunkHeader.unpack(raw)
            except ValueError as error:
                raise failed(Reason.CONFLICT, f"what lies there has no record: {error}") from error
            if Key.of(there) != key or there.length != header.length:
                raise failed(Reason.CONFLICT, "something else lies there")
            if there.fingerprint != header.fingerprint:
                raise failed(Reason.CONFLICT, "a chunk of other tokens lies there")
            if there.session != self._owner:
                return False
        return True

    def get(self, key: Key, place: Place, into: memoryview, deadline: int) -> Found:
        name = self._name(key)
        value = ask("GET", lambda: self._client.get(name))
        if value is None:
            self._vanished(name)
            raise Refused(Answer.MISS)
        try:
            header = ChunkHeader.unpack(value[:HEADER_BYTES])
            if header.length + HEADER_BYTES != len(value):
                raise ValueError("it is longer or shorter than its record says")
        except ValueError as error:
            self.quarantine(key, place, value[:HEADER_BYTES])
            raise Refused(Answer.CORRUPT, detail=str(error)) from error
        if header.length != len(into):
            raise Refused(Answer.MISS, detail="a chunk of another length lies there")
        into[:] = memoryview(value)[HEADER_BYTES:]
        return Found(header, value[:HEADER_BYTES])

    def _vanished(self, name: bytes) -> None:
        """Evicted by Redis, expired, or flushed: our accounts follow."""
        with self._lock:
            nbytes = self._mine.pop(name, None)
            if nbytes is not None:
                self._used -= nbytes
                self._notes.add("vanished")

    def delete(self, items: Sequence[tuple[Key, Place]], deadline: int) -> list[Answer]:
        names = [self._name(key) for key, _ in items]
        done = self._delete_names(names)
        answers = []
        for name, there in zip(names, done, strict=True):
            with self._lock:
                nbytes = self._mine.pop(name, None)
                if nbytes is not None:
                    self._used -= nbytes
            answers.append(Answer.OK if there else Answer.MISS)
        return answers

    def _delete_names(self, names: list[bytes]) -> list[int]:
        """1 for each that lay there and was ours."""

        def run() -> list[int]:
            with self._client.pipeline(transaction=False) as pipe:
                for name in names:
                    self._delete_script(keys=[name], args=[self._owner, b""], client=pipe)
                done: list[int] = pipe.execute()
                return done

        return ask("DELETE", run)

    def quarantine(self, key: Key, place: Place, version: object) -> None:
        """What does not hold helps nobody: it goes, whoever wrote it, if it is still that one."""
        name = self._name(key)
        raw = version if isinstance(version, bytes) else b""
        try:
            ask(
                "DELETE",
                lambda: self._delete_script(keys=[name], args=[self._owner, raw]),
            )
        except Refused:
            return  # it is found again, and verified again
        with self._lock:
            self._used -= self._mine.pop(name, 0)

    # -- recovery -------------------------------------------------------------------------------

    def recover(self) -> Iterator[Recovered]:
        """Every chunk under the prefix whose record holds; ours are counted."""
        client, cursor = self._client, 0
        seen: set[bytes] = set()
        while True:
            cursor, names = ask(
                "SCAN",
                partial(client.scan, cursor, match=f"{self._config.prefix}:c1:*", count=_SCAN),
            )
            fresh = [name for name in names if name not in seen]
            seen.update(fresh)
            rows = [self._look(name, raw) for name, raw in self._records(fresh)]
            told = b"".join(row[: IDENTITY_DTYPE.itemsize] for row in rows if row)
            if told:
                records = np.frombuffer(told, IDENTITY_DTYPE)
                none = np.zeros(len(records), np.uint64)
                yield Recovered(records, none, none)
            if cursor == 0:
                return

    def _records(self, names: list[bytes]) -> list[tuple[bytes, tuple[bytes, int]]]:
        def run() -> list[Any]:
            with self._client.pipeline(transaction=False) as pipe:
                for name in names:
                    pipe.getrange(name, 0, HEADER_BYTES - 1)
                    pipe.strlen(name)
                found: list[Any] = pipe.execute()
                return found

        found = ask("GETRANGE", run) if names else []
        return list(zip(names, zip(found[::2], found[1::2], strict=True), strict=True))

    def _look(self, name: bytes, found: tuple[bytes, int]) -> bytes | None:
        raw, size = found
        try:
            header = ChunkHeader.unpack(raw)
        except ValueError:
            self._notes.add("bad_records")
            return None
        holds = (
            self._name(Key.of(header)) == name
            and header.length + HEADER_BYTES == size
            and header.state == State.READY
            and header.flags & HeaderFlag.SEALED
        )
        if not holds:
            self._notes.add("bad_records")
            return None
        if header.session == self._owner:
            with self._lock:
                if name in self._looked_at:
                    return None
                self._used -= self._unsure.pop(name, (0, 0))[0]
                if name not in self._mine:
                    self._mine[name] = size
                    self._used += size
        return raw

    # -- telling --------------------------------------------------------------------------------

    def cost(self, length: int) -> int:
        return length + HEADER_BYTES

    def room(self, length: int) -> int:
        cost = self.cost(length)
        if cost > min(self._config.limit_bytes, self._config.largest_bytes):
            return -1
        with self._lock:
            return max(0, self._config.limit_bytes - self._used) // cost

    def usage(self) -> Usage:
        with self._lock:
            return Usage(self._config.limit_bytes, self._used, self._used, len(self._mine))

    def notes(self) -> dict[str, int]:
        return self._notes.counts()

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

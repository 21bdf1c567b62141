"""RedisBackend: a chunk is one string, its record and then its payload.

The law of this module: written only if absent, deleted only if it is ours, and counted from before
it is written until it is known not to lie there: what was sent and not answered counts, and is
deleted by a probe when the server works again, for nobody knows that it is there. Nothing is kept
beside the chunks, so that what a flush, an expiry or an eviction takes leaves nothing behind. Reads
are verified like every other tier's.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from kvd.chunk import HEADER_BYTES, IDENTITY_DTYPE, ChunkHeader, HeaderFlag, State
from kvd.errors import ConfigError
from kvd.tiers.backend import Backend, Found, Refused, Stored, Unsure, failed
from kvd.tiers.base import NOWHERE, Answer, Key, Place, ProbeReport, Reason, Recovered, Usage
from kvd.tiers.mine import Mine
from kvd.tiers.redis.config import RedisConfig, ask, connect, shown, take_again
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
        self._mine: Mine[bytes] = Mine(config.limit_bytes)
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
        name = f"{self._config.prefix}:probe:{self._owner.hex()}:{secrets.token_hex(4)}"
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
        begun = self._mine.begin(name, nbytes)
        record = header._replace(session=self._owner, generation=1, epoch=0).pack()
        try:
            ours = self._set_absent(name, key, header, record, source)
        except BaseException as error:
            if begun:
                sure = isinstance(error, Refused) and not isinstance(error, Unsure)
                (self._mine.failed if sure else self._mine.unsure)(name, nbytes)
            raise
        if begun:
            self._mine.end(name, nbytes, ours=ours)
        elif not ours:
            self._vanished(name)
        return Stored(NOWHERE, existed=not ours)

    def _tidy(self) -> None:
        """The server works: delete what may have been written while it did not. What lies there and
        is ours is no chunk that anybody knows of."""
        before = time.monotonic_ns() - SETTLED_NS
        due: list[bytes] = []
        while len(due) < self.delete_batch and (found := self._mine.look_for(before)):
            due.append(found[0])
        if not due:
            return
        gone = False
        try:
            self._notes.add("taken_back", sum(self._delete_names(due)))
            gone = True
        except Refused as refused:
            log.info("tier redis: what became of a write is not known yet: %s", refused.detail)
        except Exception:  # the server works, whatever else does not
            log.exception("tier redis: what may have been written can't be taken back")
        finally:
            for name in due:
                self._mine.looked(name, gone=gone)

    def _set_absent(
        self, name: bytes, key: Key, header: ChunkHeader, record: bytes, source: memoryview
    ) -> bool:
        client = self._client
        life = int(self._config.ttl_s * 1000) or None
        value = b"".join((record, source))
        take_again()
        try:
            was_set = ask("SET", lambda: client.set(name, value, nx=True, px=life))
        except Refused as refused:
            untold = take_again() or refused.reason in _UNTOLD
            raise (Unsure.of(refused) if untold else refused) from refused
        if not was_set:
            raw = self._record(name)
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

    def _record(self, name: bytes) -> bytes:
        """Of what was just said to lie there. Unsure if that can't be asked: it may be ours, of an
        attempt whose answer was lost."""
        try:
            raw: bytes = ask("GETRANGE", lambda: self._client.getrange(name, 0, HEADER_BYTES - 1))
            return raw
        except Refused as refused:
            raise Unsure.of(refused) from refused

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
        if self._mine.vanished(name):
            self._notes.add("vanished")

    def delete(self, items: Sequence[tuple[Key, Place]], deadline: int) -> list[Answer]:
        names = [self._name(key) for key, _ in items]
        done = self._delete_names(names)
        self._mine.forget(names)
        return [Answer.OK if there else Answer.MISS for there in done]

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
        self._mine.forget([name])

    # -- recovery -------------------------------------------------------------------------------

    def recover(self) -> Iterator[Recovered]:
        """Every chunk under the prefix whose record holds; ours are counted."""
        with self._mine.listing():
            yield from self._listed()

    def _listed(self) -> Iterator[Recovered]:
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
        ours = header.session == self._owner
        return raw if self._mine.listed(name, size, 0.0, ours=ours) else None

    # -- telling --------------------------------------------------------------------------------

    def cost(self, length: int) -> int:
        return length + HEADER_BYTES

    def room(self, length: int) -> int:
        cost = self.cost(length)
        if cost > min(self._config.limit_bytes, self._config.largest_bytes):
            return -1
        return self._mine.free_bytes // cost

    def usage(self) -> Usage:
        return self._mine.usage()

    @property
    def untidy(self) -> int:
        return self._mine.unsettled(time.monotonic_ns() - SETTLED_NS)

    def notes(self) -> dict[str, int]:
        return self._notes.counts()

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

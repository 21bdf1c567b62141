"""A directory that daemons share: who has which chunk in which bucket.

The law of this module: it is a positive hint with an expiry. Absent means: treat it as a miss, ask
nobody. Present means: try there, verify what comes, and `heal` the entry if it was not so. Nothing
depends on Redis: away, full or flushed, every answer is "not known", and within a bound.

    <prefix>:d1:<sha256 of the key>   hash: field <owner id hex> -> packed Entry; expires

An entry lives for `ttl_s` after it was told last: at a store, and whenever anybody has read the
chunk and seen that it holds; or after it was touched, by whoever has the chunk nearer and uses
it. What nobody wants is forgotten here before it is deleted there.

Calls block for at most `timeout_s`, so they belong into a worker thread. After a failure the
directory is left alone for a moment and answers at once.
"""

from __future__ import annotations

import hashlib
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from kvd.chunk import HEADER_BYTES, ChunkHeader
from kvd.errors import ConfigError
from kvd.tiers.backend import Refused
from kvd.tiers.base import Answer, Key
from kvd.tiers.breaker import SECOND, Breaker, BreakerConfig, BreakerState
from kvd.tiers.redis.config import RedisConfig, ask, connect, shown

T = TypeVar("T")
_HEAD = struct.Struct("<4sH")
_MAGIC = b"KVDE"
MOST_BUCKET = 512


class Entry(NamedTuple):
    """Where a chunk is, and its record, so that a daemon that never saw it can ask for it."""

    where: str  # the tier's address: "s3://bucket/prefix"
    header: ChunkHeader

    def pack(self) -> bytes:
        where = self.where.encode()
        if len(where) > MOST_BUCKET:
            raise ValueError(f"an address of {len(where)} bytes; at most {MOST_BUCKET}")
        return _HEAD.pack(_MAGIC, len(where)) + where + self.header.pack()

    @classmethod
    def unpack(cls, data: bytes) -> Entry:
        """ValueError for anything else than a packed entry."""
        if len(data) < _HEAD.size:
            raise ValueError("too short for an entry")
        magic, length = _HEAD.unpack_from(data)
        if magic != _MAGIC or len(data) != _HEAD.size + length + HEADER_BYTES:
            raise ValueError("no entry of this version")
        where = data[_HEAD.size : _HEAD.size + length].decode()
        return cls(where, ChunkHeader.unpack(data[_HEAD.size + length :]))


class Directory:
    """From any thread. `ttl_s` of the configuration is how long an entry lives unless it is told
    again; 0 takes an hour. Counters only grow."""

    def __init__(
        self,
        config: RedisConfig,
        clock: Callable[[], int] = time.monotonic_ns,
        longest_pause_s: float = 10.0,
    ) -> None:
        self._config = config
        self._ttl_ms = int((config.ttl_s or 3600.0) * 1000)
        self._owner = hashlib.sha256(b"kvd-installation-1" + config.installation.encode()).digest()[
            :16
        ]
        self._field = self._owner.hex()
        self._client = connect(config)
        self._clock = clock
        self._lock = threading.Lock()
        self._breaker = Breaker(
            BreakerConfig.up_to(int(longest_pause_s * SECOND))._replace(failures=1)
        )
        self.counters = {
            "told": 0, "untold": 0, "hits": 0, "misses": 0, "healed": 0, "forgotten": 0,
            "unavailable": 0, "bad": 0, "touched": 0,
        }  # fmt: skip
        self.last_error = ""

    def check(self) -> bool:
        """See whether it answers. ConfigError for what only an operator can mend; False if it is
        merely away: it heals by itself."""
        try:
            ask("PING", self._client.ping)
        except Refused as refused:
            if refused.permanent:
                where = shown(self._config.url)
                raise ConfigError(f"directory: {where}: {refused.detail}") from refused
            with self._lock:
                self._breaker.failure(self._clock())
                self.last_error = refused.detail
            return False
        return True

    @property
    def ttl_ns(self) -> int:
        """How long an entry lives."""
        return self._ttl_ms * 1_000_000

    @property
    def available(self) -> bool:
        return self._breaker.state is BreakerState.CLOSED

    def ping(self) -> bool:
        """Whether it answers; a directory that was away is asked again when its pause is over."""
        return bool(self._ask("PING", self._client.ping, default=False))

    def tell(self, entries: Sequence[Entry]) -> bool:
        """These chunks are there, for the directory's time to live from now: ours, or (a record
        that was read there names its owner) somebody's. False: could not be told."""

        def run() -> None:
            with self._client.pipeline(transaction=False) as pipe:
                for entry in entries:
                    name = self._name(Key.of(entry.header))
                    owner = entry.header.session
                    field = owner.hex() if any(owner) else self._field
                    pipe.hset(name, field, entry.pack())
                    pipe.pexpire(name, self._ttl_ms)
                pipe.execute()

        done = bool(entries) and self._ask("HSET", run, default=None, worked=True)
        self.counters["told" if done else "untold"] += len(entries)
        return bool(done)

    def touch(self, keys: Sequence[Key]) -> list[Key]:
        """These are in use: what is told of them lives as if it were told now. Returns those that
        nothing is told of, or not any more; none if it can't be asked."""

        def run() -> list[bool]:
            with self._client.pipeline(transaction=False) as pipe:
                for key in keys:
                    pipe.pexpire(self._name(key), self._ttl_ms)
                return [bool(there) for there in pipe.execute()]

        there = self._ask("PEXPIRE", run, default=[]) if keys else []
        self.counters["touched"] += sum(there)
        return [key for key, told in zip(keys, there, strict=False) if not told]

    def find(self, keys: Sequence[Key], where: str | None = None) -> list[Entry | None]:
        """Who has it, if anybody is known to (`where`: there): another's entry before our own.
        One round trip."""

        def run() -> list[dict[bytes, bytes]]:
            with self._client.pipeline(transaction=False) as pipe:
                for key in keys:
                    pipe.hgetall(self._name(key))
                found: list[dict[bytes, bytes]] = pipe.execute()
                return found

        nothing: list[dict[bytes, bytes]] = [{} for _ in keys]
        found = self._ask("HGETALL", run, default=nothing) if keys else nothing
        entries = [self._pick(key, there, where) for key, there in zip(keys, found, strict=True)]
        hits = sum(entry is not None for entry in entries)
        self.counters["hits"] += hits
        self.counters["misses"] += len(entries) - hits
        return entries

    def _pick(self, key: Key, there: dict[bytes, bytes], where: str | None) -> Entry | None:
        own = self._field.encode()
        for field in sorted(there, key=lambda field: (field == own, field)):
            try:
                entry = Entry.unpack(there[field])
            except (ValueError, UnicodeDecodeError):
                self.counters["bad"] += 1
                continue
            if Key.of(entry.header) != key:
                self.counters["bad"] += 1
            elif where is None or entry.where == where:
                return entry
        return None

    def heal(self, keys: Sequence[Key]) -> None:
        """What the directory said of these was not so: forget it, whoever told it. Who still has
        it tells it again."""

        def run() -> None:
            self._client.unlink(*(self._name(key) for key in keys))

        if keys:
            self._ask("UNLINK", run, default=None)
            self.counters["healed"] += len(keys)

    def forget(self, keys: Sequence[Key]) -> None:
        """We deleted these: our own entries go, others' stay."""

        def run() -> None:
            with self._client.pipeline(transaction=False) as pipe:
                for key in keys:
                    pipe.hdel(self._name(key), self._field)
                pipe.execute()

        if keys:
            self._ask("HDEL", run, default=None)
            self.counters["forgotten"] += len(keys)

    def close(self) -> None:
        self._client.close()

    def _name(self, key: Key) -> str:
        digest = hashlib.sha256(b"kvd-object-1" + key.pack()).hexdigest()
        return f"{self._config.prefix}:d1:{digest}"

    def _ask(self, what: str, call: Callable[[], T], default: Any, worked: Any = None) -> Any:
        with self._lock:
            if not self._breaker.allow(self._clock()):
                self.counters["unavailable"] += 1
                return default
        try:
            answer = ask(what, call)
        except Refused as refused:
            with self._lock:
                if refused.answer is Answer.NO_SPACE:  # full: nothing can be told, all be asked
                    self._breaker.success()
                else:
                    self._breaker.failure(self._clock())
                self.last_error = refused.detail
                self.counters["unavailable"] += 1
            return default
        with self._lock:
            self._breaker.success()
        return answer if worked is None else worked

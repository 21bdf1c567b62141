"""A record of requests, for `kvd-cli simulate`: when, how long, and which blocks are the same.

The law of this module: no token, no key and no name leaves the daemon: a block is 64 bits of a
keyed hash whose key lives as long as the process and is written nowhere. The loop only puts a
request into a queue; a thread of its own hashes and writes. What does not fit the queue or the disk
is left out and counted. Bounded: a file that is full becomes PATH.1, in place of the one before.
Nothing but such a record is moved or replaced.

One JSON object a line, as in the Mooncake traces: timestamp (ms since the record began),
input_length (tokens), output_length (0: not known here), hash_ids.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import secrets
import stat
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import IO, NamedTuple

from kvd.arena import why_no_file
from kvd.chunk import Kind
from kvd.errors import ConfigError
from kvd.wire import LookupFlag
from kvd.wire import messages as m

__all__ = ["Recorder", "check_record", "no_record"]

log = logging.getLogger(__name__)

HASH_BYTES = 32
MOST_WAITING = 1 << 16  # blocks in the queue
RETRY_S = 30.0  # after the disk refused
FIRST = b'{"timestamp":'  # how each line begins
_LEASE = int(LookupFlag.LEASE)


class Asked(NamedTuple):
    """One request, as it waits for the thread."""

    time_ns: int
    name: bytes  # of the space: blocks of two spaces are never the same
    hashes: bytes
    tokens: int


class Recorder:
    """`chunk_tokens(spec)`: tokens of a full chunk, 0 if the spec is unknown. `count(what)`:
    written, dropped, failed or partial; called from the loop alone."""

    def __init__(
        self,
        path: Path,
        limit: int,
        chunk_tokens: Callable[[bytes], int],
        count: Callable[[str], None],
    ) -> None:
        self._path = path
        self._half = max(limit // 2, 1)
        self._chunk_tokens = chunk_tokens
        self._count = count
        self._key = secrets.token_bytes(32)
        self._began = time.monotonic_ns()
        self._waiting: deque[Asked] = deque()
        self._blocks = 0  # in the queue
        self._ready = threading.Condition()
        self._closed = False
        self._file: IO[str] | None = None
        self._size = 0
        self._not_before = 0.0
        self._results: deque[str] = deque()
        self._rotate()
        self._thread = threading.Thread(target=self._run, name="kvd-trace", daemon=True)
        self._thread.start()

    # -- the loop's side ------------------------------------------------------------------------

    def note(self, namespace: str, message: m.Lookup | m.Get) -> None:
        """A request of an engine: a prefix lookup that leases, or an inline get."""
        if message.kind != Kind.PREFIX:
            return
        if isinstance(message, m.Lookup):
            if not message.flags & _LEASE:
                return
            if message.index0:  # the rest of a prompt whose beginning stands in another request
                self._count("partial")
                return
        blocks = len(message.hashes) // HASH_BYTES
        tokens = blocks * self._chunk_tokens(message.spec)
        if not tokens:
            return
        name = namespace.encode() + b"\0" + message.spec
        with self._ready:
            if self._blocks + blocks > MOST_WAITING:
                dropped = True
            else:
                dropped = False
                self._blocks += blocks
                self._waiting.append(Asked(time.monotonic_ns(), name, message.hashes, tokens))
                self._ready.notify()
        if dropped:
            self._count("dropped")
        while self._results:
            self._count(self._results.popleft())

    def close(self) -> None:
        """Write what waits, and end the thread."""
        with self._ready:
            self._closed = True
            self._ready.notify()
        self._thread.join(5.0)
        if self._file is not None:
            self._file.close()
            self._file = None

    # -- the thread's side ----------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._ready:
                while not self._waiting and not self._closed:
                    self._ready.wait()
                if not self._waiting:
                    return
                asked = self._waiting.popleft()
                self._blocks -= len(asked.hashes) // HASH_BYTES
                more = bool(self._waiting)
            self._results.append(self._write(asked, flush=not more))

    def _write(self, asked: Asked, *, flush: bool) -> str:
        """Never raises: a record is not worth a request."""
        if self._file is None and time.monotonic() < self._not_before:
            return "failed"
        try:
            if self._file is None or self._size >= self._half:
                self._rotate()
            assert self._file is not None
            line = self._line(asked)
            self._file.write(line)
            self._size += len(line)
            if flush:
                self._file.flush()
        except OSError as error:
            log.warning("requests are not recorded in %s: %s", self._path, error.strerror)
            self._not_before = time.monotonic() + RETRY_S
            self._file = None
            return "failed"
        return "written"

    def _line(self, asked: Asked) -> str:
        start = hashlib.blake2b(asked.name, digest_size=8, key=self._key)
        ids = []
        for at in range(0, len(asked.hashes), HASH_BYTES):
            one = start.copy()
            one.update(asked.hashes[at : at + HASH_BYTES])
            ids.append(int.from_bytes(one.digest(), "little"))
        row = {
            "timestamp": (asked.time_ns - self._began) // 1_000_000,
            "input_length": asked.tokens,
            "output_length": 0,
            "hash_ids": ids,
        }
        return json.dumps(row, separators=(",", ":")) + "\n"

    def _rotate(self) -> None:
        """Begin a new file; what there is becomes PATH.1."""
        if self._file is not None:
            self._file.close()
            self._file = None
        before = _before(self._path)
        if check_record(self._path):
            self._path.replace(before)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._file = open(os.open(self._path, flags, 0o600), "w", encoding="ascii")
        self._size = 0


def no_record(path: str, error: OSError) -> ConfigError:
    """What an operator is told."""
    return ConfigError(f"trace.record: {path} can't be written: {why_no_file(path, error)}")


def _before(path: Path) -> Path:
    """Where a record is moved to. OSError for the root, beside which no file stands."""
    if not path.name:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    return path.with_name(path.name + ".1")


def check_record(path: Path) -> bool:
    """Whether a record is there. FileExistsError if anything else is there, or in the place that
    a record is moved to: that stays as it is. OSError."""
    path.parent.lstat()
    _is_record(_before(path))
    return _is_record(path)


def _is_record(path: Path) -> bool:
    """Whether one is there, or an empty file. FileExistsError if something else is: a device, a
    directory, a file of somebody else's."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    if stat.S_ISREG(found.st_mode):
        with open(path, "rb") as file:
            if file.read(len(FIRST)) in (b"", FIRST):
                return True
    raise FileExistsError(errno.EEXIST, f"{path.name} is there and is no record", str(path))

"""What policies know, in a file beside the arena.

The law of this module: the file is whole or it is not there: written under another name, then
renamed. It is believed only if its check sum, version, instance and shape hold; what can't be
believed is a cold policy and a line in the log. Writing is a worker's business.

Layout: MAGIC, then msgpack values one after the other (a header, parts, None at the end), then the
CRC-32 of all before it as 4 bytes, little-endian.
"""

from __future__ import annotations

import logging
import os
import struct
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import msgpack

from kvd.arena import why_no_file
from kvd.core.recollection import Part, Recollection, collect
from kvd.server.counters import Counters
from kvd.server.files import open_file
from kvd.server.transfers import Job

__all__ = ["Keeper", "read_memory", "write_memory"]

log = logging.getLogger(__name__)

MAGIC = b"KVDPOL\r\n"
VERSION = 1
ENDING = ".policy"
MOST_BYTES = 1 << 30  # of a file that is read
_CRC = struct.Struct("<I")


def write_memory(path: Path, instance: str, parts: Iterable[Part]) -> None:
    """Write the file and put it in place. OSError if it can't be written: then what was there
    stands as it was."""
    header = {"version": VERSION, "instance": instance, "unix_ns": time.time_ns()}
    packer = msgpack.Packer()
    crc = 0
    temporary = path.with_name(path.name + ".new")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb") as file:
            for piece in chain([MAGIC], map(packer.pack, chain([header], parts, [None]))):
                file.write(piece)
                crc = zlib.crc32(piece, crc)
            file.write(_CRC.pack(crc))
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_memory(path: Path, instance: str) -> dict[str, Recollection]:
    """What an earlier life kept, by tier; nothing, and a line in the log, if it does not hold."""
    try:
        return _read(path, instance)
    except FileNotFoundError:
        return {}
    except Exception as error:  # noqa: BLE001 - whatever stands in the file must not stop a start
        log.warning(
            "eviction starts cold: %s does not hold (%s: %s)", path, type(error).__name__, error
        )
        return {}


def _read(path: Path, instance: str) -> dict[str, Recollection]:
    with open_file(path, follow=False) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MOST_BYTES:
            raise ValueError(f"{size} bytes, at most {MOST_BYTES}")
        data = file.read(MOST_BYTES)
    body = memoryview(data)[: -_CRC.size]
    if len(data) < len(MAGIC) + _CRC.size or data[: len(MAGIC)] != MAGIC:
        raise ValueError("no file of kvd")
    if zlib.crc32(body) != _CRC.unpack(data[-_CRC.size :])[0]:
        raise ValueError("wrong check sum")
    values = _values(body[len(MAGIC) :])
    header = next(values)
    if header["version"] != VERSION:
        raise ValueError(f"version {header['version']}, this daemon reads {VERSION}")
    if header["instance"] != instance:
        raise ValueError(f"of instance {header['instance']!r}, this is {instance!r}")
    return collect(values)


def _values(body: memoryview) -> Iterator[Any]:
    """All values, but for the None at the end."""
    unpacker = msgpack.Unpacker(max_buffer_size=MOST_BYTES, strict_map_key=True)
    unpacker.feed(body)
    for value in unpacker:
        if value is None:
            return
        yield value
    raise ValueError("it has no end")


class Keeper:
    """Takes parts from the core and has them written. `submit`: to a worker."""

    def __init__(
        self, path: Path, instance: str, submit: Callable[[Job], None], counters: Counters
    ) -> None:
        self.path = path
        self._instance = instance
        self._submit = submit
        self._counters = counters
        self._parts: list[Part] = []

    def add(self, part: Part | None) -> None:
        """The next part; None: that was all."""
        if part is not None:
            self._parts.append(part)
            return
        parts, self._parts = self._parts, []
        self._submit(
            Job("keep what policies know", lambda: self.write(parts), self._done, background=True)
        )

    def write(self, parts: Iterable[Part]) -> bool:
        """Now, whether it could be. What can't be written costs hits after a restart, and nothing
        else."""
        try:
            write_memory(self.path, self._instance, parts)
        except OSError as error:
            why = why_no_file(self.path, error)
            log.warning("a restart will find eviction cold: %s: %s", self.path, why)
            return False
        return True

    def _done(self, written: bool | None) -> None:
        if not written:
            self._counters.add("policy_writes_failed")

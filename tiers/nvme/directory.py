"""The tier's directory: whose it is, what lies in it, how much room is left.

The law of this module: it touches only files that it named itself, in a directory whose lock it
holds. Anybody else's file is counted and left alone, and so is a slab of another version. Names are
short and fixed, whatever models, namespaces and salts are called.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
from pathlib import Path
from typing import NamedTuple

from kvd.errors import ConfigError
from kvd.tiers.nvme.choose import PROBE_NAME

MARKER = "kvd-tier"
LOCK = "kvd-lock"
FORMAT = 1
_SLAB = re.compile(r"kvd-(slab|table)-(\d{5})")
_OURS = {MARKER, LOCK, PROBE_NAME, "kvd-scrub"}  # the last is the daemon's: how far it has read
_TEMPORARY = re.compile(r"kvd-(slab|table)-\d{5}\.tmp|kvd-tier\.tmp|" + PROBE_NAME + r"\.tmp")
MAX_SLABS = 100_000


class Contents(NamedTuple):
    slabs: dict[int, Path]
    tables: dict[int, Path]
    taken: set[int]  # numbers whose name somebody else uses
    foreign: int  # files of others, left alone
    removed: int  # own unfinished files, removed


class Directory:
    def __init__(self, path: Path, instance: str) -> None:
        self.path = path
        self.instance = instance
        self.id = b""
        self.read_only = False
        self._lock = -1

    # -- whose it is ----------------------------------------------------------------------------

    def claim(self) -> None:
        """Make it if need be, take its lock, read or write its marker. ConfigError saying what to
        change; OSError for what may heal (a full file system)."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
                raise
            raise ConfigError(
                f"tier nvme: can't make directory {self.path}: {error.strerror}: choose another"
            ) from error
        if not self.path.is_dir():
            raise ConfigError(f"tier nvme: {self.path} is not a directory: choose another")
        try:
            self._take_lock()
            self._marker()
        except (OSError, ConfigError):
            self.release()
            raise

    def still_ours(self) -> bool:
        """Whether the directory that is there now is the one that was claimed."""
        try:
            there = os.stat(self.path / LOCK)
        except OSError:
            return False
        here = os.fstat(self._lock)
        return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)

    def take_for_writing(self) -> bool:
        """Whether what was claimed to be read can be written by now. Its lock is held as before."""
        try:
            fd = os.open(self.path / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return False
        self._sign(fd)
        os.close(fd)
        return True

    @staticmethod
    def _sign(fd: int) -> None:
        """Whose it is, for error messages."""
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _take_lock(self) -> None:
        path = self.path / LOCK
        flags = os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o600)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
                raise
            if error.errno not in (errno.EROFS, errno.EACCES):
                raise self._unusable(error) from error
            try:
                fd = os.open(path, os.O_RDONLY | flags)
            except OSError:
                raise self._unusable(error) from error
            self.read_only = True
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
            os.close(fd)
            if error.errno != errno.EWOULDBLOCK:
                raise self._unusable(error) from error
            who = f"process {holder}" if holder else "another process"
            raise ConfigError(
                f"tier nvme: directory {self.path} is in use by {who}: each daemon needs its own"
            ) from None
        self._lock = fd
        if not self.read_only:
            self._sign(fd)

    def _unusable(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"tier nvme: directory {self.path} can't be used: {error.strerror}: choose another, or "
            f"give this user the right to write there"
        )

    def _marker(self) -> None:
        path = self.path / MARKER
        try:
            text = path.read_bytes()[:4096].decode("utf-8", "replace")
        except FileNotFoundError:
            self._write_marker(path)
            return
        fields = dict(line.partition("=")[::2] for line in text.splitlines())
        version, instance = fields.get("version", "?"), fields.get("instance", "?")
        if version != str(FORMAT):
            raise ConfigError(
                f"tier nvme: directory {self.path} is of format {version}, this kvd reads "
                f"{FORMAT}: choose another directory, or empty it"
            )
        if instance != self.instance:
            raise ConfigError(
                f"tier nvme: directory {self.path} belongs to instance {instance!r}, this is "
                f"{self.instance!r}: choose another directory, or empty it"
            )
        try:
            self.id = bytes.fromhex(fields.get("id", ""))
        except ValueError:
            self.id = b""
        if len(self.id) != 16:
            raise ConfigError(f"tier nvme: {path} is damaged: empty {self.path}")

    def _write_marker(self, path: Path) -> None:
        if self.read_only:
            raise ConfigError(f"tier nvme: directory {self.path} is read-only: choose another")
        self.id = secrets.token_bytes(16)
        text = f"version={FORMAT}\ninstance={self.instance}\nid={self.id.hex()}\n"
        temporary = path.with_name(MARKER + ".tmp")
        temporary.write_text(text)
        temporary.chmod(0o600)
        temporary.rename(path)

    # -- what lies in it ------------------------------------------------------------------------

    def slab_path(self, number: int) -> Path:
        return self.path / f"kvd-slab-{number:05d}"

    def contents(self) -> Contents:
        """Every file is accounted for: a slab, ours and unfinished (removed), or foreign."""
        slabs: dict[int, Path] = {}
        tables: dict[int, Path] = {}
        taken: set[int] = set()
        foreign = removed = 0
        for entry in os.scandir(self.path):
            match = _SLAB.fullmatch(entry.name)
            if match and entry.is_file(follow_symlinks=False):
                (slabs if match[1] == "slab" else tables)[int(match[2])] = self.path / entry.name
            elif _TEMPORARY.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                if not self.read_only:
                    os.unlink(entry.path)
                removed += 1
            elif entry.name not in _OURS:
                foreign += 1
                if match:
                    taken.add(int(match[2]))
        return Contents(slabs, tables, taken, foreign, removed)

    def free_bytes(self) -> int:
        """What this user may still take on the file system."""
        info = os.statvfs(self.path)
        return info.f_bavail * info.f_frsize

"""Who owns an arena, and who may still be writing into it.

The law of this module: ownership is a flock, never the existence of a file. A flock belongs to an
open file description: it ends when the last descriptor of it in any process is closed, however
that process died. The daemon's says that it lives; a session's, whose descriptor was handed to the
client, says that a process may still have the arena mapped, even after the daemon's own death.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from pathlib import Path

from kvd.arena.inodes import why_no_file
from kvd.errors import ArenaError

PUBLIC_ID_BYTES = 16

_OPEN = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW


class OwnerLock:
    """The lock of an arena's daemon, with the holder's pid in the file for error messages."""

    def __init__(self, path: Path) -> None:
        """Takes it. ArenaError naming the holder's pid if another process has it."""
        self.path = path
        while True:
            fd = open_owned(path, os.O_CREAT)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
                os.close(fd)
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    raise ArenaError(f"can't lock {path}: {error.strerror}") from error
                who = f"process {holder}" if holder else "another process"
                raise ArenaError(
                    f"arena lock {path} is held by {who}: stop it, or choose another instance name"
                ) from None
            if _names(path, fd):
                break
            os.close(fd)  # its holder removed the file while we opened it
        # The pid is for error messages only: a file system without room for it refuses nothing.
        with contextlib.suppress(OSError):
            os.pwrite(fd, f"{os.getpid():<31}\n".encode(), 0)
        self._fd = fd

    def release(self, *, remove: bool = False) -> None:
        """Let go; idempotent. The file stays unless `remove`."""
        if self._fd < 0:
            return
        if remove:
            self.path.unlink(missing_ok=True)
        os.close(self._fd)
        self._fd = -1


class SessionLocks:
    """A directory (0700) with one lock file a session, named by its public id in hex."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise ArenaError(f"can't make {path}: {why_no_file(path, error)}") from error
        info = path.lstat()
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():
            raise ArenaError(f"{path} is not a directory of this user: remove it")
        path.chmod(0o700)

    def create(self, public_id: bytes) -> int:
        """A locked descriptor to hand to the client; close the own copy once it is sent."""
        path = self._path(public_id)
        try:
            fd = os.open(path, _OPEN | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise ArenaError(
                f"can't make session lock {path}: {why_no_file(path, error)}"
            ) from error
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return fd

    def free(self, public_id: bytes) -> bool:
        """Whether no process holds the lock any more (its file is removed then, so a session that
        is not known here is free too)."""
        path = self._path(public_id)
        try:
            fd = os.open(path, _OPEN)
        except FileNotFoundError:
            return True
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno != errno.EWOULDBLOCK:
                raise ArenaError(f"can't test session lock {path}: {error.strerror}") from error
            return False
        else:
            path.unlink(missing_ok=True)
            return True
        finally:
            os.close(fd)

    def held(self) -> list[bytes]:
        """Public ids of the sessions whose lock is still held; files of free ones are removed."""
        ids = []
        for name in sorted(os.listdir(self.path)):
            try:
                public_id = bytes.fromhex(name)
            except ValueError:
                continue
            if len(public_id) == PUBLIC_ID_BYTES and name == public_id.hex():
                ids.append(public_id)
        return [i for i in ids if not self.free(i)]

    def remove_if_empty(self) -> None:
        """Remove the directory unless a session has a file in it."""
        with contextlib.suppress(OSError):
            self.path.rmdir()

    def remove(self) -> None:
        """Remove the directory and all its files, held or not."""
        if self.path.is_dir():
            for file in self.path.iterdir():
                file.unlink(missing_ok=True)
            self.path.rmdir()

    def _path(self, public_id: bytes) -> Path:
        if len(public_id) != PUBLIC_ID_BYTES:
            raise ArenaError(f"a session's public id has {PUBLIC_ID_BYTES} bytes")
        return self.path / public_id.hex()


def open_owned(path: Path, flags: int = 0, mode: int = 0o600) -> int:
    """Open a regular file of this user, read-write, never through a link. ArenaError if it is
    anybody else's or anything else: /dev/shm is writable for all, a planted file is not ours.
    FileNotFoundError passes."""
    try:
        fd = os.open(path, _OPEN | flags, mode)
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise ArenaError(f"can't make {path}: {why_no_file(path, error)}") from error
        raise ArenaError(
            f"can't open {path}: {error.strerror}: remove it, or choose another arena path"
        ) from error
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid():
        os.close(fd)
        raise ArenaError(f"{path} is not a regular file of this user: remove it")
    return fd


def _names(path: Path, fd: int) -> bool:
    try:
        there = path.lstat()
    except FileNotFoundError:
        return False
    info = os.fstat(fd)
    return (there.st_dev, there.st_ino) == (info.st_dev, info.st_ino)

"""The place in the file system where clients find the daemon.

The law of this module: who holds the flock on `<socket>.lock` owns the path, and nobody else
touches what stands there. Under the lock a leftover socket of ours is removed, once nobody
answers on it; a file, link, directory or another user's socket is never touched. libzmq by itself
would take over a live socket, delete a regular file and leave the mode to the umask.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket as sockets
import stat
from collections.abc import Callable

import zmq

from kvd.arena import why_no_file
from kvd.errors import ConfigError
from kvd.wire.paths import attach_path, check_socket_path, make_socket_dir, short_address

__all__ = ["Endpoint"]

SOCKET_MODE = 0o660


class Endpoint:
    """Owns one control socket path and the attach path beside it, from `claim` to `close`."""

    def __init__(self, path: str) -> None:
        check_socket_path(path)
        self.path = path
        self.attach = attach_path(path)
        self._lock_path = path + ".lock"
        self._lock: int | None = None
        self._bound: dict[str, tuple[int, int]] = {}  # path -> (device, inode) that we made

    def claim(self) -> None:
        """Take the lock and clear both paths of our own leftovers.

        ConfigError if another daemon holds it, or if anything else stands at a path.
        """
        self._check_directory()
        self._take_lock()
        try:
            self._clear(self.path)
            self._clear(self.attach)
        except BaseException:
            self.close()
            raise

    def bind(self, path: str, bind: Callable[[], object]) -> None:
        """Run `bind`, which makes a socket at `path`, so that it never has a wider mode than 0660.

        The umask is the process's: call this before there are threads that make files.
        """
        old = os.umask(0o777 & ~SOCKET_MODE)
        try:
            bind()
        except (OSError, zmq.ZMQError) as error:
            why = why_no_file(path, OSError(error.errno, error.strerror))
            raise ConfigError(
                f"daemon.socket: can't bind {path}: {why}; choose another --socket"
            ) from None
        finally:
            os.umask(old)
        os.chmod(path, SOCKET_MODE)
        made = os.lstat(path)
        self._bound[path] = (made.st_dev, made.st_ino)

    def listen_attach(self) -> sockets.socket:
        """A listening, non-blocking SOCK_SEQPACKET socket at the attach path."""
        listener = sockets.socket(
            sockets.AF_UNIX, sockets.SOCK_SEQPACKET | sockets.SOCK_NONBLOCK | sockets.SOCK_CLOEXEC
        )
        try:
            with short_address(self.attach) as address:
                self.bind(self.attach, lambda: listener.bind(address))
            listener.listen(128)
        except BaseException:
            listener.close()
            raise
        return listener

    def close(self) -> None:
        """Remove what we made and let go of the lock. Paths that others replaced stay."""
        for path, inode in self._bound.items():
            with contextlib.suppress(OSError):
                found = os.lstat(path)
                if (found.st_dev, found.st_ino) == inode:
                    os.unlink(path)
        self._bound.clear()
        if self._lock is not None:
            # unlinked while it is held: a daemon that waits for it sees the inode change
            with contextlib.suppress(OSError):
                os.unlink(self._lock_path)
            os.close(self._lock)
            self._lock = None

    # -- the parts ------------------------------------------------------------------------------

    def _check_directory(self) -> None:
        directory = make_socket_dir(self.path)
        if not os.access(directory, os.W_OK | os.X_OK):
            raise ConfigError(
                f"daemon.socket: the directory {directory} can't be written by uid {os.getuid()}; "
                "change its owner or choose another --socket"
            )

    def _take_lock(self) -> None:
        while True:
            try:
                lock = os.open(
                    self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
                )
            except OSError as error:
                way_out = "choose" if error.errno == errno.ENOSPC else "remove it or choose"
                raise ConfigError(
                    f"daemon.socket: can't open the lock file {self._lock_path}: "
                    f"{why_no_file(self._lock_path, error)}; {way_out} another --socket"
                ) from None
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not _same_file(lock, self._lock_path):
                    os.close(lock)  # its owner removed it as we took it: try the new one
                    continue
                os.ftruncate(lock, 0)
                os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
            except BlockingIOError:
                holder = os.pread(lock, 32, 0).decode("ascii", "replace").strip() or "?"
                os.close(lock)
                raise ConfigError(
                    f"daemon.socket: {self.path} is in use by a kvd with pid {holder}; "
                    "stop it or choose another --socket"
                ) from None
            except OSError as error:
                os.close(lock)
                raise ConfigError(
                    f"daemon.socket: can't lock {self._lock_path}: {error.strerror}; "
                    "choose a --socket on a local file system"
                ) from None
            self._lock = lock
            return

    def _clear(self, path: str) -> None:
        try:
            found = os.lstat(path)
        except FileNotFoundError:
            return
        except OSError as error:
            raise ConfigError(
                f"daemon.socket: can't look at {path}: {error.strerror}; choose another --socket"
            ) from None
        if not stat.S_ISSOCK(found.st_mode):
            raise ConfigError(
                f"daemon.socket: {path} is {_what(found.st_mode)}, not a socket; it was left as "
                "it is: move it away or choose another --socket"
            )
        if found.st_uid != os.getuid():
            raise ConfigError(
                f"daemon.socket: {path} is a socket of uid {found.st_uid}, not ours; it was left "
                "as it is: remove it or choose another --socket"
            )
        if _answers(path):
            raise ConfigError(
                f"daemon.socket: another program listens on {path}; stop it or choose another "
                "--socket"
            )
        os.unlink(path)


def _same_file(descriptor: int, path: str) -> bool:
    held = os.fstat(descriptor)
    try:
        named = os.lstat(path)
    except FileNotFoundError:
        return False
    return (held.st_dev, held.st_ino) == (named.st_dev, named.st_ino)


def _what(mode: int) -> str:
    if stat.S_ISLNK(mode):
        return "a symbolic link"
    if stat.S_ISDIR(mode):
        return "a directory"
    return "a file" if stat.S_ISREG(mode) else "a special file"


def _answers(path: str) -> bool:
    """Whether a live socket stands there. Only a refused connection proves that none does: a full
    backlog, or a socket of another type, is somebody's."""
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as probe:
        probe.setblocking(False)
        with short_address(path) as address:
            return probe.connect_ex(address) not in (errno.ECONNREFUSED, errno.ENOENT)

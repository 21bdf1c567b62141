"""Where the sockets are.

The law of this module: a path is measured in bytes, before anything is bound or connected; what
does not fit is refused with the limit and the way out, and nobody is left half reachable.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from kvd.errors import ConfigError

SUN_PATH_BYTES = 107  # Linux: sun_path is 108 bytes with its NUL
ATTACH_SUFFIX = ".a"
SOCKET_NAME = "kvd.sock"
SYSTEM_DIR = "/run/kvd"
# "/proc/self/fd/" and a descriptor of up to seven digits and "/", before the name
_SHORT_NAME_BYTES = SUN_PATH_BYTES - len("/proc/self/fd/") - 8


def default_socket(environ: Mapping[str, str] | None = None, *, uid: int | None = None) -> str:
    """The ZMQ ipc path that daemon, cli and clients use when none is named.

    $KVD_SOCKET; else kvd/kvd.sock under $XDG_RUNTIME_DIR; else /run/kvd/kvd.sock, for root or where
    that exists; else /tmp/kvd-<uid>/kvd.sock.
    """
    env = os.environ if environ is None else environ
    named = env.get("KVD_SOCKET")
    if named:
        return named
    runtime = env.get("XDG_RUNTIME_DIR")
    if runtime:
        return os.path.join(runtime, "kvd", SOCKET_NAME)
    uid = os.getuid() if uid is None else uid
    system = os.path.join(SYSTEM_DIR, SOCKET_NAME)
    if uid == 0 or os.path.exists(system):
        return system
    return os.path.join(f"/tmp/kvd-{uid}", SOCKET_NAME)


def attach_path(socket: str) -> str:
    """The attach socket beside the ZMQ socket `socket`."""
    return socket + ATTACH_SUFFIX


def check_socket_path(socket: str) -> str:
    """Give `socket` back if both sockets can be bound and reached there; ConfigError if not."""
    try:  # libzmq's addresses are text
        raw = socket.encode()
    except AttributeError:
        raise ConfigError(f"socket: a path as text is due, not {type(socket).__name__}") from None
    except UnicodeEncodeError:
        raise ConfigError(f"socket: the path {socket!r} is not UTF-8; choose another") from None
    if not raw or b"\0" in raw:
        raise ConfigError("socket: the path is empty or has a NUL byte; name a file")
    if len(raw) > SUN_PATH_BYTES:
        raise ConfigError(
            f"socket: the path has {len(raw)} bytes, a unix socket's has at most "
            f"{SUN_PATH_BYTES}; choose a shorter directory or name"
        )
    target = attach_path(socket).encode()
    if len(target) > SUN_PATH_BYTES and len(os.path.basename(target)) > _SHORT_NAME_BYTES:
        raise ConfigError(
            f"socket: the file name has {len(os.path.basename(raw))} bytes, in a path this long "
            f"at most {_SHORT_NAME_BYTES - len(ATTACH_SUFFIX)}; choose a shorter name"
        )
    return socket


@contextmanager
def short_address(path: str) -> Iterator[str]:
    """An address for bind() or connect() that fits, valid inside the context.

    The path itself, or the same file through a descriptor of its directory. ConfigError if even
    that is too long; OSError if the directory can't be opened.
    """
    raw = os.fsencode(path)
    if len(raw) <= SUN_PATH_BYTES:
        yield path
        return
    directory, name = os.path.split(path)
    if len(os.fsencode(name)) > _SHORT_NAME_BYTES:
        raise ConfigError(
            f"socket: the file name has {len(os.fsencode(name))} bytes, at most "
            f"{_SHORT_NAME_BYTES} can be reached; choose a shorter name"
        )
    fd = os.open(directory or ".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{name}"
    finally:
        os.close(fd)


def check_private_dir(directory: str, *, uid: int | None = None) -> None:
    """ConfigError unless `directory` is a real directory of ours that nobody else can write.

    For a directory in /tmp: whoever made it first could put sockets of their own there.
    """
    uid = os.getuid() if uid is None else uid
    try:
        info = os.lstat(directory)
    except OSError as error:
        raise ConfigError(f"socket: {directory}: {error.strerror}") from error
    if not stat.S_ISDIR(info.st_mode):
        raise ConfigError(f"socket: {directory} is not a directory; remove it or set --socket")
    if info.st_uid != uid:
        raise ConfigError(
            f"socket: {directory} belongs to uid {info.st_uid}, not to {uid}; set --socket"
        )
    if info.st_mode & 0o022:
        raise ConfigError(
            f"socket: {directory} has mode {stat.S_IMODE(info.st_mode):04o}, others may write "
            f"there; chmod 0700 it or set --socket"
        )


def make_socket_dir(socket: str) -> str:
    """Make the directory of `socket` (mode 0700) if it is missing, and give it back.

    The default directory in /tmp must be ours alone (see check_private_dir). ConfigError if it
    can't be made.
    """
    directory = os.path.dirname(socket) or "."
    try:
        os.makedirs(directory, mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"socket: can't make the directory {directory}: {error.strerror}; set --socket"
        ) from error
    if directory == f"/tmp/kvd-{os.getuid()}":
        check_private_dir(directory)
    return directory

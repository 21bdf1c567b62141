"""What holds for every test.

The law of this file: a test leaves nothing behind. After each test an autouse fixture compares
the process with what it was before: Python threads, file descriptors, child processes, and names
in /dev/shm that start with `kvd-`. What is still there after a grace period fails that test;
children are killed, so that the next one starts clean. What another run of kvd on this machine does
in /dev/shm is blamed on nobody: names that tests give carry the run's tag. Fixtures of a wider
scope than a test are set up before the comparison begins and torn down after it ends.

Several processes may test at a time (`make test` does): each has a tag and a mark of its own, looks
at its own threads, descriptors, children and names, and takes the others for other runs.

At the end of the run, processes that were started by it and got away from their parent (a
daemon's child whose parent was killed) are looked for by a mark in their environment.
"""

from __future__ import annotations

import fcntl
import gc
import os
import re
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import settings
from servers import aws_keys, redis_server, seaweed  # noqa: F401  (fixtures)

from kvd.native import compiled

# Settings of the person who runs the tests must not steer the daemons that the tests start.
for _name in [n for n in os.environ if n.startswith("KVD_")]:
    del os.environ[_name]

settings.register_profile("kvd", deadline=None, print_blob=True)
settings.load_profile("kvd")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Compiled code does not look at what a test puts in its place."""
    if compiled():
        skip = pytest.mark.skip(reason="puts something in place of a part of the compiled core")
        for item in items:
            if item.get_closest_marker("inside"):
                item.add_marker(skip)


# Threads and processes that were told to end may need a moment.
GRACE_S = float(os.environ.get("LEAK_GRACE_S", "5"))

# Threads of libraries that live as long as the process once they were started.
LIBRARY_THREADS = re.compile(r"pydevd|tqdm_monitor|InductorSubproc")
# Descriptors that libraries open once and keep.
LIBRARY_FILES = re.compile(
    r"^/dev/(null|u?random|tty)$|\.hypothesis/|/site-packages/|/__pycache__/"
)
# Helpers of the standard library, one a process, that end with it.
LIBRARY_CHILDREN = re.compile(
    rb"multiprocessing\.(resource_tracker|forkserver)|torch.*compile_worker"
)

_RUN_MARK = "PYTEST_LEAK_MARK"
os.environ[_RUN_MARK] = uuid.uuid4().hex
RUN_TAG = os.environ[_RUN_MARK][:8]  # in the names of this run's daemons and arenas

# Somebody else who may make and remove names in /dev/shm: a run of tests, a daemon, a tool.
# (Not whatever names one among its arguments, as `timeout` does.)
OTHER_RUNS = re.compile(
    rb"[^\0]*python[^\0]*\0(.*\0)?-m\0(pytest|kvd\.[a-z.]+)\0"
    rb"|([^\0]*python[^\0]*\0)?([^\0]*/)?(pytest|kvd|kvd-bench|kvd-cli)\0",
    re.DOTALL,
)
_others_seen = False


class Snapshot(NamedTuple):
    threads: frozenset[int]
    files: dict[int, str]
    children: frozenset[int]
    shm: frozenset[str]


def _files() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the directory listing's own descriptor
            continue
    return found


def _children() -> frozenset[int]:
    """By the parent that each process names: the kernel's own list of children may lack some
    while others end."""
    pids: set[int] = set()
    me = os.getpid()
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                stat = Path(f"/proc/{name}/stat").read_bytes()
            except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
                continue
            if int(stat[stat.rindex(b")") + 1 :].split()[1]) == me:
                pids.add(int(name))
    return frozenset(pids)


def _shm() -> frozenset[str]:
    return frozenset(n for n in os.listdir("/dev/shm") if n.startswith("kvd-"))


def _snapshot() -> Snapshot:
    threads = frozenset(t.ident for t in threading.enumerate() if t.ident is not None)
    return Snapshot(threads, _files(), _children(), _shm())


def _cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
    except (FileNotFoundError, ProcessLookupError):
        return b""


def _held_elsewhere(name: str) -> bool:
    """Whether somebody holds the lock of this arena, or of one in this folder. Then it is in use
    by another run on this machine: what this one started is gone by now, or told as a child."""
    path = Path("/dev/shm", name)
    locks = [path.with_name(re.sub(r"\.(table|lock|s)$", "", name) + ".lock")]
    if path.is_dir():
        locks += path.glob("*.lock")
    return any(map(_locked, locks))


def _somebody_else() -> bool:
    """Whether another run was there at any time since this one looked first."""
    global _others_seen
    mark = f"{_RUN_MARK}={os.environ[_RUN_MARK]}".encode()
    for entry in [] if _others_seen else os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            if not OTHER_RUNS.match(Path(f"/proc/{entry}/cmdline").read_bytes()):
                continue
            environ = Path(f"/proc/{entry}/environ").read_bytes()
        except FileNotFoundError:
            continue
        except OSError:  # gone meanwhile, or another user's
            environ = b""
        _others_seen = _others_seen or mark not in environ.split(b"\0")
    return _others_seen


def _locked(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _leaks(before: Snapshot) -> list[str]:
    """What is there now and was not before, in words."""
    found = [
        f"thread {t.name!r}"
        for t in threading.enumerate()
        if t.ident not in before.threads and t.is_alive() and not LIBRARY_THREADS.search(t.name)
    ]
    old = set(before.files.values())
    found += [
        f"descriptor {fd} -> {target}"
        for fd, target in _files().items()
        if before.files.get(fd) != target
        # A descriptor that moved to another number (capture does that) is no leak.
        and not (target in old and target.startswith("/") and not target.startswith("/dev/shm"))
        and not LIBRARY_FILES.search(target)
    ]
    found += [
        f"child process {pid}: {_cmdline(pid).decode(errors='replace') or 'a zombie'}"
        for pid in _children() - before.children
        if not LIBRARY_CHILDREN.search(_cmdline(pid))
    ]
    found += [
        f"shared memory /dev/shm/{name}"
        for name in sorted(_shm() - before.shm)
        # Last, since looking takes the lock for a moment: whoever else wants it then is refused it.
        if (RUN_TAG in name or not _somebody_else()) and not _held_elsewhere(name)
    ]
    return found


def _kill(before: Snapshot) -> None:
    """End the children that this process left over. Nothing else is touched: a name in /dev/shm
    may be another run's."""
    for pid in _children() - before.children:
        if LIBRARY_CHILDREN.search(_cmdline(pid)):
            continue
        try:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        except (ProcessLookupError, ChildProcessError):
            continue


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fails a test that leaks a thread, a descriptor, a child process or a shared-memory file."""
    before = _snapshot()
    yield
    leaks = _leaks(before)
    if not leaks:
        return
    gc.collect()  # an object in a reference cycle may hold it; that alone is no leak
    end = time.monotonic() + GRACE_S
    while leaks and time.monotonic() < end:
        time.sleep(0.05)
        now = _leaks(before)
        leaks = [leak for leak in leaks if leak in now]  # what is there all the time
    if leaks:
        _kill(before)
        pytest.fail("the test left behind:\n  " + "\n  ".join(leaks), pytrace=False)


def _strays() -> list[int]:
    mark = f"{_RUN_MARK}={os.environ[_RUN_MARK]}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            environ = Path(f"/proc/{entry}/environ").read_bytes()
        except OSError:  # another user's, or gone
            continue
        if mark in environ.split(b"\0"):
            found.append(int(entry))
    return found


@pytest.fixture(autouse=True, scope="session")
def no_process_outlives_the_run() -> Iterator[None]:
    """Fails the run when a process that it started still lives after the last test."""
    _somebody_else()  # who is here now may have left when it matters
    yield
    end = time.monotonic() + GRACE_S
    strays: list[int] = []
    while time.monotonic() < end:
        strays = [pid for pid in _strays() if not LIBRARY_CHILDREN.search(_cmdline(pid))]
        if not strays:
            return
        time.sleep(0.1)
    told = [f"{pid}: {_cmdline(pid).decode(errors='replace')}" for pid in strays]
    for pid in strays:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    pytest.fail("processes outlived the run:\n  " + "\n  ".join(told), pytrace=False)


def _eventually(
    condition: Callable[[], object], timeout_s: float = 10.0, interval_s: float = 0.01
) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= end:
            pytest.fail(f"did not come true within {timeout_s} s: {condition}")
        time.sleep(interval_s)


@pytest.fixture
def eventually() -> Callable[..., None]:
    """`eventually(condition, timeout_s=10)`: returns as soon as the condition is true, fails the
    test when it never is."""
    return _eventually

"""The fixtures of conftest.py do notice what a test leaves behind."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

LEAKING = """
import os, subprocess, sys, tempfile, threading, time

import pytest

NAME = "/dev/shm/kvd-leak-{pid}-" + os.environ["PYTEST_LEAK_MARK"][:8]


def test_thread():
    threading.Thread(target=time.sleep, args=(2,), name="left-over", daemon=True).start()


def test_descriptor():
    os.open("/dev/zero", os.O_RDONLY)


def test_pipe():
    os.pipe()


def test_child():
    global child  # out of reach of the garbage collector
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])


def test_shared_memory():
    open(NAME, "w").close()


def test_shared_memory_folder():
    os.mkdir(NAME + ".s")
    open(NAME + ".s/session", "w").close()


@pytest.fixture(scope="module")
def wide():
    read, write = os.pipe()
    thread = threading.Event()
    waiter = threading.Thread(target=thread.wait)
    waiter.start()
    yield
    thread.set()
    waiter.join()
    os.close(read)
    os.close(write)


def test_clean_one(wide):
    with tempfile.TemporaryFile() as file:
        file.write(b"x")


def test_cycle():
    class Holder:
        pass

    holder = Holder()
    holder.me, holder.file = holder, os.fdopen(os.open("/dev/null", os.O_RDONLY))


def test_thread_that_ends_in_time():
    threading.Thread(target=time.sleep, args=(0.2,)).start()
"""

STRAY = """
import subprocess, sys


def test_grandchild_gets_away():
    inner = "import time; time.sleep(60)"
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {inner!r}])"
    subprocess.run([sys.executable, "-c", code], check=True)
"""


def _pytest(tmp_path: Path, code: str) -> subprocess.CompletedProcess[str]:
    for name in ("conftest.py", "servers.py"):
        shutil.copy(Path(__file__).with_name(name), tmp_path / name)
    (tmp_path / "test_inner.py").write_text(code)
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore"]
    return subprocess.run(
        [*command, "test_inner.py"],
        cwd=tmp_path,
        env=env | {"LEAK_GRACE_S": "0.5"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_each_kind_of_leak_fails_its_test_and_no_other(tmp_path: Path) -> None:
    name = f"kvd-leak-{os.getpid()}"
    try:
        done = _pytest(tmp_path, LEAKING.replace("kvd-leak-{pid}", name))
    finally:
        for path in Path("/dev/shm").glob(f"{name}-*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    blamed = set(re.findall(r"ERROR at teardown of (\w+)", done.stdout))
    assert blamed == {
        "test_thread",
        "test_descriptor",
        "test_pipe",
        "test_child",
        "test_shared_memory",
        "test_shared_memory_folder",
    }, done.stdout
    assert "thread 'left-over'" in done.stdout
    assert re.search(rf"shared memory /dev/shm/{name}-[0-9a-f]{{8}}\.s", done.stdout)


HELD = """
import os
import conftest

MADE, SEEN = {made!r}, {seen!r}


def test_it_appears():
    os.rename(MADE, SEEN)
    if {case!r} == "alone":
        conftest._others_seen, conftest.OTHER_RUNS = False, conftest.re.compile(rb"(?!)")
    else:
        def flock(fd, operation):
            raise AssertionError("took a lock that another run may want now")
        conftest._others_seen, conftest.fcntl.flock = True, flock
"""


@pytest.mark.parametrize("case", ["alone", "beside"])
def test_an_arena_that_is_held_elsewhere_is_another_runs(tmp_path: Path, case: str) -> None:
    """Its files are neither blamed on a test here nor touched, and its lock is left to it."""
    made = Path("/dev/shm", f"other-{os.getpid()}")
    seen = made.with_name(f"kvd-other-{os.getpid()}")
    made.mkdir()
    (made / "kvd-0-x.s").mkdir()
    with open(made / "kvd-0-x.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        code = HELD.format(made=str(made), seen=str(seen), case=case)
        try:
            done = _pytest(tmp_path, code)
            assert done.returncode == 0, done.stdout
            assert (seen / "kvd-0-x.s").is_dir()
        finally:
            shutil.rmtree(made, ignore_errors=True)
            shutil.rmtree(seen, ignore_errors=True)


UNNAMED = """
import conftest

NAME = "/dev/shm/kvd-0-somebodys-{pid}"


def test_it_appears():
    open(NAME + ".{case}", "w").close()
    if "{case}" == "alone":
        conftest._others_seen, conftest.OTHER_RUNS = False, conftest.re.compile(rb"(?!)")
"""


@pytest.mark.parametrize(("case", "blamed"), [("alone", True), ("beside", False)])
def test_names_of_unknown_origin_are_blamed_only_if_nobody_else_is_there(
    tmp_path: Path, case: str, blamed: bool
) -> None:
    """A daemon of another run that was killed holds no lock any more. Here the other run is the
    one that this test is part of."""
    code = UNNAMED.replace("{pid}", str(os.getpid())).replace("{case}", case)
    try:
        done = _pytest(tmp_path, code)
    finally:
        Path(f"/dev/shm/kvd-0-somebodys-{os.getpid()}.{case}").unlink(missing_ok=True)
    assert ("ERROR at teardown of test_it_appears" in done.stdout) == blamed, done.stdout
    assert ("somebodys" in done.stdout) == blamed


def test_a_process_that_got_away_fails_the_run(tmp_path: Path) -> None:
    done = _pytest(tmp_path, STRAY)
    assert done.returncode == 1, done.stdout
    assert "processes outlived the run" in done.stdout

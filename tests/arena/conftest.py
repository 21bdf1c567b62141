"""Arenas of their own name in the real /dev/shm, gone after each test."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from arena_kit import NOW, SIZE, Open, Spawn

from kvd.arena import ArenaOwner


@pytest.fixture
def base() -> Iterator[Path]:
    """A name for an arena in /dev/shm."""
    path = Path("/dev/shm", f"kvd-test-{os.environ['PYTEST_LEAK_MARK'][:8]}-{secrets.token_hex(4)}")
    yield path
    for suffix in ("", ".table", ".lock"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    sessions = path.with_name(path.name + ".s")
    if sessions.is_dir() and not sessions.is_symlink():
        for file in sessions.iterdir():
            file.unlink()
        sessions.rmdir()


@pytest.fixture
def open_arena(base: Path) -> Iterator[Open]:
    """Opens the test's arena; all that are still open are closed at the end."""
    owners = []

    def open_(size: int = SIZE, *, at: Path = base, now: int = NOW, **kw: object) -> ArenaOwner:
        owner = ArenaOwner.open(at, size, instance="test", now_unix_ns=now, **kw)  # type: ignore[arg-type]
        owners.append(owner)
        return owner

    yield open_
    for owner in owners:
        owner.close()


@pytest.fixture
def spawn(base: Path) -> Iterator[Spawn]:
    """Runs a script in a process of its own, with `base`, `arena()` and `say()` defined. What still
    lives at the end is killed."""
    started: list[subprocess.Popen[str]] = []

    def run(script: str, **popen: object) -> subprocess.Popen[str]:
        prelude = f"""
            import os, sys, time
            from pathlib import Path
            import numpy as np
            from kvd.arena import ArenaMap, ArenaOwner
            from kvd.chunk import *
            base = Path({str(base)!r})
            def arena(size={SIZE}):
                return ArenaOwner.open(base, size, instance="test", now_unix_ns={NOW})
            def say(*words):
                print(*words, flush=True)
        """
        code = textwrap.dedent(prelude) + textwrap.dedent(script)
        child: subprocess.Popen[str] = subprocess.Popen(  # type: ignore[call-overload]
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            text=True,
            **popen,
        )
        started.append(child)
        return child

    yield run
    for child in started:
        child.kill()
        child.communicate()

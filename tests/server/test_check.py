"""`kvd --check` refuses what a start refuses, with the same words, and takes nothing."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon import DaemonProcess, run_kvd

S3 = ("--s3-bucket", "kvd")
TORCH = pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="tier hbm needs torch")
TEAM = "name=team,uids=77,token_file="


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="kvd-", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def checked(*args: str) -> str:
    """What `--check` says to settings that can't be used."""
    done = run_kvd("--check", *args)
    assert done.returncode == 2 and done.stdout == "", done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr.splitlines()[-1]


def started(*args: str) -> str:
    """What a start says to them."""
    with DaemonProcess(arena_size="16MiB", args=args, start=False) as daemon:
        assert daemon.spawn().wait(20) == 2, daemon.log
        return daemon.log.splitlines()[-1]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--redis-url", "http://here"), "give redis://"),
        (("--redis-url", "redis://here:port"), "tier redis: url"),
        (("--redis-url", "redis://:hidden@here:99999"), "'redis://here:99999': give redis://"),
        ((*S3, "--s3-endpoint", "http://here:99999"), "a port is from 1 to 65535"),
        ((*S3, "--s3-endpoint", "http://[::1"), "a port is from 1 to 65535"),
        ((*S3, "--directory-url", "http://here"), "give redis://"),
        (("--s3-bucket", "no/bucket"), "no name of a bucket"),
        ((*S3, "--s3-prefix", "a//b"), "prefix"),
        ((*S3, "--s3-endpoint", "here:80"), "must begin with http(s)://"),
        ((*S3, "--s3-endpoint", "http://"), "tier s3: Invalid endpoint"),
        ((*S3, "--s3-profile", "nobody"), "nobody"),
        ((*S3, "--s3-credentials-file", "/none"), "tiers.s3.credentials_file /none"),
        ((*S3, "--s3-verify-tls", "/none"), "tiers.s3.verify_tls /none"),
        (("--nvme-path", "/tmp/x", "--nvme-limit", "1MiB", "--nvme-slab-size", "2MiB"),
         "tier nvme: limit 1048576 is too small"),
        (("--nvme-path", "/tmp/x", "--nvme-slab-size", "100001"), "must be a multiple of 4096"),
        pytest.param(("--hbm-device", "abacus"), "give cuda:N, or cpu", marks=TORCH),
        (("--nvme-path", "/etc/passwd"), "tier nvme: /etc/passwd is not a directory"),
        (("--nvme-path", "/etc/passwd/kvd"), "tier nvme: /etc/passwd is not a directory"),
        (("--redis-url", "redis://here/cache"), "DB a number"),
        (("--trace-record", "/dev/null"), "trace.record: /dev/null can't be written"),
        (("--trace-record", "/"), "trace.record: / can't be written: Is a directory"),
        (("--trace-record", "/none/day.jsonl"), "/none/day.jsonl can't be written: No such file"),
        (("--namespaces", f"{TEAM}/none"), "token_file /none"),
    ],
)  # fmt: skip
def test_what_a_start_refuses_the_check_refuses(args: tuple[str, ...], says: str) -> None:
    """K123"""
    line = checked(*args)
    assert line.startswith("kvd: ") and says in line
    assert started(*args) == line


@pytest.mark.parametrize(
    "args",
    [
        ("--config", "PIPE"),
        ("--tenancy-state-file", "PIPE"),
        ("--namespaces", f"{TEAM}PIPE"),
        ("--redis-url", "redis://127.0.0.1:1", "--redis-password-file", "PIPE"),
        (*S3, "--directory-url", "redis://127.0.0.1:1", "--directory-password-file", "PIPE"),
        (*S3, "--s3-credentials-file", "PIPE"),
        (*S3, "--s3-verify-tls", "PIPE"),
        ("--tcp-endpoint", "tcp://127.0.0.1:1", "--tcp-secret-key-file", "PIPE",
         "--tcp-clients-file", "/none"),
    ],
)  # fmt: skip
def test_a_pipe_that_nobody_writes_into_holds_up_neither(
    folder: Path, args: tuple[str, ...]
) -> None:
    """K123"""
    pipe = str(folder / "pipe")
    os.mkfifo(pipe)
    named = tuple(word.replace("PIPE", pipe) for word in args)
    for line in (checked(*named), started(*named)):
        assert f"{pipe}: not a regular file" in line


def test_a_pipe_in_the_place_of_what_a_daemon_keeps_is_passed_over() -> None:
    """Anybody may make one in /dev/shm."""
    with DaemonProcess(arena_size="16MiB", start=False) as daemon:
        os.mkfifo(f"{daemon.arena_base}.policy")
        daemon.start()
        assert "not a regular file" in daemon.log


@TORCH
def test_a_check_of_whole_tiers_takes_nothing_and_asks_nobody(folder: Path) -> None:
    done = run_kvd(
        "--check", *S3, "--s3-endpoint", "http://127.0.0.1:1", "--redis-url", "redis://127.0.0.1:1",
        "--directory-url", "redis://127.0.0.1:1", "--nvme-path", str(folder / "tier"),
        "--hbm-device", "cpu", "--trace-record", str(folder / "trace"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert os.listdir(folder) == []

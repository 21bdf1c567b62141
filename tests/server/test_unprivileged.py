"""The daemon as somebody without rights: a uid with its own sockets, arena and disk."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from daemon import SHM, DaemonProcess

from kvd.chunk import KVSpec, Outcome, ShardSpec
from kvd.client import Client

UID = 41_207
OTHER = 41_208
SIZE = 64 * 1024

as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")

# All is imported before the rights are given up: the interpreter's own files may be root's alone.
_BECOME = """
import importlib, os, pkgutil, shutil, sys
import kvd.client, kvd.server, kvd.tiers.nvme
for package in (kvd.client, kvd.server, kvd.tiers.nvme):
    for found in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        importlib.import_module(found.name)
uid = int(sys.argv.pop(1))
os.setgroups([]); os.setgid(uid); os.setuid(uid)
"""
_DAEMON = _BECOME + "kvd.server.main.main()"
_CLIENT = (
    _BECOME
    + """
from kvd.errors import KvdError
try:
    with kvd.client.Client(sys.argv[1], timeout_s=2) as client:
        info = client.info()
        print(info.namespace, info.admin, info.maps_memory)
except KvdError as error:
    print(type(error).__name__)
"""
)


class Unprivileged(DaemonProcess):
    """One kvd of another user; its directory belongs to that user."""

    def spawn(self, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        os.chown(self.directory, UID, UID)
        for notify in Path(self.directory).glob("*.notify"):
            notify.chmod(0o777)
        with open(self.log_path, "ab") as log, open(self.out_path, "ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _DAEMON, str(UID), *self.args],
                stdin=subprocess.DEVNULL, stdout=out, stderr=log, cwd=self.directory,
                env={**self.env, "HOME": self.directory, **(env or {})},
            )  # fmt: skip
        return self.process

    @property
    def files(self) -> list[Path]:
        """What it has in shared memory."""
        return sorted(SHM.glob(f"kvd-{UID}-{self.instance}*"))

    def close(self) -> None:
        super().close()
        for path in self.files:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def asked_by(uid: int, socket: str) -> str:
    """What a client of that user is told."""
    done = subprocess.run(
        [sys.executable, "-c", _CLIENT, str(uid), socket],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    return done.stdout.strip()


@pytest.fixture
def daemon() -> Iterator[Unprivileged]:
    found = Unprivileged(start=False)
    tier = os.path.join(found.directory, "tier")
    found.args += ["--nvme-path", tier, "--nvme-limit", "32MiB", "--nvme-reserve", "0"]
    try:
        found.start()
        yield found
    finally:
        found.close()


def spec() -> KVSpec:
    shards = (ShardSpec(0, 0, 0, 0, 0, 1, 0, 1, SIZE),)
    return KVSpec("nobody", "", "w", "test", "bf16", "", "raw", 16, 1, 1, 1, (), (), shards)


def ids(path: Path) -> tuple[int, int]:
    return path.lstat().st_uid, path.lstat().st_gid


@as_root
def test_a_user_without_rights_runs_a_daemon_of_his_own(daemon: Unprivileged) -> None:
    """Sockets, arena and slabs are his; nobody else can read them; he is the one who is admin."""
    status = Path(f"/proc/{daemon.pid}/status").read_text()
    assert f"Uid:\t{UID}\t{UID}\t{UID}\t{UID}" in status
    assert "CapEff:\t0000000000000000" in status
    assert daemon.files, "an arena under his own number"
    tier = Path(daemon.directory, "tier")
    sockets = [path for path in Path(daemon.directory).iterdir() if path.is_socket()]
    assert len(sockets) >= 2
    for path in [*daemon.files, *sockets, *tier.iterdir()]:
        assert ids(path) == (UID, UID), path
        assert not path.lstat().st_mode & 0o007, f"{path} is open to others"
    assert asked_by(UID, daemon.socket) == "default True True"


@as_root
def test_others_are_not_let_in_by_the_files_modes(daemon: Unprivileged) -> None:
    os.chmod(daemon.directory, 0o755)
    assert asked_by(OTHER, daemon.socket) in ("AuthError", "Unavailable")
    assert asked_by(UID, daemon.socket) == "default True True"


@as_root
def test_it_keeps_its_chunks_over_sigkill(daemon: Unprivileged) -> None:
    keys, data = [bytes([n]) * 32 for n in range(1, 5)], bytes(range(256)) * (SIZE // 256)

    def stored(client: Client) -> Any:
        handle = client.register(spec())
        return client.store_chunks(handle, keys, None, [data] * len(keys))

    with Client(daemon.socket) as client:
        assert set(stored(client)) == {Outcome.OK}
    daemon.restart()
    with Client(daemon.socket) as client:
        handle = client.register(spec())
        assert [client.get(handle, key) for key in keys] == [data] * len(keys)
    assert daemon.stop() == 0


@as_root
def test_what_he_may_not_write_is_refused_in_one_line() -> None:
    found = Unprivileged(start=False)
    closed = Path(found.directory, "closed")
    closed.mkdir(mode=0o700)
    found.args += ["--nvme-path", str(closed / "tier"), "--nvme-limit", "32MiB"]
    try:
        found.spawn()
        assert found.wait() == 2
        (line,) = [line for line in found.log.splitlines() if line.startswith("kvd: ")]
        assert "tier nvme" in line and "closed/tier" in line and "Permission denied" in line
    finally:
        found.close()

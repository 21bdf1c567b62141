"""The socket's place: ours is taken, anybody else's is left as it is."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from kvd.errors import ConfigError
from kvd.server.endpoint import Endpoint


@pytest.fixture
def folder() -> Iterator[Path]:
    path = tempfile.mkdtemp(prefix="kvd-", dir="/tmp")
    yield Path(path)
    shutil.rmtree(path)


def dead_socket(path: Path, kind: int = socket.SOCK_STREAM) -> None:
    with socket.socket(socket.AF_UNIX, kind) as left:
        left.bind(str(path))


def long_path(folder: Path, length: int) -> Path:
    path = folder / ("d" * (length - len(str(folder)) - 3)) / "s"
    path.parent.mkdir()
    assert len(str(path)) == length
    return path


def test_a_dead_socket_is_removed_and_the_start_goes_on(folder: Path) -> None:
    """K93"""
    dead_socket(folder / "s")
    dead_socket(folder / "s.a", socket.SOCK_SEQPACKET)
    endpoint = Endpoint(str(folder / "s"))
    endpoint.claim()
    assert os.listdir(folder) == ["s.lock"]
    endpoint.close()
    assert os.listdir(folder) == []


@pytest.mark.parametrize("name", ["s", "s.a"])
def test_a_file_is_refused_and_stays_as_it_is(folder: Path, name: str) -> None:
    """K93"""
    (folder / name).write_text("precious")
    with pytest.raises(ConfigError, match="is a file, not a socket"):
        Endpoint(str(folder / "s")).claim()
    assert (folder / name).read_text() == "precious"
    assert os.listdir(folder) == [name]


@pytest.mark.parametrize("name", ["s", "s.a"])
def test_a_link_is_refused_and_so_is_what_it_leads_to(folder: Path, name: str) -> None:
    """K93"""
    (folder / "target").write_text("precious")
    (folder / name).symlink_to(folder / "target")
    with pytest.raises(ConfigError, match="symbolic link"):
        Endpoint(str(folder / "s")).claim()
    assert (folder / name).is_symlink()
    assert (folder / "target").read_text() == "precious"


def test_a_directory_is_refused(folder: Path) -> None:
    """K93"""
    (folder / "s").mkdir()
    with pytest.raises(ConfigError, match="is a directory"):
        Endpoint(str(folder / "s")).claim()
    assert (folder / "s").is_dir()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a socket away")
def test_another_users_socket_is_refused(folder: Path) -> None:
    """K93"""
    dead_socket(folder / "s")
    os.chown(folder / "s", 12345, -1)
    with pytest.raises(ConfigError, match="uid 12345"):
        Endpoint(str(folder / "s")).claim()
    assert (folder / "s").is_socket()


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_SEQPACKET, socket.SOCK_DGRAM])
def test_a_socket_on_which_somebody_listens_is_refused(folder: Path, kind: int) -> None:
    """K93"""
    with socket.socket(socket.AF_UNIX, kind) as live:
        live.bind(str(folder / "s"))
        if kind != socket.SOCK_DGRAM:
            live.listen(1)
        with pytest.raises(ConfigError, match="another program listens"):
            Endpoint(str(folder / "s")).claim()
        assert (folder / "s").is_socket()


def test_the_second_claim_names_the_holder(folder: Path) -> None:
    """K93"""
    first = Endpoint(str(folder / "s"))
    first.claim()
    with pytest.raises(ConfigError, match=f"pid {os.getpid()}"):
        Endpoint(str(folder / "s")).claim()
    first.close()
    second = Endpoint(str(folder / "s"))
    second.claim()
    second.close()


def test_the_mode_is_0660_whatever_the_umask(folder: Path) -> None:
    endpoint = Endpoint(str(folder / "s"))
    old = os.umask(0)
    try:
        endpoint.claim()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        router = context.socket(zmq.ROUTER)
        endpoint.bind(endpoint.path, lambda: router.bind(f"ipc://{endpoint.path}"))
        listener = endpoint.listen_attach()
        assert os.umask(0) == 0
    finally:
        os.umask(old)
    for name in ("s", "s.a"):
        assert stat.S_IMODE(os.lstat(folder / name).st_mode) == 0o660
    listener.close()
    router.close(0)
    context.term()
    endpoint.close()
    assert os.listdir(folder) == []


def test_closing_leaves_what_somebody_else_put_there(folder: Path) -> None:
    endpoint = Endpoint(str(folder / "s"))
    endpoint.claim()
    listener = endpoint.listen_attach()
    os.unlink(folder / "s.a")
    (folder / "s.a").write_text("mine")
    listener.close()
    endpoint.close()
    assert (folder / "s.a").read_text() == "mine"


@pytest.mark.parametrize("length", [106, 107])
def test_a_path_of_107_bytes_is_served_with_its_attach_socket(folder: Path, length: int) -> None:
    """K128"""
    path = long_path(folder, length)
    endpoint = Endpoint(str(path))
    endpoint.claim()
    listener = endpoint.listen_attach()
    assert Path(str(path) + ".a").is_socket()
    listener.close()
    endpoint.close()


def test_a_stale_attach_socket_with_a_long_path_is_recognised(folder: Path) -> None:
    path = long_path(folder, 107)
    first = Endpoint(str(path))
    first.claim()
    first.listen_attach().close()  # as after SIGKILL: the file stays, nobody listens
    assert first._lock is not None
    os.close(first._lock)
    second = Endpoint(str(path))
    second.claim()
    second.close()


@pytest.mark.parametrize("name", ["x" * 108, "x" * 200, "\N{ROCKET}" * 60])
def test_a_longer_path_is_refused_by_its_bytes(folder: Path, name: str) -> None:
    """K128"""
    path = str(folder / name)
    with pytest.raises(ConfigError, match="107"):
        Endpoint(path)
    assert os.listdir(folder) == []


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_directory_that_cannot_be_written_is_refused(folder: Path) -> None:
    folder.chmod(0o500)
    with pytest.raises(ConfigError, match="can't be written"):
        Endpoint(str(folder / "s")).claim()
    folder.chmod(0o700)


def test_a_directory_that_cannot_be_made_is_refused() -> None:
    with pytest.raises(ConfigError, match="can't make the directory"):
        Endpoint("/proc/nowhere/kvd.sock").claim()


def test_the_lock_of_a_killed_process_is_free(folder: Path) -> None:
    """K93"""
    script = (
        "import os, signal, sys; from kvd.server.endpoint import Endpoint\n"
        "e = Endpoint(sys.argv[1]); e.claim(); e.listen_attach()\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", script, str(folder / "s")], check=False)
    assert sorted(os.listdir(folder)) == ["s.a", "s.lock"]
    endpoint = Endpoint(str(folder / "s"))
    endpoint.claim()
    endpoint.close()
    assert os.listdir(folder) == []

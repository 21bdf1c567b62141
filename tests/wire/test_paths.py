"""Where sockets are: measured in bytes, refused with a way out, the same for everyone."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvd.errors import ConfigError
from kvd.wire import attach_path, check_socket_path, default_socket, short_address
from kvd.wire.paths import check_private_dir, make_socket_dir


@pytest.fixture
def directory() -> Iterator[str]:
    path = tempfile.mkdtemp(prefix="kvd-", dir="/tmp")
    yield path
    shutil.rmtree(path)


def path_of(directory: str, size: int) -> str:
    return os.path.join(directory, "s" * (size - len(directory) - 1))


@pytest.mark.parametrize("size", [60, 100, 105])
def test_a_path_that_fits_is_taken(size: int) -> None:
    """K128"""
    path = path_of("/tmp/kvd-abcdefgh", size)
    assert check_socket_path(path) == path


@pytest.mark.parametrize("size", [108, 200])
def test_a_path_that_is_too_long_is_refused_with_the_limit(size: int) -> None:
    """K128"""
    with pytest.raises(ConfigError, match=f"{size} bytes.*at most 107"):
        check_socket_path("/tmp/" + "d/" * 30 + "s" * (size - 65))


def test_bytes_count_and_not_characters() -> None:
    """K128: 60 emoji are 240 bytes."""
    path = "/tmp/" + "\N{ROCKET}" * 60
    assert len(path) < 107
    with pytest.raises(ConfigError, match="245 bytes"):
        check_socket_path(path)


@pytest.mark.parametrize("path", ["", "/tmp/a\0b"])
def test_a_path_that_is_none_is_refused(path: str) -> None:
    """K128"""
    with pytest.raises(ConfigError):
        check_socket_path(path)


@pytest.mark.parametrize("size", [105, 106, 107])
def test_at_the_very_limit_the_attach_socket_is_bound_and_reached_too(size: int) -> None:
    """K128: the attach socket's own path is two bytes longer."""
    directory = tempfile.mkdtemp(prefix="kvd-" + "d" * 60, dir="/tmp")
    try:
        path = check_socket_path(path_of(directory, size))
        target = attach_path(path)
        with (
            socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
            socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client,
        ):
            with short_address(target) as address:
                assert len(os.fsencode(address)) <= 107
                listener.bind(address)
            listener.listen()
            assert os.path.exists(target)
            with short_address(target) as address:
                client.connect(address)
            listener.accept()[0].close()
    finally:
        shutil.rmtree(directory)


@pytest.mark.parametrize("size", [106, 107])
def test_a_file_name_that_no_way_leads_to_is_refused_at_start(size: int) -> None:
    """K128: never running with half of the sockets."""
    path = path_of("/tmp", size)
    with pytest.raises(ConfigError, match="file name"):
        check_socket_path(path)
    with pytest.raises(ConfigError, match="file name"), short_address(attach_path(path)):
        pass


def test_the_default_follows_the_environment() -> None:
    """K98"""
    assert default_socket({"KVD_SOCKET": "/x/y", "XDG_RUNTIME_DIR": "/run/user/5"}) == "/x/y"
    assert default_socket({"XDG_RUNTIME_DIR": "/run/user/5"}) == "/run/user/5/kvd/kvd.sock"
    assert default_socket({"KVD_SOCKET": ""}, uid=0) == "/run/kvd/kvd.sock"
    if not os.path.exists("/run/kvd/kvd.sock"):
        assert default_socket({}, uid=4711) == "/tmp/kvd-4711/kvd.sock"


def test_a_shared_directory_must_be_ours_alone(directory: str) -> None:
    check_private_dir(directory)
    with pytest.raises(ConfigError, match="belongs to uid"):
        check_private_dir(directory, uid=os.getuid() + 1)
    os.chmod(directory, 0o777)
    with pytest.raises(ConfigError, match="0777"):
        check_private_dir(directory)
    os.chmod(directory, 0o700)
    link = os.path.join(directory, "link")
    os.symlink("/tmp", link)
    with pytest.raises(ConfigError, match="not a directory"):
        check_private_dir(link)
    with pytest.raises(ConfigError):
        check_private_dir(os.path.join(directory, "absent"))


def test_the_directory_is_made_for_us_alone(directory: str) -> None:
    made = make_socket_dir(os.path.join(directory, "a", "kvd.sock"))
    assert Path(made).stat().st_mode & 0o777 == 0o700
    Path(directory, "file").touch()
    with pytest.raises(ConfigError, match="can't make"):
        make_socket_dir(os.path.join(directory, "file", "kvd.sock"))

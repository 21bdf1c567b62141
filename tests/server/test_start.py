"""Starting and stopping a real daemon: what is refused, what is said, what is left behind."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import stat
import tempfile
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from daemon import SHM, DaemonProcess, run_kvd
from server_raw import RawClient, spec

from kvd.chunk import Outcome
from kvd.errors import Draining, KvdError
from kvd.wire import LookupFlag
from kvd.wire import messages as m


@pytest.fixture
def folder() -> Iterator[Path]:
    path = tempfile.mkdtemp(prefix="kvd-", dir="/tmp")
    yield Path(path)
    shutil.rmtree(path)


def shm_names(daemon: DaemonProcess) -> list[str]:
    return sorted(p.name for p in SHM.glob(f"kvd-{os.getuid()}-{daemon.instance}*"))


def refused(*args: str, env: dict[str, str] | None = None) -> str:
    """The one line with which a start is refused."""
    done = run_kvd(*args, env=env)
    assert done.returncode == 2, done
    assert done.stdout == ""
    assert done.stderr.startswith("kvd: ") and done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def test_the_start_block_names_sockets_arena_limits_tiers_and_epoch() -> None:
    with DaemonProcess() as daemon:
        block = daemon.out
        assert block.startswith(f"kvd 0.1.0, pid {daemon.pid}\n")
        for part in (
            daemon.socket,
            daemon.socket + ".a",
            str(daemon.arena_base),
            "64 MiB, new",
            "chunk 2 MiB",
            "dram",
            "epoch",
        ):
            assert part in block
        assert [line for line in block.splitlines() if not line.startswith("  ")] == [
            f"kvd 0.1.0, pid {daemon.pid}"
        ]
        for path in (daemon.socket, daemon.socket + ".a"):
            assert stat.S_IMODE(os.lstat(path).st_mode) == 0o660
        assert daemon.stop() == 0


def test_sigterm_ends_with_0_and_leaves_only_the_arena() -> None:
    with DaemonProcess() as daemon:
        assert daemon.stop() == 0
        left = {p.name for p in Path(daemon.directory).iterdir()}
        assert left == {daemon.log_path.name, daemon.out_path.name}
        assert any(name.endswith(".table") for name in shm_names(daemon))


def test_sigint_ends_it_too() -> None:
    with DaemonProcess() as daemon:
        daemon.signal(signal.SIGINT)
        assert daemon.wait() == 0


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--arena-size", "4XB"), ("arena.size", "4XB", "--arena-size", "GiB")),
        (("--arena-siz", "4GB"), ("--arena-siz", "--arena-size")),
        (("--max-dram-gb", "4"), ("--max-dram-gb", "--arena-size")),
        (("--workers", "many"), ("daemon.workers",)),
        (("--config", "/no/such/kvd.toml"), ("/no/such/kvd.toml",)),
        (("--arena-path", "/no/such/dir", "--check"), ("/no/such/dir",)),
        (("--socket", "/tmp/" + "x" * 120), ("107",)),
        (("--socket",), ("--socket",)),
    ],
)
def test_a_bad_argument_is_refused_in_one_line(
    args: tuple[str, ...], says: tuple[str, ...]
) -> None:
    """K123, K124, K128"""
    line = refused(*args)
    for part in says:
        assert part in line


def test_an_unknown_variable_is_refused_in_one_line() -> None:
    """K123"""
    assert "KVD_ARENA_SIZE" in refused(env={"KVD_MAX_DRAMGB": "4"})


def test_an_arena_larger_than_its_file_system_is_refused_and_leaves_nothing(folder: Path) -> None:
    """K119"""
    with DaemonProcess(arena_size="60TiB", start=False) as daemon:
        daemon.spawn()
        assert daemon.wait() == 2
        assert "--arena-size" in daemon.log and daemon.log.count("\n") == 1
        assert daemon.out == ""
        assert not any(name.endswith(".table") for name in shm_names(daemon))
        assert not Path(daemon.socket).exists()


def test_check_prints_what_would_run_and_takes_nothing(folder: Path) -> None:
    """K123"""
    path = folder / "kvd.toml"
    path.write_text('[arena]\nsize = "4GiB"\n')
    done = run_kvd(
        "--config",
        str(path),
        "--check",
        "--socket",
        str(folder / "s"),
        env={"KVD_INSTANCE": "checked"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    resolved = tomllib.loads(done.stdout)
    assert resolved["arena"]["size"] == 4 * 2**30
    assert resolved["daemon"]["instance"] == "checked"
    for origin in ("flag --socket", "env KVD_INSTANCE", f"file {path}", "default"):
        assert origin in done.stdout
    assert os.listdir(folder) == ["kvd.toml"]
    assert not list(SHM.glob("kvd-*-checked*"))


def test_help_lists_each_flag_with_its_variable() -> None:
    done = run_kvd("--help")
    assert done.returncode == 0
    assert "--arena-size" in done.stdout and "KVD_ARENA_SIZE" in done.stdout


def test_a_second_daemon_on_the_same_socket_is_refused_and_the_first_goes_on() -> None:
    """K93, K98, K130"""
    with DaemonProcess() as first:
        with DaemonProcess(start=False, directory=first.directory) as second:
            second.spawn()
            assert second.wait() == 2
            assert f"in use by a kvd with pid {first.pid}" in second.log
            assert shm_names(second) == []
        with RawClient(first.socket) as client:
            assert client.stat()["version"] == "0.1.0"


def test_a_second_daemon_on_the_same_arena_is_refused_and_the_first_goes_on(folder: Path) -> None:
    """K89, K98"""
    with DaemonProcess() as first:
        done = run_kvd(
            "--socket", str(folder / "s"), "--instance", first.instance, "--arena-size", "64MiB"
        )
        assert done.returncode == 2
        assert str(first.pid) in done.stderr and "instance" in done.stderr
        assert os.listdir(folder) == []
        with RawClient(first.socket) as client:
            assert client.stat()["version"] == "0.1.0"


def test_of_two_daemons_started_at_once_one_serves() -> None:
    """K130"""
    with DaemonProcess(start=False) as one:
        with DaemonProcess(start=False, directory=one.directory, instance=one.instance) as two:
            two.log_path = Path(one.directory, "two.log")
            one.spawn()
            two.spawn()
            end = time.monotonic() + 20
            while one.poll() is None and two.poll() is None:
                assert time.monotonic() < end
                time.sleep(0.01)
            loser, winner = (one, two) if one.poll() is not None else (two, one)
            assert loser.poll() == 2
            assert "in use" in loser.log or "held by" in loser.log
            end = time.monotonic() + 20
            while not Path(winner.socket + ".a").exists():
                assert time.monotonic() < end and winner.poll() is None
                time.sleep(0.01)
            with RawClient(winner.socket) as client:
                assert client.stat()["pid"] == winner.pid


@pytest.mark.parametrize("what", ["file", "link", "directory"])
def test_what_is_no_socket_stays_where_it_is(what: str) -> None:
    """K93"""
    with DaemonProcess(start=False) as daemon:
        path = Path(daemon.socket)
        if what == "file":
            path.write_text("precious")
        elif what == "link":
            path.symlink_to("/etc/hostname")
        else:
            path.mkdir()
        daemon.spawn()
        assert daemon.wait() == 2
        assert str(path) in daemon.log and daemon.log.count("\n") == 1
        assert (path.is_symlink(), path.is_dir(), path.is_file()) == {
            "file": (False, False, True),
            "link": (True, False, path.exists()),
            "directory": (False, True, False),
        }[what]
        if what == "file":
            assert path.read_text() == "precious"


def test_sigkill_leaves_a_socket_that_the_next_start_takes_over() -> None:
    """K93"""
    with DaemonProcess() as daemon:
        daemon.kill()
        assert Path(daemon.socket).is_socket()
        daemon.start()
        assert "adopted" in daemon.out
        with RawClient(daemon.socket) as client:
            assert client.stat()["pid"] == daemon.pid


def test_chunks_outlive_sigkill_and_sigterm() -> None:
    """K86: what was acknowledged is there again, under the same key, after either end."""
    with DaemonProcess() as daemon:
        kv = spec()
        for hard in (True, False):
            with RawClient(daemon.socket) as client:
                digest = client.register(kv)
                assert set(client.store(digest, 0, 8)) <= {1}
            daemon.restart(hard=hard)
            with RawClient(daemon.socket) as client:
                digest = client.register(kv)
                found = client.lookup(digest, 0, 8)
                assert found.leading == 8, client.stat()
                client.call(m.Evict(m.Selector(everything=True), False, 0, 1000))


def test_five_hard_kills_leave_one_arena() -> None:
    """K89"""
    with DaemonProcess() as daemon:
        for _ in range(5):
            daemon.kill()
            daemon.spawn()
            time.sleep(0.15)  # killed at some point of its start
            daemon.kill()
            daemon.start()
        base = f"kvd-{os.getuid()}-{daemon.instance}"
        assert shm_names(daemon) == [base, base + ".lock", base + ".s", base + ".table"]
        assert daemon.arena_base.stat().st_blocks * 512 <= 64 * 2**20


def test_another_arena_size_replaces_the_stale_arena() -> None:
    with DaemonProcess(arena_size="32MiB") as daemon:
        daemon.kill()
        daemon.args[daemon.args.index("32MiB")] = "16MiB"
        daemon.start()
        assert daemon.arena_base.stat().st_size == 16 * 2**20
        assert "16 MiB, new" in daemon.out


def test_an_occupied_tcp_port_refuses_the_whole_start_and_readiness_is_never_told(
    folder: Path,
) -> None:
    """K130"""
    public, secret = zmq.curve_keypair()
    (folder / "key").write_bytes(secret)
    (folder / "key").chmod(0o600)
    (folder / "clients").write_bytes(public + b" team\n")
    with socket.socket() as taken, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        notify.bind(str(folder / "n"))
        notify.setblocking(False)
        args = ["--tcp-endpoint", f"tcp://127.0.0.1:{port}"]
        args += ["--tcp-secret-key-file", str(folder / "key")]
        args += ["--tcp-clients-file", str(folder / "clients")]
        with DaemonProcess(
            start=False, args=args, env={"NOTIFY_SOCKET": str(folder / "n")}
        ) as daemon:
            daemon.spawn()
            assert daemon.wait() == 2
            assert str(port) in daemon.log and "tcp.endpoint" in daemon.log
            assert not any(name.endswith(".table") for name in shm_names(daemon))
            assert not Path(daemon.socket).exists()
        with pytest.raises(BlockingIOError):
            notify.recv(100)


def test_nothing_listens_on_a_network_by_default() -> None:
    """K06"""
    with DaemonProcess() as daemon:
        inodes = set()
        for descriptor in os.listdir(f"/proc/{daemon.pid}/fd"):
            target = os.readlink(f"/proc/{daemon.pid}/fd/{descriptor}")
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
        for table in ("tcp", "tcp6", "udp", "udp6"):
            for line in Path(f"/proc/{daemon.pid}/net/{table}").read_text().splitlines()[1:]:
                assert line.split()[9] not in inodes


@pytest.mark.parametrize("gap_s", [0.0, 0.01, 0.02, 0.04, 0.08])
def test_who_asks_twice_to_stop_gets_an_orderly_end(gap_s: float) -> None:
    """As a supervisor does that tells the whole group."""
    with DaemonProcess(arena_size="8MiB") as daemon:
        process = daemon.process
        assert process is not None
        daemon.signal(signal.SIGTERM)
        end = time.monotonic() + 10
        while process.poll() is None:
            time.sleep(gap_s)
            process.send_signal(signal.SIGTERM)
            assert time.monotonic() < end, "it does not end"
        assert process.returncode == 0



def test_readiness_watchdog_and_stopping_are_told(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        notify.bind(str(folder / "n"))
        notify.settimeout(20)
        env = {"NOTIFY_SOCKET": str(folder / "n"), "WATCHDOG_USEC": "300000"}
        with DaemonProcess(start=False, env=env) as daemon:
            daemon.spawn()
            assert notify.recv(4096).startswith(b"READY=1\n")
            assert daemon.out.startswith("kvd 0.1.0")
            assert notify.recv(4096) == b"WATCHDOG=1"
            assert notify.recv(4096) == b"WATCHDOG=1"
            daemon.signal(signal.SIGTERM)
            told = b""
            while told == b"" or told == b"WATCHDOG=1":
                told = notify.recv(4096)
            assert told == b"STOPPING=1"
            assert daemon.wait() == 0


def test_sigterm_refuses_stores_and_lets_a_load_finish(eventually) -> None:
    with DaemonProcess(args=("--drain-s", "20")) as daemon:
        with RawClient(daemon.socket) as client:
            digest = client.register(spec())
            client.store(digest, 0, 4)
            flags = int(LookupFlag.LEASE | LookupFlag.LOAD)
            found = client.lookup(digest, 0, 4, flags)
            assert found.lease and found.load is not None
            daemon.signal(signal.SIGTERM)
            eventually(lambda: "no more stores" in daemon.log)
            assert client.reserve(digest, 4, 1).outcomes == bytes([Outcome.DRAINING])
            with pytest.raises(Draining):
                RawClient(daemon.socket)
            with RawClient(daemon.socket, maps=False) as operator:
                assert operator.call(m.Stat()).message.stat["draining"] is True
                stored = operator.reserve(operator.register(spec()), 5, 1).outcomes
                assert stored == bytes([Outcome.DRAINING])
            assert daemon.poll() is None
            assert client.call(m.Load(found.lease, None, None)).message.done
            client.call(m.Release(found.lease))
            assert daemon.wait() == 0


def test_a_drain_ends_at_its_bound_although_somebody_holds_a_lease() -> None:
    with DaemonProcess(args=("--drain-s", "0.5")) as daemon:
        with RawClient(daemon.socket) as client:
            digest = client.register(spec())
            client.store(digest, 0, 4)
            assert client.lookup(digest, 0, 4, int(LookupFlag.LEASE)).lease
            assert daemon.stop(10) == 0
            with pytest.raises((TimeoutError, KvdError)):
                client.call(m.Stat(), timeout_s=0.3)


def test_a_second_sigterm_stops_at_once(eventually) -> None:
    with DaemonProcess(args=("--drain-s", "600")) as daemon:
        with RawClient(daemon.socket) as client:
            digest = client.register(spec())
            client.store(digest, 0, 1)
            assert client.lookup(digest, 0, 1, int(LookupFlag.LEASE)).lease
            daemon.signal(signal.SIGTERM)
            eventually(lambda: "no more stores" in daemon.log)  # two at once would be one
            assert daemon.poll() is None
            assert daemon.stop(10) == 0


def test_a_large_arena_serves_before_all_of_it_is_reserved(eventually) -> None:
    with DaemonProcess(arena_size="1GiB") as daemon:
        with RawClient(daemon.socket) as client:

            def reserved() -> int:
                return int(client.stat()["tiers"][0]["reserved_bytes"])

            eventually(lambda: reserved() == 2**30)
        assert "are reserved" in daemon.log

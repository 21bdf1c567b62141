"""kvd-cli tenant against a real daemon: who is let in, what holds, and what is told."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli import a_spec, kvd_cli, store_chain
from daemon import DaemonProcess

from kvd.chunk import Outcome
from kvd.client import Client
from kvd.errors import AuthError, BadKey, KvdError

CONFIG = """
[tenancy]
public_writers = ["ops"]

[tenants.ops]
token_file = "{token}"

[tenants.ops.dram]
max = "2MiB"
"""
OPS = b"the-token-of-ops-0123456789"
NAME = "../Büro ☃"
SIZE = 65536


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    token = tmp_path_factory.mktemp("secret") / "token"
    token.write_bytes(OPS)
    token.chmod(0o600)
    with DaemonProcess(arena_size="16MiB", config=CONFIG.format(token=token)) as found:
        yield found


@pytest.fixture
def cli(daemon: DaemonProcess) -> object:
    return lambda *words: kvd_cli("--socket", daemon.socket, "tenant", *words)


def added(daemon: DaemonProcess, name: str, *words: str) -> bytes:
    """A new tenant; its token."""
    done = kvd_cli("--socket", daemon.socket, "tenant", "add", name, "--json", *words)
    assert done.code == 0, done.err
    return str(done.json["token"]).encode()


def shown(daemon: DaemonProcess, name: str) -> dict[str, object]:
    done = kvd_cli("--socket", daemon.socket, "tenant", "show", name, "--json")
    assert done.code == 0, done.err
    found: dict[str, object] = done.json["tenant"]
    return found


def test_a_tenant_is_added_lets_its_members_in_and_is_removed(daemon: DaemonProcess) -> None:
    token = added(daemon, NAME, "--min", "dram=25%", "--token")
    with Client(daemon.socket, token=token) as member:
        assert member.info().namespace == NAME
        stored = store_chain(member, a_spec(), 3)
        row = shown(daemon, NAME)
        assert row["tiers"]["dram"]["used_bytes"] == 3 * SIZE  # type: ignore[index]
        assert row["tiers"]["dram"]["minimum_bytes"] == 4 << 20  # type: ignore[index]
        assert row["sessions"] == 1 and row["origin"] == "added"
        done = kvd_cli("--socket", daemon.socket, "tenant", "remove", NAME, "--evict", "--json")
        assert done.code == 0 and done.json["evicted"] == 3
        with pytest.raises(AuthError):
            member.lookup(member.register(stored.spec), stored.hashes)
    with Client(daemon.socket, token=token) as late, pytest.raises(AuthError):
        late.info()


def test_who_removes_the_own_tenant_is_told_that_it_is_done(daemon: DaemonProcess) -> None:
    """Its other sessions end: another life under that name begins with nothing of theirs."""
    token = added(daemon, "own", "--token")
    with Client(daemon.socket, token=token) as member, Client(daemon.socket, token=token) as asker:
        store_chain(member, a_spec(), 3)
        assert asker.tenant("remove", "own").rows[0]["origin"] == "seen"
        with pytest.raises(AuthError):
            member.stat()
        with pytest.raises(BadKey, match="unknown"):
            asker.tenant("remove", "own")
    added(daemon, "default", "--token")  # whose session the command itself has
    done = kvd_cli("--socket", daemon.socket, "tenant", "remove", "default", "--json")
    assert (done.code, done.json["tenant"]["origin"]) == (0, "seen"), done.err


def test_a_token_file_that_can_not_be_read_is_refused_and_stops_no_start(tmp_path: Path) -> None:
    with DaemonProcess(arena_size="16MiB", config="") as daemon:
        with Client(daemon.socket) as admin:
            with pytest.raises(BadKey, match="No such file"):
                admin.tenant("add", "lost", {"token_file": str(tmp_path / "none")})
            with pytest.raises(BadKey, match="unknown"):
                admin.tenant("show", "lost")
            admin.tenant("add", "found", {"uids": [12345]})
        daemon.restart()
        assert shown(daemon, "found")["settings"] == {"uids": [12345]}


def test_what_was_added_survives_a_kill() -> None:
    with DaemonProcess(arena_size="16MiB", config="") as daemon:
        token = added(daemon, "survivor", "--max", "dram=1MiB", "--token")
        daemon.restart()
        with Client(daemon.socket, token=token) as member:
            assert member.info().namespace == "survivor"
        row = shown(daemon, "survivor")
        assert row["tiers"]["dram"]["maximum_bytes"] == 1 << 20  # type: ignore[index]
        assert row["settings"] == {"dram": {"max": 1 << 20}}


def test_a_maximum_holds_and_is_what_is_shown(daemon: DaemonProcess) -> None:
    """K50, K52: over quota is told or displaces one's own; `set` holds at once."""
    token = added(daemon, "small", "--max", "dram=640KiB", "--token")
    with Client(daemon.socket, token=token) as member:
        spec = member.register(a_spec())
        keys = [os.urandom(32) for _ in range(30)]
        for key in keys:
            got = member.store_chunks(spec, [key], [key[:16]], [bytes(SIZE)])
            assert list(got) == [Outcome.OK]
            assert shown(daemon, "small")["tiers"]["dram"]["used_bytes"] <= 640 << 10  # type: ignore
        there = [member.lookup(spec, [key], lease=False).leading for key in keys]
        assert there == [0] * 20 + [1] * 10
        done = kvd_cli("--socket", daemon.socket, "tenant", "set", "small", "--max", "dram=0")
        assert done.code == 0
        with member.lookup(spec, keys[-10:], every=True):
            got = member.store_chunks(spec, [os.urandom(32)], [bytes(16)], [bytes(SIZE)])
            assert list(got) == [Outcome.OVER_QUOTA]
        row = shown(daemon, "small")
        assert row["tiers"]["dram"]["maximum_bytes"] == 0  # type: ignore[index]
        assert row["counters"]["shards_reserved"]["over_quota"] == 1  # type: ignore[index]
    kvd_cli("--socket", daemon.socket, "tenant", "remove", "small", "--evict")


def test_rotation_closes_the_door_to_the_old_token(daemon: DaemonProcess, tmp_path: Path) -> None:
    old = added(daemon, "rotor", "--token")
    file = tmp_path / "token"
    done = kvd_cli("--socket", daemon.socket, "tenant", "rotate", "rotor", "--token-out", str(file))
    assert done.code == 0 and stat.S_IMODE(file.stat().st_mode) == 0o600
    new = file.read_bytes().strip()
    assert new.decode() not in done.out
    with Client(daemon.socket, token=new) as member:
        assert member.info().namespace == "rotor"
    with Client(daemon.socket, token=old) as stranger, pytest.raises(AuthError):
        stranger.info()
    kvd_cli("--socket", daemon.socket, "tenant", "remove", "rotor")


def test_configured_tenants_are_shown_and_not_changed(daemon: DaemonProcess) -> None:
    rows = kvd_cli("--socket", daemon.socket, "tenant", "list", "--json").json["tenants"]
    (ops,) = (row for row in rows if row["name"] == "ops")
    assert ops["origin"] == "config" and ops["tiers"]["dram"]["maximum_bytes"] == 2 << 20
    for words in (("set", "ops", "--weight", "dram=3"), ("remove", "ops"), ("rotate", "ops")):
        done = kvd_cli("--socket", daemon.socket, "tenant", *words)
        assert done.code == 1 and "configuration file" in done.err


def test_a_member_sees_its_own_tenant_and_changes_nothing(daemon: DaemonProcess) -> None:
    token = added(daemon, "nosy", "--token")
    with Client(daemon.socket, token=OPS) as ops:
        store_chain(ops, a_spec("secret/model"), 2)
    with Client(daemon.socket, token=token, map_memory=False) as member:
        # the caller's uid is the daemon's own here, so its session is an administrator's: what a
        # plain one sees is the core's business, and tested there
        assert member.info().namespace == "nosy"
        (row,) = member.tenant("show").rows
        assert row["name"] == "nosy"
    kvd_cli("--socket", daemon.socket, "tenant", "remove", "nosy")


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (("add", "x", "--min", "dram"), 2, "TIER=AMOUNT"),
        (("add", "x", "--weight", "dram=much"), 2, "not a number"),
        (("add", "x", "--min", "floppy=1GiB"), 1, "floppy"),
        (("add", "x", "--min", "dram=200%"), 1, "100%"),
        (("add", "", "--uid", "7"), 1, "namespace"),
        (("set", "nobody", "--uid", "7"), 1, "unknown"),
        (("set", "nobody"), 2, "nothing to change"),
        (("show", "nobody"), 1, "unknown"),
        (("remove", "nobody"), 1, "unknown"),
        (("paint",), 2, "paint"),
    ],
)
def test_what_is_wrong_is_named_with_an_exit_code(
    daemon: DaemonProcess, words: tuple[str, ...], code: int, told: str
) -> None:
    done = kvd_cli("--socket", daemon.socket, "tenant", *words)
    assert done.code == code and told in done.err
    if code == 1:
        done = kvd_cli("--socket", daemon.socket, "tenant", *words, "--json")
        error = json.loads(done.out)["error"]
        assert told in error["message"]


def test_tables_for_people(daemon: DaemonProcess) -> None:
    done = kvd_cli("--socket", daemon.socket, "tenant", "list")
    assert done.code == 0 and "ops" in done.out and "dram" in done.out
    done = kvd_cli("--socket", daemon.socket, "tenant", "show", "ops")
    assert done.code == 0 and "2097152" in done.out and "2 MiB" in done.out
    for name in ("add", "set", "rotate", "remove", "list", "show"):
        done = kvd_cli("tenant", name, "--help")
        assert done.code == 0 and f"kvd-cli tenant {name}" in done.out


# -- the namespace `public` ----------------------------------------------------------------------


def test_only_writers_get_a_session_in_public(daemon: DaemonProcess) -> None:
    token = added(daemon, "reader", "--token")
    with Client(daemon.socket, token=OPS, namespace="public") as writer:
        assert writer.info().namespace == "public"
    with (
        Client(daemon.socket, token=token, namespace="ops") as stranger,
        pytest.raises(KvdError),
    ):
        stranger.info()
    kvd_cli("--socket", daemon.socket, "tenant", "remove", "reader")

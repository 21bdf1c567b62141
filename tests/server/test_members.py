"""Nobody belongs to two namespaces: what would let one peer into either is refused, with both
names, before it holds."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from daemon import DaemonProcess, run_kvd

from kvd.client import Client
from kvd.errors import BadKey
from kvd.server.config import load_config

TOKEN = "one-token-0123456789abcdef"
RULES = '[[namespaces]]\nname = "a"\n{a}\n[[namespaces]]\nname = "b"\n{b}\n'
MIXED = '[[namespaces]]\nname = "a"\n{a}\n[tenants.b]\n{b}\n'
TENANTS = "[tenants.a]\n{a}\n[tenants.b]\n{b}\n"


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="kvd-", dir="/tmp"))
    for name in ("one", "two"):
        file = path / name
        file.write_text(TOKEN + "\n" * len(name.removeprefix("one")))
        file.chmod(0o600)
    yield path
    shutil.rmtree(path)


def refused(folder: Path, config: str, *args: str) -> str:
    """What `--check` and a start say alike."""
    file = folder / "kvd.toml"
    file.write_text(config)
    args = ("--config", str(file), *args)
    done = run_kvd("--check", *args)
    assert done.returncode == 2, done.stdout
    with DaemonProcess(arena_size="16MiB", args=args, start=False) as daemon:
        assert daemon.spawn().wait(20) == 2
        assert daemon.log.splitlines()[-1] == done.stderr.splitlines()[-1]
    assert TOKEN not in done.stderr
    return done.stderr.splitlines()[-1]


@pytest.mark.parametrize("form", [RULES, MIXED, TENANTS])
@pytest.mark.parametrize(
    ("a", "b", "what"),
    [
        ("uids = [7, 8]", "uids = [8]", "uid"),
        ("gids = [7, 8]", "gids = [8]", "gid"),
        ('token_file = "{0}/one"', 'token_file = "{0}/one"', "token"),
        ('token_file = "{0}/one"', 'token_file = "{0}/two"', "token"),
    ],
)
def test_a_member_of_two_namespaces_stops_the_start(
    folder: Path, form: str, a: str, b: str, what: str
) -> None:
    line = refused(folder, form.format(a=a.format(folder), b=b.format(folder)))
    assert what in line and "'b'" in line


def test_a_curve_key_of_the_clients_file_is_no_other_tenants(folder: Path) -> None:
    public, secret = zmq.curve_keypair()
    (folder / "secret").write_bytes(secret)
    (folder / "secret").chmod(0o600)
    (folder / "clients").write_bytes(public + b" a\n")
    files = (f"--tcp-secret-key-file={folder}/secret", f"--tcp-clients-file={folder}/clients")
    config = f"[tenants.b]\ncurve_keys = ['{public.decode()}']\n"
    line = refused(folder, config, "--tcp-endpoint=tcp://127.0.0.1:1", *files)
    assert "CURVE key" in line and "'a'" in line and "'b'" in line


def test_a_namespace_and_a_tenant_of_one_name_share_their_members(folder: Path) -> None:
    same = MIXED.replace("tenants.b", "tenants.a").format(a="uids = [7]", b="uids = [7]")
    (folder / "kvd.toml").write_text(same)
    assert run_kvd("--check", "--config", str(folder / "kvd.toml")).returncode == 0


def test_who_was_added_and_what_the_file_says_now_do_not_go_together(folder: Path) -> None:
    state = folder / "tenants.json"
    digest = hashlib.sha256(TOKEN.encode()).hexdigest()
    added = {"late": {"token_sha256": [digest]}}
    state.write_text(json.dumps({"version": 1, "tenants": added}))
    config = f'[tenants.a]\ntoken_file = "{folder}/one"\n'
    line = refused(folder, config, "--tenancy-state-file", str(state))
    assert "'a'" in line and "'late'" in line and "tenancy.state_file" in line


def test_a_tenant_that_is_added_takes_nobody_from_another(folder: Path) -> None:
    config = RULES.format(a="uids = [70]\ngids = [80]", b=f'token_file = "{folder}/one"')
    with DaemonProcess(arena_size="16MiB", config=config) as daemon:
        with Client(daemon.socket) as client:
            for given in (
                {"uids": [70]}, {"gids": [80]}, {"token_file": str(folder / "two")},
            ):  # fmt: skip
                with pytest.raises(BadKey, match="two namespaces"):
                    client.tenant("add", "new", given)
            client.tenant("add", "new", {"gids": [81]})
            with pytest.raises(BadKey, match="two namespaces"):
                client.tenant("set", "new", {"uids": [70]})
            client.tenant("set", "new", {"gids": [82]})
        assert daemon.restart().poll() is None


def test_another_token_in_the_file_of_who_was_refused_lets_it_in(folder: Path) -> None:
    """What was read of it to be refused is not kept; nor is that of who was taken away."""
    config = RULES.format(a="uids = [70]", b=f'token_file = "{folder}/one"')
    file = folder / "two"
    with DaemonProcess(arena_size="16MiB", config=config) as daemon:
        with Client(daemon.socket) as client:
            with pytest.raises(BadKey, match="two namespaces"):
                client.tenant("add", "new", {"token_file": str(file)})
            file.write_text("another-" + TOKEN)
            client.tenant("add", "new", {"token_file": str(file)})
            with Client(daemon.socket, token=file.read_bytes()) as member:
                assert member.info().namespace == "new"
            client.tenant("remove", "new", {})
            file.write_text("a-third-" + TOKEN)
            client.tenant("add", "new", {"token_file": str(file)})
            with Client(daemon.socket, token=file.read_bytes()) as member:
                assert member.info().namespace == "new"


@pytest.mark.parametrize("value", [0, os.getgid(), "0", "root"])
def test_the_admins_group_is_a_name_or_a_number_in_either_form(folder: Path, value: object) -> None:
    file = folder / "kvd.toml"
    file.write_text(f"[admin]\ngroup = {json.dumps(value)}\n")
    assert load_config(file=str(file), environ={}).admin_gid is not None


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("-1", "from 0 to 4294967294"), ("4294967295", "from 0 to 4294967294"),
        ('"+1"', "from 0 to 4294967294"), ("true", "name or number"), ("1.5", "name or number"),
        ("[0]", "name or number"), ('"no such group"', "no such group"),
    ],
)  # fmt: skip
def test_what_is_no_group_is_named(folder: Path, value: str, says: str) -> None:
    file = folder / "kvd.toml"
    file.write_text(f"[admin]\ngroup = {value}\n")
    done = run_kvd("--check", "--config", str(file))
    assert done.returncode == 2 and "admin.group" in done.stderr and says in done.stderr

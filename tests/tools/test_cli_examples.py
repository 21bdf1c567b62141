"""Each example that `kvd-cli --help` shows is run as it stands, against a real daemon."""

from __future__ import annotations

import re
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import click
import pytest
from cli import kvd_cli
from daemon import DaemonProcess

from kvd.chunk import KVSpec, ShardSpec
from kvd.client import Client
from kvd.tools.cli.app import cli

SIZE = 4096
KEYS = [bytes.fromhex("3fa9c2") + bytes(29), b"second" + bytes(26), b"third" + bytes(27)]
TRACE = Path(__file__).resolve().parents[1] / "data" / "conversation_excerpt.jsonl"


class Example(NamedTuple):
    command: str  # whose help shows it
    line: str


def examples() -> list[Example]:
    """All lines that begin with kvd-cli under "Examples:" in any command's help, less what the
    shell does with them and the words that explain them."""
    found = []
    todo: list[tuple[str, click.Command]] = [("", cli)]
    while todo:
        name, command = todo.pop()
        context = click.Context(command, info_name=f"kvd-cli {name}".strip(), max_content_width=200)
        for line in command.get_help(context).splitlines():
            line = line.strip()
            if line.startswith("kvd-cli ") and not line.startswith("Usage"):
                bare = re.split(r"\s{2,}| \|\|? | && ", line)[0]
                found.append(Example(name, bare))
        if isinstance(command, click.Group):
            todo += [(f"{name} {sub}".strip(), found_) for sub, found_ in command.commands.items()]
    return sorted(set(found))


@pytest.fixture(scope="module")
def world() -> Iterator[tuple[DaemonProcess, str]]:
    """A daemon with a tier below, chunks under the keys of the examples; and their spec."""
    disk = tempfile.mkdtemp(prefix="kvd-examples-", dir="/tmp")
    flags = ["--nvme-path", f"{disk}/tier", "--nvme-limit", "32MiB", "--nvme-reserve", "0"]
    try:
        with DaemonProcess(arena_size="16MiB", args=flags) as daemon:
            yield daemon, spec().digest.hex()[:8]
    finally:
        shutil.rmtree(disk, ignore_errors=True)


def spec() -> KVSpec:
    shards = (ShardSpec(0, 0, 0, 0, 0, 1, 0, 1, SIZE),)
    return KVSpec("my-model", "", "w", "test", "bf16", "", "raw", 16, 1, 1, 1, (), (), shards)


def store(daemon: DaemonProcess) -> None:
    with Client(daemon.socket) as client:
        handle = client.register(spec())
        client.store_chunks(handle, KEYS[:1], None, [bytes(SIZE)])
        client.store_chunks(handle, KEYS[1:], None, [bytes(SIZE)] * 2, parent=KEYS[0], index0=1)


def tenants_before(line: str) -> None:
    """The tenants of the examples are there, or, for one that adds them, are not."""
    for name, member in (("team-a", ["--uid", "1001"]), ("ci", ["--token-out", "before.token"])):
        kvd_cli("tenant", "remove", name, typed="y\n")
        Path("before.token").unlink(missing_ok=True)
        if " tenant add " not in line:
            added = kvd_cli("tenant", "add", name, *member)
            assert added.code == 0, added.err


def test_there_are_examples_for_every_command() -> None:
    shown = {example.command.split(" ")[0] for example in examples()}
    assert set(cli.commands) <= shown | {"tenant"}  # type: ignore[attr-defined]


@pytest.mark.parametrize("example", examples(), ids=lambda example: example.line)
def test_an_example_does_what_it_says(
    world: tuple[DaemonProcess, str],
    example: Example,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only what is particular to a machine is put in: its socket, a spec, a trace, its tier."""
    daemon, spec_digest = world
    store(daemon)
    for name in ("conversation_trace.jsonl", "day.jsonl"):
        shutil.copy(TRACE, tmp_path / name)
    line = example.line.replace("/run/kvd/kvd.sock", daemon.socket)
    line = re.sub(r"\b77ab\b", spec_digest, line)
    line = re.sub(r"^(kvd-cli tier \w+) s3$", r"\1 nvme", line)
    monkeypatch.setenv("KVD_SOCKET", daemon.socket)
    monkeypatch.chdir(tmp_path)
    if example.command.startswith("tenant"):
        tenants_before(example.line)
    done = kvd_cli(*shlex.split(line)[1:], typed="y\n")
    if "--plot" in line and find_spec("matplotlib") is None:
        assert done.code == 1 and "pip install 'kvd[plot]'" in done.err
        return
    assert done.code == 0, f"{line}\n{done.out}{done.err}"
    assert (done.out + done.err).strip()

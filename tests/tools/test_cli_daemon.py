"""kvd-cli beside a real daemon: what it shows, and that looking changes nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from kvd.client import Client
from kvd.tools.cli.link import Link, Page
from tests.daemon import DaemonProcess
from tests.tools.cli import Stored, a_spec, kvd_cli, store_chain


class House(NamedTuple):
    """A daemon with two specs and three chains in it."""

    daemon: DaemonProcess
    long: Stored
    short: Stored
    other: Stored

    def cli(self, *words: str) -> str:
        done = kvd_cli(*words, "--socket", self.daemon.socket)
        assert done.code == 0, done.err
        return done.out

    def json(self, *words: str) -> dict[str, object]:
        done = kvd_cli(*words, "--json", "--socket", self.daemon.socket)
        assert done.code == 0, done.err
        return done.json

    def rows(self, *words: str) -> list[dict[str, object]]:
        rows = self.json("inspect", *words)["rows"]
        assert isinstance(rows, list)
        return rows


@pytest.fixture(scope="module")
def house() -> Iterator[House]:
    with DaemonProcess(arena_size="64MiB") as daemon:
        with Client(daemon.socket, name="writer") as client:
            one = a_spec("llama/one")
            yield House(
                daemon,
                store_chain(client, one, 12, first="aaaa"),
                store_chain(client, one, 3, first="bb"),
                store_chain(client, a_spec("qwen/two", nbytes=8192, dtype="float16"), 5),
            )


# -- status, ping, version, config ----------------------------------------------------------------


def test_status_tells_an_operator_how_the_daemon_is(house: House) -> None:
    text = house.cli("status")
    for word in ("instance", house.daemon.instance, "epoch", "up ", "dram", "64 MiB", "hits",
                 "misses", "leases", "condemned", "evictions", "sessions", "errors", "loop",
                 house.daemon.socket):  # fmt: skip
        assert word in text, f"{word!r} is not in\n{text}"


def test_status_as_json_has_what_is_documented(house: House) -> None:
    told = house.json("status")
    assert told["command"] == "status"
    for name in ("instance", "epoch", "version", "uptime_s", "namespace", "admin", "sessions",
                 "tiers", "counters", "tenants", "loop", "socket"):  # fmt: skip
        assert name in told, name
    tier = told["tiers"][0]  # type: ignore[index]
    for name in ("name", "limit_bytes", "used_bytes", "slot_bytes", "chunks", "slabs_free",
                 "state", "reserved_bytes", "condemned_bytes", "writing_bytes",
                 "leased_chunks"):  # fmt: skip
        assert name in tier, name
    assert tier["name"] == "dram"
    assert tier["limit_bytes"] == 64 << 20
    assert tier["chunks"] == 20
    assert tier["used_bytes"] == 15 * 65536 + 5 * 8192


def test_ping_times_round_trips(house: House) -> None:
    told = house.json("ping", "--count", "5")
    rtt = told["rtt_ms"]
    assert told["count"] == 5 and told["instance"] == house.daemon.instance
    assert 0 < rtt["min"] <= rtt["median"] <= rtt["max"]  # type: ignore[index,call-overload]
    assert "answered in" in house.cli("ping")


def test_version_names_both_sides(house: House) -> None:
    told = house.json("version")
    assert told["daemon"]["version"] == told["version"]  # type: ignore[index,call-overload]
    assert house.daemon.instance in house.cli("version")


def test_config_shows_each_setting_with_its_origin(house: House) -> None:
    settings = house.json("config")["settings"]
    assert isinstance(settings, list)
    found = {row["name"]: row for row in settings}
    assert found["arena.size"]["origin"] != "default"
    assert found["limits.lease_s"]["origin"] == "default"
    text = house.cli("config", "arena")
    assert "arena.size" in text and "limits." not in text


def test_config_refuses_a_name_that_is_none(house: House) -> None:
    done = kvd_cli("config", "dram.gbb", "--socket", house.daemon.socket)
    assert done.code == 1
    assert "dram.gbb" in done.err


def test_options_may_stand_before_the_command(house: House) -> None:
    done = kvd_cli("--socket", house.daemon.socket, "--json", "--timeout", "9", "ping")
    assert done.code == 0
    assert done.json["socket"] == house.daemon.socket


def test_the_socket_may_come_from_the_environment(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVD_SOCKET", house.daemon.socket)
    assert kvd_cli("ping").code == 0


# -- inspect --------------------------------------------------------------------------------------

FIELDS = {
    "namespaces": {"namespace", "specs", "chunks", "bytes", "hits", "leases"},
    "specs": {"namespace", "spec", "model", "revision", "dtype", "engine", "codec",
              "chunk_tokens", "shards", "chunks", "bytes"},
    "prefixes": {"namespace", "spec", "kind", "root", "chunks", "bytes", "depth", "idle_s",
                 "hits"},
    "chunks": {"namespace", "spec", "kind", "hash", "parent", "index", "tokens", "bytes",
               "shards", "tier", "state", "age_s", "idle_s", "hits", "leases"},
}  # fmt: skip


@pytest.mark.parametrize("level", sorted(FIELDS))
def test_rows_have_the_documented_fields(house: House, level: str) -> None:
    told = house.json("inspect", level, "--limit", "0")
    assert told["level"] == level and told["cursor"] is None
    rows = told["rows"]
    assert isinstance(rows, list) and rows
    for row in rows:
        assert set(row) >= FIELDS[level], FIELDS[level] - set(row)


def test_the_tree_goes_from_namespaces_to_prefixes(house: House) -> None:
    text = house.cli("inspect")
    for word in ("default", "llama/one", "qwen/two", house.long.keys[0][:12], "12 chunks"):
        assert word in text, f"{word!r} is not in\n{text}"
    told = house.json("inspect")
    assert told["level"] == "tree"
    space = told["namespaces"][0]  # type: ignore[index]
    assert {spec["model"] for spec in space["children"]} == {"llama/one", "qwen/two"}
    roots = {prefix["root"] for spec in space["children"] for prefix in spec["children"]}
    assert roots == {house.long.keys[0], house.short.keys[0], house.other.keys[0]}


def test_sums_equal_what_was_stored(house: House) -> None:
    (space,) = house.rows("namespaces")
    assert (space["specs"], space["chunks"]) == (2, 20)
    assert space["bytes"] == 15 * 65536 + 5 * 8192
    by_model = {row["model"]: row for row in house.rows("specs")}
    assert by_model["llama/one"]["chunks"] == 15
    assert by_model["qwen/two"]["bytes"] == 5 * 8192
    by_root = {row["root"]: row for row in house.rows("prefixes")}
    assert by_root[house.long.keys[0]]["chunks"] == 12


def test_chunks_carry_their_place_in_the_chain(house: House) -> None:
    rows = house.rows("chunks", "--prefix", house.short.keys[0])
    assert [row["hash"] for row in sorted(rows, key=lambda row: row["index"])] == house.short.keys  # type: ignore[arg-type,return-value]
    second = next(row for row in rows if row["hash"] == house.short.keys[1])
    assert second["parent"] == house.short.keys[0]
    assert second["tier"] == "dram" and second["tokens"] == 64 and second["leases"] == 0


@pytest.mark.parametrize("digits", [2, 3, 4, 6, 7, 64])
def test_a_key_is_found_by_its_first_digits(house: House, digits: int) -> None:
    key = house.short.keys[2][:digits]
    wanted = {one for s in (house.long, house.short, house.other) for one in s.keys}
    rows = house.rows("chunks", "--key", key)
    assert {row["hash"] for row in rows} == {one for one in wanted if one.startswith(key)}


def test_filters_narrow_to_what_fits_them_all(house: House) -> None:
    assert len(house.rows("chunks", "--model", "qwen/two")) == 5
    spec = house.long.spec.digest.hex()
    assert len(house.rows("chunks", "--spec", spec[:8])) == 15
    assert len(house.rows("chunks", "-n", "default", "--tier", "dram", "--limit", "0")) == 20
    assert house.rows("chunks", "--state", "writing") == []
    assert house.rows("chunks", "--idle", "1h") == []
    assert house.rows("chunks", "--age", "1h") == []
    assert len(house.rows("chunks", "--age", "0", "--limit", "0")) == 20
    assert house.rows("chunks", "--kind", "content") == []
    assert len(house.rows("--kind", "prefix", "--limit", "0")) == 20  # filters alone: chunks


def test_what_nothing_fits_is_said_so(house: House) -> None:
    assert "nothing there" in house.cli("inspect", "chunks", "--idle", "1h")
    for words in (("--model", "gpt/none"), ("--spec", "00" * 32)):
        done = kvd_cli("inspect", "chunks", *words, "--socket", house.daemon.socket)
        assert done.code == 1
        assert done.err.startswith("kvd-cli: no spec")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("inspect", "--tier", "foo"), "tier 'foo' is unknown: known are dram"),
        (("inspect", "specs", "--tier", "foo"), "tier 'foo' is unknown: known are dram"),
        (("evict", "--tier", "foo", "--yes"), "tier 'foo' is unknown: known are dram"),
        (
            ("tier", "probe", "nope"),
            "tier 'nope' is unknown: no tier below DRAM is configured; a section [tiers.NAME] of "
            "the configuration adds one",
        ),
        (("tier", "scrub", "nope"), "tier 'nope' is unknown: no tier below DRAM is configured"),
    ],
)
def test_a_name_that_nothing_has_is_an_error_and_not_emptiness(
    house: House, words: tuple[str, ...], said: str
) -> None:
    done = kvd_cli(*words, "--socket", house.daemon.socket)
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith(f"kvd-cli: {said}")


def test_what_is_hidden_is_not_said_to_be_nothing(house: House) -> None:
    """Nor is an empty daemon said to hold what does not fit."""
    for words in (("-n", "nobody"), ("chunks", "-n", "nobody"), ("specs", "-n", "nobody"),
                  ("--idle", "36500d")):  # fmt: skip
        assert house.cli("inspect", *words) == "nothing there that fits\n"
    with DaemonProcess() as daemon:
        where = ("--socket", daemon.socket)
        for words in ((), ("chunks",), ("namespaces",)):
            assert kvd_cli("inspect", *words, *where).out == "the daemon holds nothing yet\n"
        assert kvd_cli("inspect", "-n", "x", *where).out == "nothing there that fits\n"


def test_whoever_sees_only_a_namespace_is_not_told_about_the_daemon(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Link.info
    monkeypatch.setattr(
        Link, "info", lambda link: told(link)._replace(admin=False, namespace="team")
    )
    monkeypatch.setattr(Link, "rows", lambda *asked: iter(()))
    monkeypatch.setattr(Link, "page", lambda *asked: Page([], None))
    for words, said in (((), "yet"), (("chunks",), "yet"), (("specs", "-n", "default"), "fits")):
        out = house.cli("inspect", *words)
        assert out.startswith("nothing there") and said in out
        assert out.endswith("of what you may see: namespace team, without admin role\n")


def test_pages_join_to_the_whole_without_doubles(house: House) -> None:
    seen: list[object] = []
    cursor: object = 0
    pages = 0
    while cursor is not None:
        told = house.json("inspect", "chunks", "--limit", "7", "--cursor", str(cursor))
        rows = told["rows"]
        assert isinstance(rows, list) and len(rows) <= 7
        seen += [row["hash"] for row in rows]
        cursor = told["cursor"]
        pages += 1
    assert sorted(map(str, seen)) == sorted(house.long.keys + house.short.keys + house.other.keys)
    assert pages >= 3


def test_the_next_page_is_named_beside_the_table(house: House) -> None:
    done = kvd_cli("inspect", "chunks", "--limit", "4", "--socket", house.daemon.socket)
    assert "more: --cursor" in done.err
    assert "cursor" not in done.out


def test_keys_are_cut_unless_asked_for_in_full(house: House) -> None:
    key = house.long.keys[0]
    cut = house.cli("inspect", "chunks", "--key", key)
    assert key[:12] in cut and key not in cut
    assert key in house.cli("inspect", "chunks", "--key", key, "--full")


def test_looking_touches_no_recency_and_takes_no_lease(house: House) -> None:
    """K126: what is only looked at stays as it was: idle time grows, hits and leases do not."""
    before = {row["hash"]: row for row in house.rows("chunks", "--limit", "0")}
    counters = house.json("status")["counters"]
    for level in (*FIELDS, ""):
        house.cli("inspect", *([level] if level else []))
    house.cli("status")
    house.cli("evict", "--all", "--dry-run")
    for row in house.rows("chunks", "--limit", "0"):
        old = before[row["hash"]]
        assert (row["hits"], row["leases"]) == (old["hits"], old["leases"])
        assert row["idle_s"] >= old["idle_s"]  # type: ignore[operator]
    after = house.json("status")["counters"]
    for name in ("lookups", "chunks_asked", "leases_given"):
        assert after[name] == counters[name]  # type: ignore[index,call-overload]


# -- as a process ---------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_tables_fit_the_terminal_s_encoding(house: House, encoding: str) -> None:
    for line in ("status", "inspect", "inspect chunks", "evict --all --dry-run"):
        words = (*line.split(), "--socket", house.daemon.socket)
        done = subprocess.run(
            [sys.executable, "-m", "kvd.tools.cli", *words],
            env={**os.environ, "PYTHONIOENCODING": encoding}, capture_output=True, timeout=60,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert b"Traceback" not in done.stderr
        text = done.stdout.decode(encoding)
        if encoding != "utf-8":
            assert "\\u" not in text, text


def test_a_reader_that_left_ends_a_long_list_quietly(house: House) -> None:
    done = subprocess.run(
        ["bash", "-c",
         f"{sys.executable} -m kvd.tools.cli inspect chunks --limit 0 "
         f"--socket {house.daemon.socket} | true"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.stderr == ""


def test_a_full_disk_behind_a_table_or_json_is_exit_1(house: House) -> None:
    for more in ((), ("--json",)):
        with open("/dev/full", "w") as full:
            done = subprocess.run(
                [sys.executable, "-m", "kvd.tools.cli", "status", *more,
                 "--socket", house.daemon.socket],
                stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
            )  # fmt: skip
        assert done.returncode == 1
        assert done.stderr.count("\n") == 1 and "can't write the output" in done.stderr


def test_json_of_every_command_is_ascii_and_one_object(house: House) -> None:
    for words in (("status",), ("inspect",), ("inspect", "specs"), ("config",), ("ping",),
                  ("version",), ("evict", "--all", "--dry-run")):  # fmt: skip
        out = kvd_cli(*words, "--json", "--socket", house.daemon.socket).out
        assert out.isascii()
        assert json.loads(out)["command"] == words[0]


def test_a_daemon_that_drains_can_be_watched() -> None:
    with DaemonProcess(args=("--drain-s", "60")) as daemon, Client(daemon.socket) as client:
        stored = store_chain(client, a_spec(), 2)
        with client.lookup(client.register(stored.spec), stored.hashes):  # it waits for this
            daemon.signal(signal.SIGTERM)
            status = ("status", "--json", "--socket", daemon.socket)
            end = time.monotonic() + 10
            while not (done := kvd_cli(*status)).json["draining"]:
                assert time.monotonic() < end
            assert done.code == 0 and done.json["tiers"][0]["state"] == "draining"
            assert "draining" in kvd_cli("status", "--socket", daemon.socket).out
        assert daemon.wait() == 0


# -- as somebody else -----------------------------------------------------------------------------


def test_a_token_file_says_of_which_namespace_to_be(tmp_path: Path) -> None:
    token = tmp_path / "team.token"
    token.write_text("a-long-secret-of-the-team\n")
    token.chmod(0o600)
    config = f"[[namespaces]]\nname = 'team'\ntoken_file = '{token}'\n"
    with DaemonProcess(config=config) as daemon:
        with Client(daemon.socket, token=b"a-long-secret-of-the-team") as client:
            store_chain(client, a_spec(), 3)
        where = ("--socket", daemon.socket)
        mine = kvd_cli("status", "--json", *where, "--token-file", str(token))
        assert mine.json["namespace"] == "team"
        admin = kvd_cli("inspect", "namespaces", "--json", *where)
        assert [row["namespace"] for row in admin.json["rows"]] == ["team"]
        token.write_text("another secret")
        refused = kvd_cli("status", *where, "--token-file", str(token))
        assert refused.code == 1
        assert refused.err.count("\n") == 1
        empty = kvd_cli("status", *where, "--token-file", str(tmp_path / "none"))
        assert (empty.code, "can't read" in empty.err) == (1, True)
        endless = kvd_cli("status", *where, "--token-file", "/dev/random")
        assert (endless.code, "/dev/random has more than" in endless.err) == (1, True)

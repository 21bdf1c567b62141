"""kvd-cli evict against a real daemon: what is said to be gone is gone, and only that (K126)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from kvd.client import Client
from tests.daemon import DaemonProcess
from tests.tools.cli import Done, Stored, a_spec, kvd_cli, resident, store_chain


class House(NamedTuple):
    daemon: DaemonProcess
    client: Client
    one: Stored
    two: Stored

    def evict(self, *words: str, typed: str | None = None) -> Done:
        return kvd_cli("evict", *words, "--socket", self.daemon.socket, typed=typed)

    def counts(self, *words: str) -> dict[str, int]:
        told = self.evict(*words, "--json").json
        return {name: told[name] for name in ("matched", "evicted", "leased", "missing")}

    def left(self) -> tuple[int, int]:
        return sum(resident(self.client, self.one)), sum(resident(self.client, self.two))


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess(arena_size="64MiB") as running:
        yield running


@pytest.fixture
def house(daemon: DaemonProcess) -> Iterator[House]:
    """Two chains of six chunks under two models, in an otherwise empty daemon."""
    with Client(daemon.socket, name="writer") as client:
        house = House(
            daemon,
            client,
            store_chain(client, a_spec("llama/one"), 6, first="aaaa"),
            store_chain(client, a_spec("qwen/two", nbytes=8192), 6, first="bbbb"),
        )
        assert house.left() == (6, 6)
        yield house
        assert house.evict("--all", "--yes").code == 0


def test_by_key_whole_or_cut_one_chunk_goes(house: House) -> None:
    """K126: evict by key; the count equals reality and afterwards lookups miss."""
    done = house.evict(house.one.keys[5][:10])
    assert done.code == 0, done.err
    assert done.out.strip() == "evicted 1 chunk, 64 KiB"
    assert house.left() == (5, 6)
    assert house.counts("--key", house.one.keys[4]) == {
        "matched": 1, "evicted": 1, "leased": 0, "missing": 0,
    }  # fmt: skip
    assert house.counts(house.two.keys[5], house.two.keys[4])["evicted"] == 2
    assert house.left() == (4, 4)


def test_a_key_that_is_not_there_fails(house: House) -> None:
    done = house.evict("ffff" * 16)
    assert done.code == 1
    assert "no such chunk" in done.err
    done = house.evict("cccc")
    assert (done.code, done.err) == (1, "kvd-cli: no chunk's key starts with cccc\n")
    told = house.evict("ffff" * 16, house.one.keys[5], "--json")
    assert told.code == 1
    assert (told.json["evicted"], told.json["missing"], told.json["complete"]) == (1, 1, False)
    assert house.left() == (5, 6)


def test_an_abbreviation_that_fits_several_is_refused(house: House) -> None:
    done = house.evict("aaaa")
    assert done.code == 1
    assert "fits 6 keys" in done.err
    assert house.evict("aa").code == 2  # too short to mean one chunk
    assert house.left() == (6, 6)


def test_a_subtree_goes_from_the_named_chunk_on(house: House) -> None:
    """K126: evict by prefix."""
    done = house.evict("--prefix", house.one.keys[2][:12])
    assert done.code == 0, done.err
    assert "evicted 4 chunks" in done.out
    assert resident(house.client, house.one) == [True, True, False, False, False, False]
    assert house.left() == (2, 6)


@pytest.mark.parametrize("digits", [2, 3, 4])
def test_by_the_beginning_of_keys_all_of_them_go(house: House, digits: int) -> None:
    done = house.evict("--key-prefix", "bbbb"[:digits], "--yes")
    assert done.code == 0, done.err
    assert house.left() == (6, 0)


@pytest.mark.parametrize("how", ["--spec", "--model"])
def test_by_spec_or_model_the_other_one_stays(house: House, how: str) -> None:
    """K126: evict by model."""
    what = house.two.spec.digest.hex()[:9] if how == "--spec" else "qwen/two"
    assert house.counts(how, what, "--yes") == {
        "matched": 6, "evicted": 6, "leased": 0, "missing": 0,
    }  # fmt: skip
    assert house.left() == (6, 0)


@pytest.mark.parametrize("how", [("--namespace", "default"), ("--all",), ("--tier", "dram")])
def test_by_namespace_tier_or_all_everything_goes(house: House, how: tuple[str, ...]) -> None:
    """K126: evict by tenant, tier, all."""
    assert house.counts(*how, "--yes")["evicted"] == 12
    assert house.left() == (0, 0)
    status = kvd_cli("status", "--json", "--socket", house.daemon.socket).json
    assert status["tiers"][0]["chunks"] == 0
    assert status["tiers"][0]["used_bytes"] == 0


def test_a_foreign_or_empty_namespace_gives_nothing(house: House) -> None:
    assert house.counts("--namespace", "nobody", "--yes")["evicted"] == 0
    assert house.left() == (6, 6)


def test_only_what_was_idle_long_enough_goes(house: House) -> None:
    assert house.counts("--older-than", "1h", "--yes")["evicted"] == 0
    time.sleep(0.6)
    store_chain(house.client, a_spec("qwen/two", nbytes=8192), 2, first="cccc")
    with house.client.lookup(  # a lease touches its chain
        house.client.register(house.one.spec), house.one.hashes, house.one.prints
    ).lease as lease:
        lease.release(wait=True)
    assert house.counts("--older-than", "500ms", "--yes")["evicted"] == 6
    assert house.left() == (6, 0)


@pytest.mark.parametrize(
    "line", ["--all", "--namespace default", "--prefix KEY", "KEY", "--model llama/one"]
)
def test_a_dry_run_names_what_would_go_and_removes_nothing(house: House, line: str) -> None:
    """K126: --dry-run removes nothing."""
    words = line.replace("KEY", house.one.keys[0]).split()
    told = house.evict(*words, "--dry-run", "--json")
    assert told.code == 0, told.err
    assert house.left() == (6, 6)
    assert told.json["dry_run"] is True and told.json["evicted"] == 0
    named = {row["hash"] for row in told.json["chunks"]}
    assert len(named) == told.json["would_evict"] == told.json["matched"]
    text = house.evict(*words, "--dry-run")
    assert "would evict" in text.out and house.one.keys[0][:12] in text.out
    assert house.left() == (6, 6)
    really = house.evict(*words, "--yes", "--json").json
    assert really["evicted"] == told.json["would_evict"]
    assert really["bytes"] == told.json["would_free_bytes"]


def test_leased_chunks_are_skipped_and_reported_and_the_exit_code_says_so(house: House) -> None:
    """K126: leased entries are reported as skipped; exit code != 0 on partial failure."""
    handle = house.client.register(house.one.spec)
    found = house.client.lookup(handle, house.one.hashes[:2], house.one.prints[:2])
    assert found.lease is not None
    with found.lease:
        dry = house.evict("--all", "--dry-run", "--json")
        assert dry.code == 0
        assert (dry.json["leased"], dry.json["would_evict"]) == (2, 10)
        done = house.evict("--all", "--yes", "--json")
        assert done.code == 1
        assert (done.json["evicted"], done.json["leased"]) == (10, 2)
        assert done.json["complete"] is False
        again = house.evict("--all", "--yes")
        assert again.code == 1
        assert "skipped 2 in use: under a lease" in again.out
        transfer = found.lease.load()
        assert [bytes(transfer.view(item)[:1]) for item in transfer] == [b"\0", b"\1"]
        found.lease.check()
        found.lease.release(wait=True)
    assert house.evict("--all", "--yes").code == 0
    assert house.left() == (0, 0)


def test_a_chunk_that_is_being_written_is_not_kept(house: House) -> None:
    from kvd.chunk import Outcome

    handle = house.client.register(house.one.spec)
    write = house.client.reserve(handle, [b"\xee" * 32], [b"\xee" * 16])
    told = house.evict("--all", "--yes", "--json").json
    assert told["writing"] == 1
    with write:
        assert list(write.commit()) == [Outcome.EVICTED]


# -- asking ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [("--all",), ("--namespace", "default"), ("--older-than", "0s"), ("--key-prefix", "aaaa"),
     ("--model", "llama/one"), ("--state", "sealed", "--all")],
)  # fmt: skip
def test_a_wide_eviction_asks_and_no_means_nothing(house: House, words: tuple[str, ...]) -> None:
    for typed in ("n\n", "\n", ""):
        done = house.evict(*words, typed=typed)
        if "--state" in words and done.code == 0:  # not sealed yet: nothing fits, nothing to ask
            continue
        assert done.code == 1
        assert "nothing evicted" in done.err
        assert "Go on?" in done.err and "chunks" in done.err
        assert done.out == ""
    assert house.left() == (6, 6)


def test_a_yes_is_enough(house: House) -> None:
    done = house.evict("--all", "--json", typed="y\n")
    assert done.code == 0, done.err
    assert done.json["evicted"] == 12  # the question is not in the JSON
    assert house.left() == (0, 0)


def test_nothing_there_is_done_and_not_asked(house: House) -> None:
    assert house.evict("--all", "--yes").code == 0
    done = house.evict("--all", typed="")
    assert done.code == 0
    assert done.out.strip() == "evicted 0 chunks, 0 B"


def test_more_than_a_slice_goes_in_one_command(house: House) -> None:
    spec = a_spec("small/many", nbytes=4096)
    for _ in range(5):
        store_chain(house.client, spec, 500)
    dry = house.evict("--model", "small/many", "--dry-run", "--json").json
    assert dry["would_evict"] == len({row["hash"] for row in dry["chunks"]}) == 2500
    assert house.counts("--model", "small/many", "--yes")["evicted"] == 2500
    assert house.left() == (6, 6)

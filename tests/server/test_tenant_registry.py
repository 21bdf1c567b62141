"""Tenants as they are written down: in the configuration, and in the daemon's state file."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import zmq

from kvd.core.shares import Amount, TierShare
from kvd.errors import BadKey, ConfigError, InternalError
from kvd.server.config import load_config
from kvd.server.shown import resolved_toml, shown_settings
from kvd.server.tenantrules import Tenant, parse_tenant, shown_tenant
from kvd.server.tenants import Registry, state_path, token_digest

FILE = """
[tenants.alice]
uids = [1001, 1002]
requests_s = 50
inflight = "64MiB"
public = true

[tenants.alice.dram]
min = "25%"
weight = 2
max = "8GiB"

[tenants."Büro / ☃"]
[tenants."Büro / ☃".nvme]
max = 0

[tenancy]
public_writers = ["alice"]
"""

NAMES = [
    "../../etc/x",
    "/abs",
    "..",
    ".",
    "a/../b",
    "..\\x",
    "%2e%2e",
    "😀" * 32,
    "\x7f\n\t ",
    "a b",
]


def loaded(tmp_path: Path, text: str = FILE) -> Any:
    file = tmp_path / "kvd.toml"
    file.write_text(text)
    return load_config(file=str(file), environ={})


def test_tables_of_the_configuration_become_tenants(tmp_path: Path) -> None:
    config = loaded(tmp_path)
    alice, other = config.tenants
    assert alice == Tenant(
        "alice",
        uids=(1001, 1002),
        public=True,
        requests_s=50.0,
        inflight=64 << 20,
        tiers=(("dram", TierShare(Amount(0, 0.25), 2.0, Amount(8 << 30))),),
    )
    assert other.name == "Büro / ☃" and other.rules.tiers["nvme"].maximum == Amount(0)
    assert config.public_writers == ("alice",)


def test_what_is_resolved_gives_the_same_again(tmp_path: Path) -> None:
    config = loaded(tmp_path)
    again = loaded(tmp_path, resolved_toml(config))
    assert again.tenants == config.tenants and again.isolation is config.isolation
    (row,) = (row for row in shown_settings(config) if row["name"] == "tenants")
    assert json.loads(json.dumps(row["value"]))["alice"]["dram"]["min"] == "25%"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[tenants]\na = 1", "not a table"),
        ('[tenants.a]\ncolour = "red"', "colour"),
        ('[tenants.a.dram]\nmin = "110%"', "100%"),
        ('[tenants.a.dram]\nmin = "50%"\nmax = "25%"', "min is more than max"),
        ("[tenants.a.dram]\nmin = true", "dram.min"),
        ("[tenants.a.dram]\nweight = 0", "dram.weight"),
        ("[tenants.a.dram]\nsize = 0", "size"),
        ("[tenants.a]\ndram = 3", "dram is not a table"),
        ("[tenants.a]\nuids = [-1]", "uids"),
        ("[tenants.a]\nuids = [1]\n[tenants.b]\nuids = [1]", "uids"),
        ('[tenants.a]\ncurve_keys = ["short"]', "CURVE"),
        ('[tenants.a]\ntoken_file = "relative"', "absolute"),
        ("[tenants.a]\ntoken_sha256 = []", "token_sha256"),  # only the daemon writes these
        ('[tenants."%s"]\nuids = [1]' % ("x" * 129), "129 bytes"),
        ('[tenants.""]\nuids = [1]', "namespace"),
        ("[tenants.a]\npublic = 1", "public"),
        ('[tenancy]\npublic_writers = [""]', "public_writers"),
    ],
)
def test_what_can_not_be_used_stops_the_start(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        loaded(tmp_path, text)


def test_tenants_can_be_given_as_json() -> None:
    (one,) = load_config(
        environ={"KVD_TENANTS": '{"a": {"uids": [7], "dram": {"max": "1GiB"}}}'}
    ).tenants
    assert one.uids == (7,) and one.rules.tiers["dram"].maximum == Amount(1 << 30)


@pytest.mark.parametrize("name", NAMES)
def test_any_name_comes_back_and_touches_no_other_file(tmp_path: Path, name: str) -> None:
    """K53: a name is no part of a path."""
    path = tmp_path / "state" / "tenants.json"
    token = Registry([], str(path)).add(name, {"uids": [5]}, token=True)
    assert token is not None
    again = Registry([], str(path)).get(name)
    assert again.name == name and again.uids == (5,)
    assert again.token_sha256 == (token_digest(token.encode()),)
    files = [found for found in tmp_path.rglob("*") if found.is_file()]
    assert files == [path] and token not in path.read_text()


@pytest.mark.parametrize("name", ["", "a\0b", "x" * 300, "\udc80"])
def test_a_name_that_can_not_be_one_is_refused(tmp_path: Path, name: str) -> None:
    """K53"""
    registry = Registry([], str(tmp_path / "t.json"))
    with pytest.raises(BadKey):
        registry.add(name, {}, token=True)
    assert not list(tmp_path.iterdir())


def test_the_state_file_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    Registry([], str(path)).add("a", {}, token=True)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [found.name for found in tmp_path.iterdir()] == ["t.json"]


def test_changes_merge_and_nothing_takes_a_key_back(tmp_path: Path) -> None:
    registry = Registry([], str(tmp_path / "t.json"))
    token = registry.add("a", {"uids": [5], "dram": {"min": "10%", "max": "20%"}}, token=True)
    assert token is not None
    registry.set("a", {"dram": {"min": "15%", "max": None}, "nvme": {"weight": 3}, "uids": None})
    tenant = registry.get("a")
    assert shown_tenant(tenant) == {"dram": {"min": "15%"}, "nvme": {"weight": 3.0}}
    assert tenant.token_sha256 == (token_digest(token.encode()),)
    assert Registry([], registry.path).get("a") == tenant


@pytest.mark.parametrize("given", [{"dram": {"mni": None}}, {"nvem": None}, {"token": None}])
def test_a_key_that_there_is_not_can_not_be_taken_back(
    tmp_path: Path, given: dict[str, Any]
) -> None:
    """A typing error would read as done."""
    registry = Registry([], str(tmp_path / "t.json"))
    registry.add("a", {"dram": {"min": "10%"}}, token=False)
    with pytest.raises(BadKey, match="unknown key"):
        registry.set("a", given)
    assert shown_tenant(registry.get("a")) == {"dram": {"min": "10%"}}


def test_what_nobody_could_go_by_is_not_kept(tmp_path: Path) -> None:
    registry = Registry([], str(tmp_path / "t.json"))
    asked: list[list[str]] = []

    def check(tenants: list[Tenant]) -> None:
        asked.append([tenant.name for tenant in tenants])
        if any(tenant.token_file for tenant in tenants):
            raise BadKey("no such file")

    registry.check = check
    registry.add("a", {}, token=False)
    with pytest.raises(BadKey, match="no such file"):
        registry.add("b", {"token_file": "/nowhere"}, token=False)
    with pytest.raises(BadKey, match="no such file"):
        registry.set("a", {"token_file": "/nowhere"})
    assert asked == [["a"], ["a", "b"], ["a"]]
    assert Registry([], registry.path).tenants() == registry.tenants() == [Tenant("a")]


def test_a_rotated_token_replaces_the_old_one_now_or_with_the_next(tmp_path: Path) -> None:
    registry = Registry([], str(tmp_path / "t.json"))
    first = registry.add("a", {}, token=True)
    second = registry.rotate("a", keep=True)
    assert first is not None
    assert registry.get("a").token_sha256 == tuple(
        token_digest(token.encode()) for token in (first, second)
    )
    third = registry.rotate("a", keep=False)
    assert registry.get("a").token_sha256 == (token_digest(third.encode()),)


def test_what_the_configuration_says_is_not_changed(tmp_path: Path) -> None:
    registry = Registry([parse_tenant("a", {"uids": [5]})], str(tmp_path / "t.json"))
    for change in (
        lambda: registry.set("a", {"uids": [6]}),
        lambda: registry.rotate("a", keep=False),
        lambda: registry.remove("a"),
        lambda: registry.add("a", {}, token=True),
        lambda: registry.add("b", {"uids": [5]}, token=False),
        lambda: registry.add("b", {"colour": 1}, token=False),
        lambda: registry.set("b", {"uids": [6]}),
    ):
        with pytest.raises(BadKey):
            change()
    assert registry.get("a").uids == (5,) and not (tmp_path / "t.json").exists()


def test_the_configuration_has_the_last_word_over_the_state_file(tmp_path: Path) -> None:
    path = str(tmp_path / "t.json")
    Registry([], path).add("a", {"uids": [5]}, token=False)
    told = Registry([parse_tenant("a", {"uids": [6]})], path).find("a")
    assert told is not None and told.configured and told.tenant.uids == (6,)


def test_what_can_not_be_kept_is_not_done(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    registry = Registry([], str(path))
    registry.add("a", {"uids": [5]}, token=False)
    before = path.read_bytes()
    registry.path = str(tmp_path / "t.json" / "below-a-file")
    changes: list[str] = []
    registry.changed = lambda name, tenant: changes.append(name)
    with pytest.raises(InternalError, match="state_file"):
        registry.set("a", {"uids": [6]})
    with pytest.raises(InternalError):
        registry.remove("a")
    assert registry.get("a").uids == (5,) and path.read_bytes() == before and not changes


@pytest.mark.parametrize("cut", range(0, 120, 7))
def test_a_torn_state_file_stops_the_start_and_is_left_alone(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "t.json"
    Registry([], str(path)).add("a", {"uids": [5], "dram": {"min": "10%"}}, token=True)
    whole = path.read_bytes()
    path.write_bytes(whole[: min(cut, len(whole) - 3)])
    with pytest.raises(ConfigError, match="does not hold"):
        Registry([], str(path))
    path.write_bytes(whole.replace(b'"version": 1', b'"version": 9'))
    with pytest.raises(ConfigError, match="version"):
        Registry([], str(path))


def test_where_the_state_file_stands() -> None:
    assert state_path("/x/t", "/etc/kvd/kvd.toml", {}, "i") == "/x/t"
    assert state_path(None, "/etc/kvd.toml", {}, "default") == "/etc/kvd.toml.tenants.json"
    service = {"STATE_DIRECTORY": "/var/lib/kvd:/other"}
    assert state_path(None, "/etc/kvd.toml", service, "default") == "/var/lib/kvd/tenants.json"
    assert state_path(None, None, {"XDG_STATE_HOME": "/s"}, "default") == "/s/kvd/tenants.json"
    assert state_path(None, None, {"HOME": "/h"}, "i").startswith(os.path.expanduser("~"))


@pytest.mark.parametrize("config_file", [None, "/etc/kvd.toml"])
@pytest.mark.parametrize("environ", [{"XDG_STATE_HOME": "/s"}, {"STATE_DIRECTORY": "/var/lib/kvd"}])
def test_no_two_instances_share_a_state_file(
    config_file: str | None, environ: dict[str, str]
) -> None:
    names = ["default", "a", "b"]
    assert len({state_path(None, config_file, environ, name) for name in names}) == len(names)


def test_two_tenants_never_share_a_key(tmp_path: Path) -> None:
    public, _ = zmq.curve_keypair()
    registry = Registry([], str(tmp_path / "t.json"))
    registry.add("a", {"curve_keys": [public.decode()]}, token=False)
    with pytest.raises(BadKey, match="another tenant"):
        registry.add("b", {"curve_keys": [public.decode()]}, token=False)

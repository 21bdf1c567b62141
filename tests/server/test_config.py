"""The configuration: names, sizes, numbers, and where each value came from."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

import pytest

from kvd.errors import ConfigError
from kvd.server.config import load_config
from kvd.server.settings import SETTINGS
from kvd.server.shown import resolved_toml, shown_settings
from kvd.sizes import LARGEST, format_size, parse_size

NAMESPACES = """
[[namespaces]]
name = "team-a"
uids = [1001, 1002]

[[namespaces]]
name = "team-b"
gids = [990]
"""


def load(tmp_path: Path, text: str = "", **environ: str):
    file = tmp_path / "kvd.toml"
    file.write_text(text)
    return load_config(environ=environ, file=str(file))


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("1073741824", 2**30),
        ("10GiB", 10 * 2**30),
        ("10 gb", 10 * 10**9),
        ("4GB", 4 * 10**9),
        ("4GiB", 4 * 2**30),
        ("1.5GiB", 3 * 2**29),
        ("0.5kB", 500),
        ("7B", 7),
        (" 64 MiB ", 64 * 2**20),
        (4096, 4096),
    ],
)
def test_a_size_is_bytes_or_a_number_with_a_unit(text: object, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    [
        "NaN", "inf", "-inf", -1, "-1", "1e400", "1_000", "", " ", None, True, False, 1.5,
        float("nan"), float("inf"), 2**63, "9223372036854775808", "10 GiBB", "10Gi B", "0.3B",
        "10  GiB", "GiB", "+4", "0x10", "４", [], {}, "9" * 400, "1.0000000001GiB",
    ],
)  # fmt: skip
def test_what_is_no_size_is_refused(text: object) -> None:
    """K124"""
    with pytest.raises(ValueError):
        parse_size(text)


def test_the_largest_size_is_the_largest() -> None:
    assert parse_size(LARGEST) == LARGEST
    with pytest.raises(ValueError, match="larger than"):
        parse_size(LARGEST + 1)


def test_sizes_are_shown_with_a_binary_unit() -> None:
    assert [format_size(s) for s in (0, 1023, 4096, 3 * 2**29, 2**40)] == [
        "0 B",
        "1023 B",
        "4 KiB",
        "1.5 GiB",
        "1 TiB",
    ]


def test_a_size_that_its_unit_does_not_tell_exactly_is_told_in_bytes_too() -> None:
    assert format_size(2093056) == "2.0 MiB (2093056 bytes)"
    assert format_size(4 * 10**9) == "3.7 GiB (4000000000 bytes)"
    assert format_size(2**62 + 1) == "4096.0 PiB (4611686018427387905 bytes)"
    assert format_size(1025) == "1.0 KiB (1025 bytes)"
    with pytest.raises(ConfigError, match=r"2\.0 MiB \(2093056 bytes\) is outside 2 MiB to 64 TiB"):
        load_config(flags={"arena.size": "2093056"}, environ={})


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('[arena]\nsize = "4XB"', "arena.size"),
        ("[arena]\nsize = nan", "arena.size"),
        ("[arena]\nsize = true", "arena.size"),
        ("[arena]\nsize = 0", "arena.size"),
        ("[arena]\nsize = 9223372036854775808", "arena.size"),
        ('[arena]\nsize = "8MiB"\nslab_size = "1MiB"', "arena.slab_size"),
        ("[daemon]\ndrain_s = inf", "daemon.drain_s"),
        ("[daemon]\ndrain_s = -1", "daemon.drain_s"),
        ("[daemon]\ndrain_s = true", "daemon.drain_s"),
        ("[daemon]\nworkers = 0", "daemon.workers"),
        ("[daemon]\nworkers = 1.5", "daemon.workers"),
        ('[daemon]\nlog_level = "loud"', "daemon.log_level"),
        ('[daemon]\ninstance = "../x"', "daemon.instance"),
        ('[daemon]\ninstance = ""', "daemon.instance"),
        ("[limits]\nwrite_share = 1.5", "limits.write_share"),
        ("[limits]\nlease_share = 0", "limits.lease_share"),
        ("[limits]\nlease_s = 20\nlease_max_s = 10", "limits.lease_s"),
        ("[limits]\ninflight = 100000", "limits.inflight"),
        ('[admin]\ngroup = "no-such-group-here"', "admin.group"),
        ("[admin]\nuids = [-1]", "admin.uids"),
        ('[tcp]\nendpoint = "tcp://127.0.0.1"', "tcp.endpoint"),
        ('[tcp]\nendpoint = "tcp://127.0.0.1:99999"', "tcp.endpoint"),
        ('[tcp]\nendpoint = "tcp://127.0.0.1:7000"', "tcp.secret_key_file"),
        ('[[namespaces]]\nname = "a"', "namespaces"),
        ('[[namespaces]]\nname = ""\nuids = [1]', "namespaces"),
        ('[[namespaces]]\nname = "a"\nuids = [1]\ncolour = 3', "namespaces"),
        ('[[namespaces]]\nname="a"\nuids=[1]\n[[namespaces]]\nname="b"\nuids=[1]', "namespaces"),
        ('[[namespaces]]\nname="a"\nuids=[1]\n[[namespaces]]\nname="a"\nuids=[2]', "namespaces"),
        ("[arena]\nsize = " + "9" * 5000, "arena.size"),
    ],
)
def test_a_value_that_cannot_be_used_is_refused_by_name_and_origin(
    tmp_path: Path, text: str, named: str
) -> None:
    """K124"""
    with pytest.raises(ConfigError) as refused:
        load(tmp_path, text)
    message = str(refused.value)
    assert "\n" not in message
    assert named in message or "not valid TOML" in message  # Python's own limit on digits
    assert "kvd.toml" in message or "default" in message


@pytest.mark.parametrize(
    ("text", "unknown", "nearest"),
    [
        ("[arena]\nmax_dram_gbb = 4", "arena.max_dram_gbb", "arena.size"),
        ("[arena]\nsiz = 4", "arena.siz", "arena.size"),
        ("[limits]\nslab_size = 4", "limits.slab_size", "arena.slab_size"),
        ("[deamon]\nsocket = '/x'", "[deamon]", "[daemon]"),
        ("size = 4", "size", "arena.size"),
        ("[daemon]\nlisten = '/x'", "daemon.listen", "daemon.socket"),
        ("[[namespace]]\nname = 'a'", "namespace", "namespaces"),
    ],
)
def test_an_unknown_key_stops_the_start_with_the_nearest_right_one(
    tmp_path: Path, text: str, unknown: str, nearest: str
) -> None:
    """K123"""
    with pytest.raises(ConfigError) as refused:
        load(tmp_path, text)
    assert unknown in str(refused.value)
    assert nearest in str(refused.value)


def test_a_key_that_stands_twice_is_refused(tmp_path: Path) -> None:
    """K123"""
    with pytest.raises(ConfigError, match="not valid TOML"):
        load(tmp_path, "[arena]\nsize = 1\nsize = 2")


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("KVD_MAX_DRAMGB", "KVD_ARENA_SIZE"),
        ("KVD_ARENA_SIZ", "KVD_ARENA_SIZE"),
        ("KVD_SOKCET", "KVD_SOCKET"),
    ],
)
def test_an_unknown_variable_stops_the_start_with_the_nearest_right_one(
    tmp_path: Path, name: str, nearest: str
) -> None:
    """K123"""
    with pytest.raises(ConfigError) as refused:
        load(tmp_path, "", **{name: "1"})
    assert name in str(refused.value)
    assert nearest in str(refused.value)


def test_variables_of_kvds_own_tools_are_passed_over(tmp_path: Path) -> None:
    """Whatever variable any part of kvd reads may stand in the daemon's environment."""
    root = Path(__file__).resolve().parents[2]
    files = [
        file
        for folder in ("kvd", "tools", "connectors", "tiers", "eviction")
        for file in (root / folder).rglob("*.py")
    ]
    names = {name for file in files for name in re.findall(r'"(KVD_[A-Z_]+)"', file.read_text())}
    assert {"KVD_MODEL_DIR", "KVD_TOKEN_FILE", "KVD_SOCKET", "KVD_CONFIG"} <= names
    settings = {setting.env for setting in SETTINGS}
    load(tmp_path, "", **dict.fromkeys(names - settings - {"KVD_CONFIG"}, "x"))


def test_flags_win_over_environment_over_file_over_default(tmp_path: Path) -> None:
    """K123"""
    file = tmp_path / "kvd.toml"
    file.write_text('[arena]\nsize = "8MiB"\n[daemon]\ninstance = "f"\ndrain_s = 1\n')
    config = load_config(
        flags={"arena.size": "32MiB"},
        environ={"KVD_ARENA_SIZE": "16MiB", "KVD_INSTANCE": "e"},
        file=str(file),
    )
    assert (config.arena_size, config.instance, config.drain_s) == (32 * 2**20, "e", 1.0)
    assert config.workers == 2
    assert config.origins["arena.size"] == "flag --arena-size"
    assert config.origins["daemon.instance"] == "env KVD_INSTANCE"
    assert config.origins["daemon.drain_s"] == f"file {file}"
    assert config.origins["daemon.workers"] == "default"


def test_every_setting_has_a_flag_and_a_variable_of_its_own() -> None:
    assert len({s.flag for s in SETTINGS}) == len({s.env for s in SETTINGS}) == len(SETTINGS)
    named = {s.name: (s.flag, s.env) for s in SETTINGS}
    assert named["daemon.socket"] == ("--socket", "KVD_SOCKET")
    assert named["arena.size"] == ("--arena-size", "KVD_ARENA_SIZE")


def test_the_resolved_configuration_gives_itself_again(tmp_path: Path) -> None:
    first = load(tmp_path, NAMESPACES + '[admin]\ngroup = "root"\n[limits]\nlease_s = 0.25\n')
    text = resolved_toml(first)
    tomllib.loads(text)
    second = load(tmp_path, text)
    assert [getattr(first, s.field) for s in SETTINGS] == [
        getattr(second, s.field) for s in SETTINGS
    ]


@pytest.mark.parametrize(
    "url",
    [
        "redis://u:sEcret@host:1/0",
        "redis://u:sE/c@ret@host:1/0",
        "redis://host:1/0?db=1&password=sEcret",
    ],
)
@pytest.mark.parametrize("section", ["tiers.redis", "directory"])
def test_a_password_in_a_url_is_not_shown(tmp_path: Path, section: str, url: str) -> None:
    text = f'[{section}]\nurl = "{url}"\n[tiers.s3]\nbucket = "b"\n'
    config = load(tmp_path, text)
    (row,) = [row for row in shown_settings(config) if row["name"] == f"{section}.url"]
    for shown in (resolved_toml(config), row["value"]):
        assert "host:1/0" in shown
        assert not re.search("sE|ret@|cret", shown.replace("secret_key_file", ""))


def test_namespaces_can_be_given_as_text() -> None:
    config = load_config(
        environ={"KVD_NAMESPACES": "name=a,uids=1001+1002;name=b,gids=5,token_file=/etc/t"}
    )
    first, second = config.namespaces
    assert (first.name, first.uids, first.gids) == ("a", (1001, 1002), ())
    assert (second.name, second.gids, second.token_file) == ("b", (5,), "/etc/t")


def test_a_file_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no-such\.toml"):
        load_config(environ={}, file="/tmp/no-such.toml")


def test_the_arena_is_named_by_user_and_instance() -> None:
    config = load_config(environ={"KVD_INSTANCE": "x"})
    assert config.arena_base == f"/dev/shm/kvd-{os.getuid()}-x"

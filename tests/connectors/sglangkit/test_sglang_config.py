"""Settings, and what happens without SGLang."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvd.connectors.sglang.config import Options, read_options
from kvd.errors import ConfigError

ALIEN = """
import sys
sys.modules["sglang"] = None  # as if it were not installed
import kvd.connectors.sglang as module
from kvd.errors import ConfigError
try:
    module.KvdHiCache
except (ConfigError, ImportError) as error:
    assert isinstance(error, ConfigError) and isinstance(error, ImportError)
    print(type(error).__name__, error)
try:
    module.Kvd
except AttributeError as error:
    print(error)
print("torch" in sys.modules)
"""


def test_without_sglang_only_the_use_of_the_class_fails_and_says_what_to_do() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ALIEN], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("SglangMissing") and "install sglang" in lines[0]
    assert "no attribute 'Kvd'" in lines[1]
    assert lines[2] == "False"


def test_nothing_told_means_the_defaults_and_sglangs_own_keys_are_its_own() -> None:
    own = {
        "backend_name": "kvd",
        "module_path": "kvd.connectors.sglang",
        "class_name": "KvdHiCache",
        "interface_v1": 1,
        "prefetch_threshold": 256,
        "hicache_storage_pass_prefix_keys": True,
    }
    assert read_options({}) == read_options(own) == Options()


@pytest.mark.parametrize(
    ("name", "hint"),
    [("sockets", "did you mean socket"), ("xyzzy", "known: socket"), ("interface_v2", "_v1")],
)
def test_an_unknown_key_is_refused_with_the_nearest(name: str, hint: str) -> None:
    """K123: a wrong key never does nothing."""
    with pytest.raises(ConfigError, match=f"'{name}' is unknown.*{hint}"):
        read_options({name: 1})


@pytest.mark.parametrize(
    ("name", "value", "due"),
    [
        ("socket", 7, "text"),
        ("weights", None, "text"),
        ("verify", 1, "true or false"),
        ("lookup_deadline_s", "1", "a number of seconds"),
        ("lookup_deadline_s", True, "a number of seconds"),
        ("load_deadline_s", 0, "from 0.001 to 600"),
        ("store_deadline_s", 1e9, "from 0.001 to 600"),
        ("endpoint", "http://x", "tcp://host:port or ipc:///path"),
    ],
)
def test_a_value_of_the_wrong_kind_or_range_is_refused(name: str, value: object, due: str) -> None:
    """K124."""
    with pytest.raises(ConfigError, match=f"{name} is .*{due}"):
        read_options({name: value})


def test_an_ipc_endpoint_is_a_socket_and_both_are_one_too_many() -> None:
    assert read_options({"endpoint": "ipc:///run/kvd/kvd.sock"}).socket == "/run/kvd/kvd.sock"
    assert read_options({"endpoint": "tcp://host:1"}).endpoint == "tcp://host:1"
    with pytest.raises(ConfigError, match="both"):
        read_options({"endpoint": "tcp://host:1", "socket": "/x"})


def test_a_backend_with_a_wrong_key_is_never_made(make) -> None:
    with pytest.raises(ConfigError, match="did you mean weights"):
        make(None, {"weight": "x"})


def test_a_token_file_that_is_not_there_stops_the_start(make, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="token_file"):
        make(None, {"token_file": str(tmp_path / "none")})

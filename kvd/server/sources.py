"""Where settings come from: the file and the environment.

The law of this module: a name that is not in the table of settings stops the start with the nearest
right name.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from kvd.errors import ConfigError
from kvd.server.files import open_file
from kvd.server.settings import SETTINGS, Setting, find_setting

__all__ = ["CONFIG_ENV", "from_environment", "from_file", "nearest_flag"]

# Variables that belong to clients and tools; the daemon lets them stand in its environment.
CLIENT_ENV = frozenset({"KVD_TOKEN_FILE", "KVD_MODEL_DIR"})
CONFIG_ENV = "KVD_CONFIG"  # the file to read when there is no --config

# What people of other systems call a setting, for the hint when no name is near.
_OTHER_WORDS = {
    "arena.size": ("dram", "mem", "ram", "capacity", "pool", "gb", "max_size", "cpu_size"),
    "arena.path": ("shm", "directory"),
    "daemon.socket": ("ipc", "listen", "bind", "address", "host", "port", "url"),
    "daemon.log_level": ("verbos", "debug"),
    "eviction.policy": ("evict", "lru", "replacement"),
    "limits.sessions": ("client", "connection"),
    "telemetry.otlp_endpoint": ("otel", "otlp", "collector", "metrics_end"),
    "telemetry.prometheus": ("prom", "scrape", "metrics_port"),
    "tenants": ("tenant", "user", "quota"),
}


def from_file(file: str) -> Iterator[tuple[Setting, object, str]]:
    """Settings of a TOML file: each with its value as it stands there, and where that is.
    ConfigError."""
    try:
        with open_file(file) as stream:
            document = tomllib.load(stream)
    except OSError as error:
        raise ConfigError(f"config file {file}: {error.strerror}; give another --config") from None
    except (ValueError, RecursionError) as error:  # also a number of too many digits
        raise ConfigError(f"config file {file}: not valid TOML: {error}") from None
    origin = f"file {file}"
    sections = {setting.section for setting in SETTINGS}
    for section, content in _tables(document):
        whole = find_setting(section)
        if whole is not None:
            yield whole, content, origin
            continue
        if not isinstance(content, dict):
            raise _unknown(section, f"config file {file}")
        if section not in sections:
            near = _nearest(section, [name for name in sections])
            hint = f"; the nearest section is [{near}]" if near else ""
            raise ConfigError(f"config file {file}: unknown section [{section}]{hint}")
        for key, value in content.items():
            setting = find_setting(f"{section}.{key}")
            if setting is None:
                raise _unknown(f"{section}.{key}", f"config file {file}")
            yield setting, value, origin


def _tables(document: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """The tables of a document by name; those within `tiers` as `tiers.NAME`."""
    for section, content in document.items():
        if section != "tiers" or not isinstance(content, dict):
            yield section, content
            continue
        yield section, {k: v for k, v in content.items() if not isinstance(v, dict)}
        for name, inner in content.items():
            if isinstance(inner, dict):
                yield f"tiers.{name}", inner


def from_environment(environ: Mapping[str, str]) -> Iterator[tuple[Setting, object, str]]:
    """The same of variables KVD_...; ConfigError for one that is none of ours."""
    known = {setting.env: setting for setting in SETTINGS}
    for name in sorted(environ):
        if not name.startswith("KVD_") or name in CLIENT_ENV or name == CONFIG_ENV:
            continue
        if name not in known:
            dotted = name.removeprefix("KVD_").lower()
            near = _nearest(name, list(known)) or _by_other_words(dotted, lambda s: s.env)
            hint = f"; the nearest is {near}" if near else ""
            raise ConfigError(f"environment: unknown variable {name}{hint}; unset or rename it")
        yield known[name], environ[name], f"env {name}"


def _unknown(name: str, where: str) -> ConfigError:
    names = [setting.name for setting in SETTINGS]
    key = name.rpartition(".")[2]
    keys: dict[str, str] = {}
    for known in names:
        keys.setdefault(known.rpartition(".")[2], known)
    near_key = _nearest(key, list(keys))
    near = (
        (keys[near_key] if near_key else None)
        or _by_other_words(key.lower(), lambda setting: setting.name)
        or _nearest(name, names)
    )
    hint = f"; the nearest is {near}" if near else "; `kvd --help` lists all settings"
    return ConfigError(f"{where}: unknown key {name}{hint}")


def nearest_flag(flag: str) -> str | None:
    """The flag that was probably meant."""
    word = flag.lstrip("-").replace("-", "_").lower()
    return _nearest(flag, [setting.flag for setting in SETTINGS]) or _by_other_words(
        word, lambda setting: setting.flag
    )


def _nearest(name: str, names: list[str]) -> str | None:
    found = difflib.get_close_matches(name, names, 1, 0.75)
    return found[0] if found else None


def _by_other_words(word: str, form: Any) -> str | None:
    for name, others in _OTHER_WORDS.items():
        setting = find_setting(name)
        if setting is not None and any(other in word for other in others):
            return str(form(setting))
    return None

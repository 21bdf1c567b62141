"""Parsers of settings: from a raw value to the one that the daemon uses.

The law of this module: a parser takes what TOML gives, or the text of a flag or a variable, and
returns the value or raises ValueError saying what would be accepted. It looks nothing up.
"""

from __future__ import annotations

import ipaddress
import json
import math
import os
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from kvd.chunk import check_namespace
from kvd.errors import BadKey
from kvd.server.tenantrules import Tenant, parse_tenant
from kvd.sizes import format_size, parse_size


class NamespaceRule(NamedTuple):
    """Who belongs to a namespace: any of the uids, any of the gids, or the token in the file."""

    name: str
    uids: tuple[int, ...] = ()
    gids: tuple[int, ...] = ()
    token_file: str | None = None


Parser = Callable[[object], Any]


def size(least: int, most: int, *, auto: bool = False) -> Parser:
    def parse(value: object) -> int | None:
        if auto and value == "auto":
            return None
        found = parse_size(value)
        if not least <= found <= most:
            raise ValueError(
                f"{format_size(found)} is outside {format_size(least)} to {format_size(most)}"
            )
        return found

    return parse


def count(least: int, most: int) -> Parser:
    def parse(value: object) -> int:
        if isinstance(value, str) and re.fullmatch(r"[0-9]{1,18}", value.strip(), re.ASCII):
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"not a whole number; give one from {least} to {most}")
        if not least <= value <= most:
            raise ValueError(f"outside {least} to {most}")
        return value

    return parse


def number(least: float, most: float, unit: str) -> Parser:
    def parse(value: object) -> float:
        if isinstance(value, str):
            try:
                value = float(value) if "_" not in value else value
            except ValueError:
                pass
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"not a number; give {unit} from {least:g} to {most:g}")
        # the comparison comes first: an int of a thousand digits does not fit a float
        if not least <= value <= most or not math.isfinite(value):
            raise ValueError(f"outside {least:g} to {most:g} {unit}")
        return float(value)

    return parse


def choice(*names: str) -> Parser:
    def parse(value: object) -> str:
        if isinstance(value, str) and value.lower() in names:
            return value.lower()
        raise ValueError("give one of " + ", ".join(names))

    return parse


def fractions(count: int) -> Parser:
    """So many numbers from 0 to 1: a list, or text with commas between."""
    one = number(0, 1, "of the whole")

    def parse(value: object) -> tuple[float, ...]:
        if isinstance(value, str):
            value = [part.strip() for part in value.split(",")]
        if not isinstance(value, list | tuple) or len(value) != count:
            raise ValueError(f"give {count} numbers")
        return tuple(one(item) for item in value)

    return parse


def boolean_or_path(value: object) -> bool | str:
    try:
        return boolean(value)
    except ValueError:
        return path(value)


def boolean(value: object) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "yes", "on", "1"):
        return True
    if isinstance(value, str) and value.lower() in ("false", "no", "off", "0"):
        return False
    raise ValueError("give true or false")


def group(value: object) -> str:
    """A group's name, or its number: as a number or as text."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError("give the name or number of a group")
    found = text(str(value)).strip()
    if re.fullmatch(r"[+-]?[0-9]+", found, re.ASCII):
        if not re.fullmatch(r"[0-9]{1,10}", found) or int(found) >= 2**32 - 1:
            raise ValueError("a group's number is from 0 to 4294967294")
    return found


def text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("not a text")
    if "\0" in value:
        raise ValueError("holds a NUL byte")
    try:
        value.encode()
    except UnicodeEncodeError:  # bytes of a flag or a variable, or an escape in JSON
        raise ValueError("not UTF-8; give a text without such bytes") from None
    return value


def path(value: object) -> str:
    found = text(value)
    if not found:
        raise ValueError("empty; give a path")
    return text(os.path.abspath(os.path.expanduser(found)))  # the folder one is in counts, too


def maybe_path(value: object) -> str | None:
    return path(value) if value != "" else None


def instance(value: object) -> str:
    found = text(value)
    # it becomes part of a file name in /dev/shm
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", found, re.ASCII):
        raise ValueError("give 1 to 64 letters, digits, '.', '_' or '-', the first no sign")
    return found


def installation(value: object) -> str | None:
    found = text(value)
    if found == "auto":
        return None
    if not found or len(found) > 256:
        raise ValueError("give a name of 1 to 256 characters, or auto")
    return found


def endpoint(value: object) -> str | None:
    found = text(value)
    if found == "":
        return None
    match = re.fullmatch(r"tcp://(\[[0-9A-Fa-f:.%a-z]+\]|[^\s:/\[\]]+):([0-9]{1,5})", found)
    if match is None or not 0 < int(match[2]) < 65536:
        raise ValueError("give tcp://ADDRESS:PORT, for example tcp://127.0.0.1:7711")
    return found


def collector(value: object) -> str:
    found = text(value).rstrip("/")
    if found == "":
        return ""
    match = re.fullmatch(r"https?://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})", found)
    if match is None or not 0 < int(match[2]) < 65536:
        raise ValueError("give http://HOST:PORT or https://HOST:PORT; gRPC's usual port is 4317")
    return found


def address(value: object) -> str | None:
    """A numeric address, so that nothing is looked up, and a port."""
    found = text(value)
    if found == "":
        return None
    host, _, port = found.rpartition(":")
    if re.fullmatch(r"[0-9.]+|\[[0-9A-Fa-f:.]+\]", host) and re.fullmatch(r"[0-9]{1,5}", port):
        try:
            ipaddress.ip_address(host.strip("[]"))
        except ValueError:
            pass
        else:
            if 0 < int(port) < 65536:
                return found
    raise ValueError("give ADDRESS:PORT, for example 127.0.0.1:9464 or [::1]:9464")


def attributes(value: object) -> tuple[str, ...]:
    """NAME=VALUE: a list, or text with commas between."""
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    if not isinstance(value, list | tuple):
        raise ValueError("give a list of NAME=VALUE")
    found = tuple(text(item) for item in value)
    for item in found:
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9._/-]{0,127}=.{1,256}", item):
            raise ValueError(f"{item[:40]!r} is not NAME=VALUE")
    if len({item.partition("=")[0] for item in found}) < len(found):
        raise ValueError("a name stands there twice")
    return found


def identifiers(value: object) -> tuple[int, ...]:
    """uids or gids: a list of numbers, or text with commas between."""
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    if not isinstance(value, list | tuple):
        raise ValueError("give a list of numbers")
    one = count(0, 2**32 - 2)
    try:
        return tuple(one(item) for item in value)
    except ValueError:
        raise ValueError("give a list of numbers from 0 to 4294967294") from None


_RULE_KEYS = ("name", "uids", "gids", "token_file")


def namespaces(value: object) -> tuple[NamespaceRule, ...]:
    """A list of tables, or text: `name=a,uids=1001+1002,token_file=/etc/kvd/a;name=b,gids=100`."""
    if isinstance(value, str):
        value = [_rule_from_text(part) for part in value.split(";") if part.strip()]
    if not isinstance(value, list):
        raise ValueError("give a list of tables [[namespaces]] with " + ", ".join(_RULE_KEYS))
    rules: list[NamespaceRule] = []
    for entry in value:
        if not isinstance(entry, dict):
            raise ValueError("an entry is not a table; write [[namespaces]]")
        unknown = [key for key in entry if key not in _RULE_KEYS]
        if unknown:
            raise ValueError(f"unknown key {unknown[0]!r}; known are " + ", ".join(_RULE_KEYS))
        try:
            name = check_namespace(text(entry.get("name", "")))
        except BadKey as refused:
            raise ValueError(str(refused)) from None
        rules.append(
            NamespaceRule(
                name,
                identifiers(entry.get("uids", [])),
                identifiers(entry.get("gids", [])),
                maybe_path(entry.get("token_file", "")),
            )
        )
        if not (rules[-1].uids or rules[-1].gids or rules[-1].token_file):
            raise ValueError(f"{name!r} has no members; give uids, gids or a token_file")
    names = [rule.name for rule in rules]
    taken: set[int] = set()
    for rule in rules:
        if names.count(rule.name) > 1:
            raise ValueError(f"{rule.name!r} stands there twice")
        if taken.intersection(rule.uids):
            raise ValueError(f"a uid of {rule.name!r} belongs to another namespace already")
        taken.update(rule.uids)
    return tuple(rules)


def _rule_from_text(part: str) -> dict[str, object]:
    entry: dict[str, object] = {}
    for item in part.split(","):
        key, equals, value = item.strip().partition("=")
        if not equals or key in entry:
            raise ValueError("write name=NAME,uids=1001+1002,gids=100,token_file=PATH;name=…")
        entry[key] = value.replace("+", ",") if key in ("uids", "gids") else value
    return entry


def tenants(value: object) -> tuple[Tenant, ...]:
    """A table of tables, or the same as JSON."""
    if isinstance(value, str):
        try:
            value = json.loads(value or "{}")
        except (ValueError, RecursionError):
            raise ValueError('not JSON; write {"NAME": {"uids": [1001], …}, …}') from None
    if not isinstance(value, dict):
        raise ValueError("give tables [tenants.NAME]")
    found = tuple(parse_tenant(name, given) for name, given in value.items())
    for what in ("uids", "curve_keys"):
        taken: set[object] = set()
        for tenant in found:
            if taken.intersection(getattr(tenant, what)):
                raise ValueError(f"one of {what} of {tenant.name!r} belongs to another tenant too")
            taken.update(getattr(tenant, what))
    return found


def names(value: object) -> tuple[str, ...]:
    """Namespaces: a list, or text with commas between."""
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    if not isinstance(value, list | tuple):
        raise ValueError("give a list of names")
    try:
        return tuple(check_namespace(text(item)) for item in value)
    except BadKey as refused:
        raise ValueError(str(refused)) from None

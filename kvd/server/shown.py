"""The configuration as it is shown: rows of a stat, or the kvd.toml that would give it again.

The law of this module: no password is shown.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from kvd.server.settings import SETTINGS
from kvd.server.tenantrules import shown_tenant
from kvd.sizes import rounded_size

if TYPE_CHECKING:
    from kvd.server.config import Config

__all__ = ["resolved_toml", "shown_settings", "without_password"]

_URLS = ("tiers.redis.url", "directory.url")  # a password may stand in them


def without_password(url: str) -> str:
    """Less all that stands before an @ (a password may hold a / or @ unquoted), or in the query."""
    return re.sub(r"([?&](?:username|password)=)[^&]*", r"\1***", re.sub(r"//.*@", "//", url))


def shown_settings(config: Config) -> list[dict[str, Any]]:
    """Every setting as a row of name, value (plain: it travels in `stat`) and origin."""
    rows = []
    for setting in SETTINGS:
        value = getattr(config, setting.field)
        if setting.name == "namespaces":
            value = [rule._asdict() for rule in value]
        elif setting.name == "tenants":
            value = {tenant.name: shown_tenant(tenant) for tenant in value}
        if setting.name in _URLS:
            value = without_password(value)
        origin = config.origins.get(setting.name, "default")
        rows.append({"name": setting.name, "value": value, "origin": origin})
    return rows


def resolved_toml(config: Config) -> str:
    """The whole configuration as a kvd.toml that would give it again (less a password in a URL),
    each origin beside it."""
    lines: list[str] = []
    section = None
    for setting in SETTINGS:
        if not setting.key:
            continue
        if setting.section != section:
            section = setting.section
            lines += ["", f"[{section}]"] if lines else [f"[{section}]"]
        value = getattr(config, setting.field)
        if setting.name in _URLS:
            value = without_password(value)
        origin = config.origins.get(setting.name, "default")
        note = f"{rounded_size(value)}, {origin}" if setting.metavar == "SIZE" and value else origin
        if value is None:
            value = "auto" if setting.default == "auto" else ""
        lines.append(f"{setting.key} = {_toml_value(value)}  # {note}")
    for rule in config.namespaces:
        lines += ["", f"[[namespaces]]  # {config.origins.get('namespaces', 'default')}"]
        for name, value in rule._asdict().items():
            if value not in (None, ()):
                lines.append(f"{name} = {_toml_value(value)}")
    for tenant in config.tenants:
        name = _toml_value(tenant.name)
        lines += ["", f"[tenants.{name}]  # {config.origins.get('tenants', 'default')}"]
        shown = shown_tenant(tenant)
        lines += [f"{k} = {_toml_value(v)}" for k, v in shown.items() if not isinstance(v, dict)]
        for tier, _ in tenant.tiers:
            lines += ["", f"[tenants.{name}.{tier}]"]
            lines += [f"{k} = {_toml_value(v)}" for k, v in shown[tier].items()]
    return "\n".join(lines) + "\n"


def _toml_value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return str(int(value)) if value == int(value) else repr(value)
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    # a TOML basic string has JSON's escapes, except for surrogate pairs and DEL
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")

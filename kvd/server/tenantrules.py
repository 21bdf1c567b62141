"""A tenant as an operator writes it: in kvd.toml, for `kvd-cli tenant`, and in the state file.

The law of this module: one table of keys, and one parser for all three. A key that is unknown, or a
value that can't be used, is a ValueError that names it and says what would be accepted. A name is
any Unicode that a namespace may have; it is never part of a path.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from zmq.utils import z85

from kvd.chunk import check_namespace
from kvd.core.shares import Amount, TenantRules, TierShare
from kvd.errors import BadKey
from kvd.sizes import LARGEST, parse_size

__all__ = ["TIERS", "Tenant", "check_keys", "parse_tenant", "raw_key", "shown_tenant"]

TIERS = ("dram", "hbm", "nvme", "redis", "s3")
_KEYS = (
    "uids",
    "gids",
    "token_file",
    "curve_keys",
    "public",
    "public_writer",
    "requests_s",
    "inflight",
)
_STORED = ("token_sha256",)
_SHARE_KEYS = ("min", "weight", "max")
_MOST_KEYS = 1024


class Tenant(NamedTuple):
    """Who belongs to a namespace, and what it may have."""

    name: str
    uids: tuple[int, ...] = ()
    gids: tuple[int, ...] = ()
    token_file: str | None = None
    token_sha256: tuple[str, ...] = ()  # of tokens that the daemon made; hex
    curve_keys: tuple[str, ...] = ()  # public keys of TCP clients, Z85
    public: bool = False  # its lookups go on in the public namespace, unasked
    public_writer: bool = False  # its members may write there
    requests_s: float = 0.0  # 0: not bounded
    inflight: int = 0  # bytes of unfinished writes; 0: not bounded
    tiers: tuple[tuple[str, TierShare], ...] = ()

    @property
    def rules(self) -> TenantRules:
        """What the core goes by."""
        return TenantRules(dict(self.tiers), self.public, self.inflight)


def parse_tenant(name: object, given: object, *, stored: bool = False) -> Tenant:
    """A tenant from a table. `stored`: from the state file, which has hashes of tokens too."""
    try:
        checked = check_namespace(name)  # type: ignore[arg-type]
    except BadKey as refused:
        raise ValueError(str(refused)) from None
    if not isinstance(given, Mapping):
        raise ValueError(f"{checked!r} is not a table; write [tenants.NAME]")
    check_keys(checked, given, stored=stored)
    try:
        return Tenant(
            checked,
            _numbers(given.get("uids", ()), "uids"),
            _numbers(given.get("gids", ()), "gids"),
            _path(given.get("token_file")),
            _texts(given.get("token_sha256", ()), "token_sha256"),
            tuple(map(_curve_key, _texts(given.get("curve_keys", ()), "curve_keys"))),
            _flag(given.get("public", False), "public"),
            _flag(given.get("public_writer", False), "public_writer"),
            _number(given.get("requests_s", 0), "requests_s", 0, 1e9),
            _size(given.get("inflight", 0), "inflight"),
            tuple((tier, _share(given[tier], tier)) for tier in TIERS if tier in given),
        )
    except ValueError as refused:
        raise ValueError(f"{checked!r}: {refused}") from None


def check_keys(name: str, given: Mapping[str, Any], *, stored: bool = False) -> None:
    """ValueError for a key that no tenant has, whatever its value."""
    known = (*_KEYS, *TIERS, *(_STORED if stored else ()))
    for key, value in given.items():
        if key not in known:
            raise ValueError(f"{name!r}: unknown key {key!r}; known are " + ", ".join(known))
        if key in TIERS and isinstance(value, Mapping):
            try:
                _check_share(value, key)
            except ValueError as refused:
                raise ValueError(f"{name!r}: {refused}") from None


def shown_tenant(tenant: Tenant, *, secrets: bool = False) -> dict[str, Any]:
    """The table that would give the tenant again, plain; `secrets`: with hashes of tokens."""
    shown: dict[str, Any] = {}
    for key in (*_KEYS, *(_STORED if secrets else ())):
        value = getattr(tenant, key)
        if value not in (None, (), False, 0):
            shown[key] = list(value) if isinstance(value, tuple) else value
    for tier, share in tenant.tiers:
        row: dict[str, Any] = {}
        if share.minimum != Amount():
            row["min"] = _amount_text(share.minimum)
        if share.weight != 1.0:
            row["weight"] = share.weight
        if share.maximum is not None:
            row["max"] = _amount_text(share.maximum)
        shown[tier] = row
    return shown


def raw_key(key: str) -> bytes:
    """The 32 bytes of a CURVE key. ValueError."""
    try:
        raw: bytes = z85.decode(key.encode()) if len(key) == 40 else b""
    except Exception:  # noqa: BLE001 - z85 raises whatever its arithmetic does
        raw = b""
    if len(raw) != 32:
        raise ValueError("not a CURVE key of 40 Z85 characters; zmq.curve_keypair() makes a pair")
    return raw


# -- values -------------------------------------------------------------------------------------


def _check_share(given: Mapping[Any, Any], tier: str) -> None:
    for key in given:
        if key not in _SHARE_KEYS:
            raise ValueError(f"{tier}: unknown key {key!r}; known are " + ", ".join(_SHARE_KEYS))


def _share(given: object, tier: str) -> TierShare:
    if not isinstance(given, Mapping):
        raise ValueError(f"{tier} is not a table; write [tenants.NAME.{tier}]")
    least = _amount(given.get("min", 0), f"{tier}.min")
    most = _amount(given["max"], f"{tier}.max") if "max" in given else None
    if most is not None and (least.part > most.part > 0 or least.bytes > most.bytes > 0):
        raise ValueError(f"{tier}: min is more than max")
    if most == Amount() and least != Amount():
        raise ValueError(f"{tier}: min is more than max")
    return TierShare(least, _number(given.get("weight", 1), f"{tier}.weight", 0.001, 1000), most)


def _amount(value: object, name: str) -> Amount:
    """`25%` of the tier, or a size."""
    if isinstance(value, str):
        match = re.fullmatch(r"([0-9]{1,3}(?:\.[0-9]{1,6})?) ?%", value.strip(), re.ASCII)
        if match is not None:
            percent = float(match[1])
            if percent > 100:
                raise ValueError(f"{name}: more than 100%")
            return Amount(0, percent / 100)
    try:
        return Amount(parse_size(value))
    except ValueError as refused:
        raise ValueError(f"{name}: {refused}; or a part of the tier, as 25%") from None


def _amount_text(amount: Amount) -> str | int:
    return f"{amount.part * 100:.9g}%" if amount.part else amount.bytes


def _size(value: object, name: str) -> int:
    try:
        return min(parse_size(value), LARGEST)
    except ValueError as refused:
        raise ValueError(f"{name}: {refused}") from None


def _number(value: object, name: str, least: float, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name}: not a number")
    if not least <= value <= most:
        raise ValueError(f"{name}: outside {least:g} to {most:g}")
    return float(value)


def _flag(value: object, name: str) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name}: give true or false")
    return value


def _numbers(value: object, name: str) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or len(value) > _MOST_KEYS:
        raise ValueError(f"{name}: give a list of numbers")
    for item in value:
        if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < 2**32 - 1:
            raise ValueError(f"{name}: give a list of numbers from 0 to 4294967294")
    return tuple(dict.fromkeys(value))


def _texts(value: object, name: str) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or len(value) > _MOST_KEYS:
        raise ValueError(f"{name}: give a list of texts")
    if not all(isinstance(item, str) for item in value):
        raise ValueError(f"{name}: give a list of texts")
    return tuple(dict.fromkeys(value))


def _path(value: object) -> str | None:
    if value is None or value == "":
        return None
    if not isinstance(value, str) or not value.startswith("/") or "\0" in value:
        raise ValueError("token_file: give an absolute path")
    return value


def _curve_key(key: str) -> str:
    try:
        raw_key(key)
    except ValueError as refused:
        raise ValueError(f"curve_keys: {refused}") from None
    return key

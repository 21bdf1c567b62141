"""Sizes as people write them.

The law of this module: a size is a whole number of bytes, said without ambiguity, or it is refused.
`4GB` is 4,000,000,000 and `4GiB` is 4,294,967,296; letters may be of either case, one space may
stand before the unit. Nothing else is a number here: no sign, no underscore, no exponent, no bool.
"""

from __future__ import annotations

import re
from fractions import Fraction

__all__ = ["LARGEST", "format_size", "parse_size", "rounded_size"]

LARGEST = 2**62  # above this no offset + length fits a signed 64-bit number

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgtp", start=1):
    _UNITS[_letter + "b"] = 1000**_power
    _UNITS[_letter + "ib"] = 1024**_power

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")

_SIZE = re.compile(r"(?P<number>[0-9]{1,20}(?:\.[0-9]{1,9})?) ?(?P<unit>[A-Za-z]{0,3})", re.ASCII)

_ACCEPTED = "give bytes (1073741824) or a number with kB, MB, GB, TB, KiB, MiB, GiB or TiB"


def parse_size(value: object) -> int:
    """Bytes of `value`, a whole number or a text. ValueError says what is accepted."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(f"not a size; {_ACCEPTED}")
    if isinstance(value, int):
        if value < 0:
            raise ValueError(f"negative; {_ACCEPTED}")
        return _bounded(value)
    match = _SIZE.fullmatch(value.strip())
    if match is None:
        raise ValueError(f"not a size; {_ACCEPTED}")
    factor = _UNITS.get(match["unit"].lower())
    if factor is None:
        raise ValueError(f"unknown unit {match['unit']!r}; {_ACCEPTED}")
    exact = Fraction(match["number"]) * factor
    if exact.denominator != 1:
        raise ValueError("not a whole number of bytes")
    return _bounded(int(exact))


def _bounded(size: int) -> int:
    if size > LARGEST:
        raise ValueError(f"larger than the largest size that can be addressed, {LARGEST} bytes")
    return size


def format_size(size: int) -> str:
    """The size with the largest binary unit that leaves at most one decimal, and in bytes too where
    that is not all of it: "2.0 MiB" alone may be outside of "2 MiB to 64 TiB"."""
    short = rounded_size(size)
    unit = 1024 ** _unit_of(size)
    return short if 10 * size % unit == 0 else f"{short} ({size} bytes)"


def rounded_size(size: int) -> str:
    """The same without bytes: for where these stand beside it."""
    power = _unit_of(size)
    if not power:
        return f"{size} B"
    decimals = 1 if size % 1024**power else 0
    return f"{size / 1024**power:.{decimals}f} {_BINARY[power]}"


def _unit_of(size: int) -> int:
    return next((power for power in (5, 4, 3, 2, 1) if size >= 1024**power), 0)

"""Numbers as an operator writes and reads them: bytes, durations, counts, hex keys.

The law of this module: pure text in, pure text out. What comes from the daemon or the command
line is shown only through `clean`, so that a name can't move the cursor or change its colour.
"""

from __future__ import annotations

import re
import unicodedata

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d|w)")
_SHOWN_DIGITS = 12
LONGEST_S = 36_500 * 86_400.0  # a century: its nanoseconds fit a message


def format_bytes(count: float) -> str:
    """1536 -> '1.5 KiB'. Binary units, at most one decimal."""
    value, step = float(count), 0
    while abs(value) >= 1024 and step < len(_UNITS) - 1:
        value, step = value / 1024, step + 1
    if step == 0 or abs(value) >= 100:
        return f"{value:,.0f} {_UNITS[step]}"
    return f"{value:.1f}".removesuffix(".0") + f" {_UNITS[step]}"


def format_count(count: float) -> str:
    """1234567 -> '1,234,567'."""
    return f"{count:,.0f}"


def format_duration(seconds: float | None) -> str:
    """93784.2 -> '1d 2h'; 0.0042 -> '4.2 ms'. Two units at most; '-' for None."""
    if seconds is None:
        return "-"
    if seconds < 0:
        return "0 s"
    if seconds < 1:
        return "0 s" if seconds == 0 else f"{seconds * 1000:.3g} ms"
    if seconds < 10:
        return f"{seconds:.1f}".removesuffix(".0") + " s"
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    parts: list[str] = []
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        amount, whole = divmod(whole, size)
        if amount or parts:
            parts.append(f"{amount}{unit}")
        if len(parts) == 2:
            break
    return " ".join(part for part in parts if not part.startswith("0"))


def parse_duration(text: str, most_s: float = LONGEST_S) -> float:
    """'90', '90s', '10m', '1h30m', '2d' -> seconds. ValueError says what is accepted."""
    seconds = _seconds(text)
    if seconds > most_s:
        raise ValueError(f"{_cut(text)!r} is too long: at most {most_s / 86400:.0f}d")
    return seconds


def _seconds(text: str) -> float:
    stripped = text.strip().lower()
    try:
        plain = float(stripped)
    except ValueError:
        pass
    else:
        if plain >= 0:  # "inf" is too long, "nan" is nothing
            return plain
        raise ValueError(_duration_help(text))
    position, total = 0, 0.0
    for match in _DURATION.finditer(stripped):
        if stripped[position : match.start()].strip():
            raise ValueError(_duration_help(text))
        total += float(match[1]) * _SECONDS[match[2]]
        position = match.end()
    if position == 0 or stripped[position:].strip():
        raise ValueError(_duration_help(text))
    return total


def _duration_help(text: str) -> str:
    return (
        f"{_cut(text)!r} is not a duration: write 90s, 10m, 1h30m, 2d (a plain number is seconds)"
    )


def _cut(text: str) -> str:
    return text if len(text) <= 40 else text[:37] + "..."


def parse_hex(text: str, *, digits: int = 64) -> str:
    """A whole or abbreviated key in lower case. ValueError if it is not hex or too long."""
    key = text.strip().lower().removeprefix("sha256:").rstrip("….")
    if not key or len(key) > digits or not re.fullmatch(r"[0-9a-f]+", key):
        raise ValueError(f"{text!r} is not a key: up to {digits} hexadecimal digits, whole or cut")
    return key


def short_key(key: str | None) -> str:
    """The first digits of a key, as tables show it and as every option takes it."""
    return (key or "-")[:_SHOWN_DIGITS]


def clean(value: object) -> str:
    """Text that is safe on any terminal: control and direction characters are written out."""
    text = value if isinstance(value, str) else str(value)
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        char if unicodedata.category(char)[0] != "C" else char.encode("unicode_escape").decode()
        for char in (
            unit if not 0xD800 <= ord(unit) <= 0xDFFF else "\N{REPLACEMENT CHARACTER}"
            for unit in text
        )
    )

"""What kvd-cli reads and writes: durations, sizes, keys, and names that don't trust a terminal."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.server.settings import SETTINGS
from kvd.tools.cli.console import Output, cell
from kvd.tools.cli.settings import _text
from kvd.tools.cli.units import (
    clean,
    format_bytes,
    format_duration,
    parse_duration,
    parse_hex,
    short_key,
)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("0", 0),
        ("1.5", 1.5),
        ("90s", 90),
        ("10m", 600),
        ("1h30m", 5400),
        ("1h 30m", 5400),
        ("2d", 172800),
        ("1w", 604800),
        ("250ms", 0.25),
        (" 5M ", 300),
    ],
)
def test_durations_are_read_as_people_write_them(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text", ["", "m", "5x", "-5", "5m!", "1h30", "nan", "-inf", "five", "5 m x"]
)
def test_a_duration_that_makes_no_sense_is_refused_with_what_is_accepted(text: str) -> None:
    with pytest.raises(ValueError, match="1h30m"):
        parse_duration(text)


@pytest.mark.parametrize(
    "text", ["inf", "1e99", "1e999", "99999999999999d", "36501d", "9" * 5000 + "w", "9" * 5000]
)
def test_a_duration_that_no_clock_can_hold_is_refused_with_the_limit(text: str) -> None:
    with pytest.raises(ValueError, match="too long: at most 36500d") as refused:
        parse_duration(text)
    assert len(str(refused.value)) < 100
    assert parse_duration("36500d") == 36500 * 86400


@given(st.text(max_size=20))
def test_any_text_is_a_duration_or_a_value_error(text: str) -> None:
    try:
        assert parse_duration(text) >= 0
    except ValueError:
        pass


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1,023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (200 << 20, "200 MiB"),
        (5 << 30, "5 GiB"),
        (3 << 60, "3,072 PiB"),
    ],
)
def test_sizes_are_shown_in_binary_units(count: int, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (-1, "0 s"),
        (0, "0 s"),
        (0.0042, "4.2 ms"),
        (1.25, "1.2 s"),
        (42.9, "42 s"),
        (60, "1m"),
        (61, "1m 1s"),
        (3600, "1h"),
        (93784, "1d 2h"),
    ],
)
def test_durations_are_shown_in_at_most_two_units(seconds: float | None, text: str) -> None:
    assert format_duration(seconds) == text


@given(st.floats(min_value=0, max_value=1e12, allow_nan=False))
def test_every_duration_has_a_text(seconds: float) -> None:
    assert format_duration(seconds)


def test_keys_are_taken_whole_cut_and_in_capitals() -> None:
    whole = "AB" * 32
    assert parse_hex(whole) == "ab" * 32
    assert parse_hex("3Fa9c2…") == "3fa9c2"
    assert parse_hex(" sha256:3fa ") == "3fa"
    assert short_key("ab" * 32) == "ab" * 6


@pytest.mark.parametrize("text", ["", "xyz", "3fa9 c2", "0x3f", "a" * 65, "３f"])
def test_what_is_no_key_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="hexadecimal"):
        parse_hex(text)


def test_a_name_can_not_steer_the_terminal() -> None:
    assert clean("\x1b[2Jgone\r\n") == "\\x1b[2Jgone\\r\\n"
    assert clean("user\N{RIGHT-TO-LEFT OVERRIDE}cod") == "user\\u202ecod"
    assert clean("a\ud800b") == "a\N{REPLACEMENT CHARACTER}b"
    assert clean("mandant-ß-日本") == "mandant-ß-日本"


@given(st.text())
def test_whatever_a_name_is_it_can_be_written_as_utf8(text: str) -> None:
    clean(text).encode("utf-8")


def test_a_long_table_says_what_a_short_one_says_and_takes_no_time(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = ("name", ">size", "state")
    rows = [["a", "12 MiB", "ok"], ["名前", "1 B", "-"], ["x\x1b\n", "340 KiB", "degraded"]]
    monkeypatch.setenv("COLUMNS", "80")
    output = Output("inspect", as_json=False)
    table = output.table("", *heads)
    for row in rows:
        table.add_row(*(cell(text) for text in row))
    output.show(table)
    short = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    output.long_table(heads, rows)
    long = capsys.readouterr().out.splitlines()
    assert [long[0], *long[2:]] == [short[0], *short[2:]]
    begun = time.perf_counter()
    output.long_table(heads, (["key", f"{number} B", "sealed"] for number in range(100_000)))
    assert time.perf_counter() - begun < 10  # rich: more than a minute
    assert len(capsys.readouterr().out.splitlines()) == 100_002


def test_settings_that_are_sizes_are_shown_as_sizes() -> None:
    shown = {one.name for one in SETTINGS if _text(one.name, 3 << 30) == "3 GiB"}
    assert shown == {one.name for one in SETTINGS if one.metavar == "SIZE"}
    assert _text("tiers.hbm.scrub", 0) == "0 B" and _text("arena.slab_size", None) == "-"

"""docs/protocol.md says what the code does: numbers, names, fields and limits."""

from __future__ import annotations

import re
from pathlib import Path

from kvd.chunk import Outcome
from kvd.errors import ErrorCode
from kvd.wire import DEFAULT_LIMITS, FEATURES, Limits, Op
from kvd.wire import messages as m

DOC = (Path(__file__).resolve().parents[2] / "docs" / "protocol.md").read_text()


HEADS = re.compile(r"\| (-|op \||n \||code|name \| value|condition)")


def rows(heading: str) -> list[list[str]]:
    """Cells of the tables under a heading."""
    section = re.split(rf"^## {heading}$", DOC, flags=re.MULTILINE)[1].split("\n## ")[0]
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in section.splitlines()
        if line.startswith("|") and not HEADS.match(line)
    ]


def test_operations_and_their_fields_are_the_codes() -> None:
    by_op = {op: message for message, op in m.OP_OF.items()}
    found = {}
    for cells in rows("Operations"):
        match = re.match(r"(\d+) (\w+)$", cells[0])
        if match:
            found[int(match[1])] = (match[2], cells[1])
    assert {number: name for number, (name, _) in found.items()} == {
        int(op): op.name.lower() for op in Op
    }
    for number, (_, text) in found.items():
        if number in (Op.PUT, Op.STAT, Op.HEARTBEAT, Op.BYE):
            continue
        asked = re.sub(r"\(.*?\)| or nil", "", text.split("→")[0])
        named = tuple(field.strip() for field in asked.split(",") if field.strip())
        assert named == by_op[Op(number)]._fields  # type: ignore[attr-defined]
    assert m.Put._fields == m.Reserve._fields


def test_outcomes_errors_and_limits_are_the_codes() -> None:
    told = {
        int(number): name
        for cells in rows("Outcomes")
        for number, name in (cells[0:2], cells[3:5])
        if number
    }
    assert told == {int(outcome): outcome.name for outcome in Outcome}
    assert {int(cells[0]): cells[1] for cells in rows("Errors")} == {
        int(code): code.name for code in ErrorCode if code < 100
    }
    limits = {name.strip() for cells in rows("Limits") for name in cells[0].split(",")}
    assert limits == set(Limits._fields)
    plain = {c[0]: int(c[1].replace(",", "")) for c in rows("Limits") if c[1][-1].isdigit()}
    assert all(getattr(DEFAULT_LIMITS, name) == value for name, value in plain.items())


def test_every_condition_of_a_selector_is_there() -> None:
    section = DOC.split("| condition |")[1].split("\n\n")[0]
    named = re.findall(r"^\| ([a-z_, ]+) \|", section, flags=re.MULTILINE)
    assert {n.strip() for row in named for n in row.split(",")} == set(m.Selector._fields)


def test_features_are_short_names() -> None:
    assert all(re.fullmatch(r"[a-z-]+", feature) for feature in FEATURES)

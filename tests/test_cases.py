"""The table of reported failures and the tests that show them say the same.

docs/cases.md has a row a case: id, area, what must hold, shown by, waits for. A test shows a case
when its docstring names the id. Run as a program, this file writes the column *shown by* anew:

    python tests/test_cases.py
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
ID = re.compile(r"\bK\d{2,3}\b")
CASES = 106  # a row can't get lost unnoticed
NAMED = 4  # tests that a row names at most: the ones to read first
PAGE = ROOT / "docs" / "cases.md"


class Case(NamedTuple):
    id: str
    area: str
    invariant: str
    shown_by: tuple[str, ...]
    waits_for: str


@cache
def table() -> tuple[Case, ...]:
    rows = []
    for line in PAGE.read_text().splitlines():
        if not re.match(r"\| K\d+ \|", line):
            continue
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        assert len(cells) == 5, f"five cells, please: {line}"
        rows.append(Case(*cells[:3], tuple(re.findall(r"`([^`]+)`", cells[3])), cells[4]))
    return tuple(rows)


def _named(body: list[ast.stmt], prefix: str) -> dict[str, set[str]]:
    """Name of each test function or class -> ids in its docstring."""
    found: dict[str, set[str]] = {}
    for node in body:
        if isinstance(node, ast.ClassDef):
            found[prefix + node.name] = set(ID.findall(ast.get_docstring(node) or ""))
            found |= _named(node.body, f"{prefix}{node.name}::")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if node.name.startswith("test"):
                found[prefix + node.name] = set(ID.findall(ast.get_docstring(node) or ""))
    return found


@cache
def docstrings() -> dict[str, set[str]]:
    """`tests/path.py::name` -> ids that its docstring names."""
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        file = path.relative_to(ROOT).as_posix()
        for name, ids in _named(ast.parse(path.read_text(), file).body, "").items():
            found[f"{file}::{name}"] = ids
    return found


def test_the_table_is_whole() -> None:
    ids = [case.id for case in table()]
    assert len(ids) == len(set(ids)) == CASES
    assert ids == sorted(ids, key=lambda case: int(case[1:]))
    assert all(case.area and case.invariant for case in table())


def test_every_case_is_shown_or_waits_for_something() -> None:
    open_ends = [case.id for case in table() if not case.shown_by and not case.waits_for]
    assert not open_ends


def test_what_the_table_calls_shown_is_shown() -> None:
    wrong = []
    for case in table():
        for name in case.shown_by:
            if name not in docstrings():
                wrong.append(f"{case.id}: there is no {name}")
            elif case.id not in docstrings()[name]:
                wrong.append(f"{case.id}: the docstring of {name} does not name it")
    assert not wrong, "\n".join(wrong)


def test_what_a_test_shows_stands_in_the_table() -> None:
    """Each id that a docstring names is a known case, and the table does not call it unshown."""
    shown = {case.id: bool(case.shown_by) for case in table()}
    wrong = []
    for name, ids in docstrings().items():
        wrong += [f"{name} names {id_}, which is no case" for id_ in ids if id_ not in shown]
        wrong += [f"{name} shows {id_}" for id_ in ids if shown.get(id_) is False]
    assert not wrong, "\n".join([*wrong, "python tests/test_cases.py writes the table anew"])


def update() -> None:
    """Write the column *shown by* from the docstrings; all else stays as it is."""
    lines = PAGE.read_text().splitlines()
    for at, line in enumerate(lines):
        if not re.match(r"\| K\d+ \|", line):
            continue
        cells = line.strip().strip("|").split("|")
        case = cells[0].strip()
        names = [f"`{name}`" for name, ids in docstrings().items() if case in ids]
        cells[3] = f" {'<br>'.join(names[:NAMED])} "
        lines[at] = f"|{'|'.join(cells)}|"
    PAGE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    update()

"""The documentation names only what is there: files, tests, targets, settings."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from kvd.server.settings import SETTINGS

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def _prose(page: Path) -> str:
    """The page without its code blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def _anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as a forge makes them."""
    headings = re.findall(r"^#+ (.*)$", _prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings}


@cache
def _tests(file: Path) -> frozenset[str]:
    def names(body: list[ast.stmt], prefix: str) -> Iterator[str]:
        for node in body:
            if isinstance(node, ast.ClassDef):
                yield prefix + node.name
                yield from names(node.body, f"{prefix}{node.name}::")
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield prefix + node.name

    return frozenset(names(ast.parse(file.read_text()).body, ""))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    wrong = []
    for target in re.findall(r"\]\(([^)\s]+)\)", _prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        found = (page.parent / file).resolve() if file else page
        if not found.exists():
            wrong.append(target)
        elif anchor and anchor not in _anchors(found):
            wrong.append(f"{target}: no such heading")
    assert not wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_tests_exist(page: Path) -> None:
    wrong = []
    for name in re.findall(r"`(tests/[^`\s]+)`", _prose(page)):
        file, _, test = name.partition("::")
        path = ROOT / file
        if not path.exists() or (test and test not in _tests(path)):
            wrong.append(name)
    assert not wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = set(re.findall(r"(?:^|[`\s])make ([a-z][a-z-]+)\b", _code(page)))
    assert named <= targets


def _code(page: Path) -> str:
    """Code blocks and inline code of a page."""
    text = page.read_text()
    blocks = re.findall(r"^```.*?\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    return "\n".join([*blocks, *re.findall(r"`([^`\n]+)`", _prose(page))])


def test_operations_lists_every_setting_with_its_default() -> None:
    """| `arena.size` | `--arena-size` | `KVD_ARENA_SIZE` | `1GiB` | … |"""
    text = (ROOT / "docs" / "operations.md").read_text()
    lines = [line for line in text.splitlines() if re.match(r"\| `[a-z0-9_.]+` \| `--", line)]
    cells = [[cell.strip("` ") for cell in line.strip().strip("|").split("|")] for line in lines]
    rows = {name: rest[:3] for name, *rest in cells}
    wanted = {}
    for setting in SETTINGS:
        default = setting.default
        if isinstance(default, bool):
            shown = str(default).lower()
        else:
            shown = "" if default in ("", []) else str(default)
        wanted[setting.name] = [setting.flag, setting.env, shown]
    assert rows == wanted


def test_operations_begins_each_description_as_its_help_does() -> None:
    """With a capital; but a value (`redis://…`, `cuda:N`) stands as it is given."""
    text = (ROOT / "docs" / "operations.md").read_text()
    told = {cells[0].strip("`"): cells[-1] for cells in _rows(text) if len(cells) == 5}
    wanted = {}
    for setting in SETTINGS:
        first = setting.help.split()[0]
        is_value = re.search(r"[:/]", first)
        wanted[setting.name] = first if is_value else first[0].upper() + first[1:]
    assert {name: told[name].split()[0] for name in wanted} == wanted


def _rows(text: str) -> list[list[str]]:
    """Cells of all rows of tables: a bar in a cell is escaped, in code too."""
    lines = [line.strip() for line in text.splitlines() if line.lstrip().startswith("|")]
    return [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line[1:].removesuffix("|"))]
        for line in lines
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_row_has_as_many_cells_as_its_header(page: Path) -> None:
    """A cell too many is shown by nobody."""
    wrong, header = [], 0
    for line in _prose(page).splitlines():
        if not line.lstrip().startswith("|"):
            header = 0
            continue
        (cells,) = _rows(line)
        header = header or len(cells)
        if len(cells) != header:
            wrong.append(f"{len(cells)} cells, not {header}: {line}")
    assert not wrong

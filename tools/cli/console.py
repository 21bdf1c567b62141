"""Where output goes: a table for a person, one JSON object for a program.

The law of this module: standard output carries the answer and nothing else; questions, hints and
errors go to standard error. Nothing that is printed can fail for its characters: what the
terminal's encoding lacks is escaped, and without UTF-8 all drawing is ASCII.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any, TextIO

from rich import box
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from kvd.tools.cli.units import clean

SCHEMA = 1
_PIPE_WIDTH = 200
_ANY_WIDTH = 10_000


def tolerant(stream: TextIO | None) -> None:
    """Make a standard stream escape what its encoding can't say, instead of raising."""
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")


class Output:
    """The answer of one command, as text or as JSON."""

    def __init__(self, command: str, *, as_json: bool) -> None:
        self.command = command
        self.as_json = as_json
        self.console = make_console(sys.stdout)
        self.side = make_console(sys.stderr)

    @property
    def ascii_only(self) -> bool:
        return is_ascii(self.console)

    def json(self, **fields: Any) -> None:
        """Write the one JSON object of this command (ASCII, so any terminal or pipe takes it)."""
        document = {"schema": SCHEMA, "command": self.command, **fields}
        sys.stdout.write(json.dumps(document, indent=2, default=_plain) + "\n")

    def show(self, *parts: RenderableType) -> None:
        """Print; a table that is wider than the terminal keeps its columns in one line each, for
        the terminal to wrap: nothing is cut, and lines can be copied."""
        width = self.console.width
        for part in parts:
            if isinstance(part, Table) and part.show_header:
                wide = self.console.options.update(max_width=_ANY_WIDTH)
                self.console.width = max(width, self.console.measure(part, options=wide).maximum)
            self.console.print(part)
            self.console.width = width

    def say(self, text: str, style: str = "") -> None:
        """One plain line on standard output."""
        self.console.print(Text(text, style=style), soft_wrap=True)

    def note(self, text: str, style: str = "") -> None:
        """One plain line on standard error."""
        self.side.print(Text(text, style=style), soft_wrap=True)

    def table(self, title: str, *columns: str) -> Table:
        """An empty table; a column that starts with '>' is right-aligned."""
        table = Table(
            title=Text(title) if title else None,
            title_justify="left",
            title_style="bold",
            header_style="bold",
            box=box.ASCII2 if self.ascii_only else box.SIMPLE_HEAD,
            show_edge=False,
            pad_edge=False,
            collapse_padding=True,
        )
        for column in columns:
            table.add_column(
                column.removeprefix(">"),
                justify="right" if column.startswith(">") else "left",
                no_wrap=True,
            )
        return table

    def long_table(self, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """A table of many rows, as plain text: rich takes near a millisecond for each."""
        cells = [[head.removeprefix(">") for head in heads]]
        cells += [[clean(text) for text in row] for row in rows]
        widths = [max(map(cell_len, column)) for column in zip(*cells, strict=True)]
        rule = "-" if self.ascii_only else "─"
        lines = [self._line(row, widths, heads) for row in cells]
        lines.insert(1, rule * (sum(widths) + 2 * len(widths) - 2))
        sys.stdout.write("\n".join(lines) + "\n")

    @staticmethod
    def _line(row: Sequence[str], widths: Sequence[int], heads: Sequence[str]) -> str:
        shown = []
        for text, width, head in zip(row, widths, heads, strict=True):
            blank = " " * (width - (len(text) if text.isascii() else cell_len(text)))
            shown.append(blank + text if head.startswith(">") else text + blank)
        return "  ".join(shown).rstrip()

    def bar(self, used: float, limit: float, width: int = 24) -> Text:
        """A bar that fills with use; red near its limit."""
        share = min(max(used / limit, 0.0), 1.0) if limit > 0 else 0.0
        full, empty = ("#", ".") if self.ascii_only else ("█", "░")
        filled = min(width, max(round(share * width), 1 if used > 0 else 0))
        colour = "red" if share >= 0.97 else "yellow" if share >= 0.85 else "green"
        return Text.assemble((full * filled, colour), (empty * (width - filled), "dim"))


def make_console(stream: TextIO) -> Console:
    """A console that neither guesses markup in data nor folds tables that go into a pipe."""
    options: dict[str, Any] = {}
    if not stream.isatty() and "COLUMNS" not in os.environ:
        options["width"] = _PIPE_WIDTH
    return Console(
        file=stream, markup=False, highlight=False, emoji=False, legacy_windows=False, **options
    )


def is_ascii(console: Console) -> bool:
    return not console.encoding.lower().replace("_", "-").startswith("utf")


def cell(value: object, style: str = "") -> Text:
    """A table cell with a value from outside, made safe."""
    return Text(clean(value), style=style)


def _plain(value: object) -> Any:
    """bytes as hex, everything else as its text: JSON output never fails on a value."""
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).hex()
    if isinstance(value, set | frozenset | tuple):
        return list(value)
    return str(value)

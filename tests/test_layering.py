"""The arrows between the rooms point down only, and the pure rooms do no I/O.

The tables below are the architecture. An import that they don't name fails here; whoever adds one
decides on the architecture, not on a line of code.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Package name -> folder, as in pyproject.toml.
FOLDERS = {
    "kvd": ROOT / "kvd",
    "kvd.tiers": ROOT / "tiers",
    "kvd.eviction": ROOT / "eviction",
    "kvd.connectors": ROOT / "connectors",
    "kvd.tools": ROOT / "tools",
}

# Room -> rooms that it may import. `errors`, `native` and the version are everybody's.
ARROWS: dict[str, set[str]] = {
    "errors": set(),
    "native": set(),
    "slices": set(),
    "sizes": set(),
    "chunk": set(),
    "fair": set(),
    "eviction": {"chunk"},
    "telemetry": set(),
    "wire": {"chunk"},
    "arena": {"chunk", "sizes"},
    "blend": {"chunk"},
    "tiers": {"chunk", "fair"},
    "core": {"chunk", "eviction", "fair", "telemetry"},
    "client": {"wire", "chunk", "arena", "slices"},
    "server": {
        "core",
        "tiers",
        "telemetry",
        "eviction",
        "wire",
        "chunk",
        "arena",
        "slices",
        "sizes",
    },
    "connectors": {"client", "wire", "chunk", "blend"},
    # The bench measures the core, the arena and the tiers in its own process, with no daemon
    # between; the demo is an application of a connector.
    "tools": {
        "connectors",
        "client",
        "wire",
        "chunk",
        "blend",
        "core",
        "eviction",
        "arena",
        "telemetry",
        "tiers",
    },
}

# All that the pure rooms may import besides kvd: no sockets, files, threads, clocks, no chance.
PURE = {"core", "eviction", "chunk", "fair", "telemetry"}
PURE_IMPORTS = {
    "__future__",
    "abc",
    "array",
    "bisect",
    "collections",
    "contextlib",
    "dataclasses",
    "difflib",
    "enum",
    "functools",
    "hashlib",
    "heapq",
    "inspect",
    "itertools",
    "json",
    "math",
    "msgpack",
    "numpy",
    "operator",
    "re",
    "struct",
    "types",
    "typing",
    "xxhash",
}
SYS_CONSTANTS = {"byteorder", "maxsize", "float_info"}  # all of `sys` that is a constant
# `wire` is bytes in, bytes out, and where a daemon's sockets lie; it opens none.
NO_SOCKETS = {"wire": {"zmq", "socket", "select", "selectors", "asyncio", "threading", "mmap"}}
IO_CALLS = {"open", "print", "input", "exec", "eval", "__import__", "breakpoint"}

NEVER = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
NEVER_CALLED = {"recv_pyobj", "send_pyobj"}


class Module(NamedTuple):
    name: str
    path: Path
    tree: ast.Module

    @property
    def room(self) -> str:
        parts = self.name.split(".")
        return parts[1] if len(parts) > 1 else "kvd"


@cache
def modules() -> tuple[Module, ...]:
    found = []
    for package, folder in FOLDERS.items():
        for path in sorted(folder.rglob("*.py")):
            dotted = [package, *path.relative_to(folder).with_suffix("").parts]
            if dotted[-1] == "__init__":
                dotted.pop()
            found.append(Module(".".join(dotted), path, ast.parse(path.read_text(), str(path))))
    return tuple(found)


def imports(module: Module) -> Iterator[tuple[str, int]]:
    """Absolute dotted names that a module imports anywhere, with the line."""
    package = module.name if module.path.name == "__init__.py" else module.name.rpartition(".")[0]
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*up, base] if base else up)
            if base == "kvd":  # `from kvd import core` names rooms
                yield from ((f"kvd.{alias.name}", node.lineno) for alias in node.names)
            else:
                yield base, node.lineno


def calls(module: Module) -> Iterator[tuple[ast.Call, str]]:
    """Calls, with the last part of the called name."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name):
                yield node, node.func.id
            elif isinstance(node.func, ast.Attribute):
                yield node, node.func.attr


def where(module: Module, line: int) -> str:
    return f"{module.path.relative_to(ROOT)}:{line}"


def test_every_room_has_its_arrows() -> None:
    rooms = {m.room for m in modules()} - {"kvd"}
    assert rooms == set(ARROWS), "a new room must say in ARROWS what it may import"


def test_arrows_lead_to_no_circle() -> None:
    done: set[str] = set()
    left = dict(ARROWS)
    while left:
        free = {room for room, below in left.items() if below <= done}
        assert free, f"a circle among {sorted(left)}"
        done |= free
        left = {room: below for room, below in left.items() if room not in free}


@pytest.mark.parametrize("room", sorted(ARROWS))
def test_imports_follow_the_arrows(room: str) -> None:
    wrong = []
    for module in modules():
        if module.room != room:
            continue
        for name, line in imports(module):
            parts = name.split(".")
            if parts[0] != "kvd" or len(parts) == 1:
                continue
            target = parts[1]
            if target not in ARROWS[room] | {room, "errors", "native", "__version__"}:
                wrong.append(f"{where(module, line)} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_the_package_root_imports_nothing_of_kvd() -> None:
    wrong = [
        f"{where(m, line)} imports {name}"
        for m in modules()
        if m.name == "kvd"
        for name, line in imports(m)
        if name.startswith("kvd")
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("room", sorted(PURE))
def test_a_pure_room_does_no_io(room: str) -> None:
    """Core and eviction, and all that they stand on, import nothing that reaches the outside."""
    wrong = []
    for module in modules():
        if module.room != room:
            continue
        for name, line in imports(module):
            if name.split(".")[0] not in PURE_IMPORTS | {"kvd", "sys"}:
                wrong.append(f"{where(module, line)} imports {name}")
        wrong += [
            f"{where(module, node.lineno)} uses sys.{node.attr}"
            for node in ast.walk(module.tree)
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "sys"
            and node.attr not in SYS_CONSTANTS
        ]
        wrong += [
            f"{where(module, call.lineno)} calls {called}()"
            for call, called in calls(module)
            if isinstance(call.func, ast.Name) and called in IO_CALLS
        ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("room", sorted(NO_SOCKETS))
def test_the_wire_opens_no_sockets(room: str) -> None:
    wrong = [
        f"{where(module, line)} imports {name}"
        for module in modules()
        if module.room == room
        for name, line in imports(module)
        if name.split(".")[0] in NO_SOCKETS[room]
    ]
    assert not wrong, "\n".join(wrong)


def test_what_core_stands_on_is_pure_too() -> None:
    reached, todo = set(), {"core", "eviction"}
    while todo:
        room = todo.pop()
        reached.add(room)
        todo |= ARROWS[room] - reached
    assert reached <= PURE


def test_time_comes_into_the_core_as_an_argument() -> None:
    wrong = [
        where(module, node.lineno)
        for module in modules()
        if module.room in ("core", "eviction")
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in ("time", "datetime")
    ]
    assert not wrong, "\n".join(wrong)


def test_nothing_is_pickled() -> None:
    """K06: decoding what came over the wire or lies on a disk can never run code."""
    wrong = []
    for module in modules():
        wrong += [
            f"{where(module, line)} imports {name}"
            for name, line in imports(module)
            if name.split(".")[0] in NEVER
        ]
        for call, called in calls(module):
            allow = [k for k in call.keywords if k.arg == "allow_pickle"]
            if called in NEVER_CALLED or any(
                not (isinstance(k.value, ast.Constant) and k.value.value is False) for k in allow
            ):
                wrong.append(f"{where(module, call.lineno)} calls {called}")
    assert not wrong, "\n".join(wrong)


def test_only_tools_and_the_daemons_main_print() -> None:
    wrong = [
        where(module, call.lineno)
        for module in modules()
        if module.room != "tools" and module.name != "kvd.server.main"
        for call, called in calls(module)
        if isinstance(call.func, ast.Name) and called == "print"
    ]
    assert not wrong, "\n".join(wrong)


def test_every_module_states_its_law() -> None:
    """A module that holds code begins with a docstring that says what holds in it."""
    wrong = [
        str(m.path.relative_to(ROOT))
        for m in modules()
        if m.tree.body and not ast.get_docstring(m.tree)
    ]
    assert not wrong, "\n".join(wrong)

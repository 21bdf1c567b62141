"""The package that is installed holds all of the five folders, and its scripts have their code."""

from __future__ import annotations

import importlib.util
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOLDERS = {
    "kvd": "kvd",
    "kvd.tiers": "tiers",
    "kvd.eviction": "eviction",
    "kvd.connectors": "connectors",
    "kvd.tools": "tools",
}


def test_every_folder_with_code_is_declared() -> None:
    """Without a line in pyproject.toml a package works from a checkout and lacks in the wheel."""
    found = set()
    for package, folder in FOLDERS.items():
        for init in (ROOT / folder).rglob("__init__.py"):
            found.add(".".join([package, *init.parent.relative_to(ROOT / folder).parts]))
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == found
    assert PROJECT["tool"]["setuptools"]["package-dir"] == FOLDERS


def test_no_module_lies_beside_the_packages() -> None:
    """A folder without __init__.py would be left out of the wheel."""
    lost = [
        path.relative_to(ROOT).as_posix()
        for folder in FOLDERS.values()
        for path in (ROOT / folder).rglob("*.py")
        if not (path.parent / "__init__.py").exists()
    ]
    assert not lost


def test_every_console_script_has_its_module() -> None:
    for script, target in PROJECT["project"]["scripts"].items():
        module, _, function = target.partition(":")
        assert importlib.util.find_spec(module) is not None, f"{script}: no module {module}"
        assert function


def test_where_kvd_is_installed_without_what_it_needs_that_is_named_with_the_same_bounds() -> None:
    """The engines' environments: numpy comes with the engine."""
    needed = [one for one in PROJECT["project"]["dependencies"] if not one.startswith("numpy")]
    sglang = (ROOT / "tests/engines/sglangkit/requirements.txt").read_text().splitlines()
    assert set(needed) <= set(sglang)
    makefile = (ROOT / "Makefile").read_text()
    assert all(f"'{one}'" in makefile for one in needed)


def test_the_version_has_one_source() -> None:
    import kvd

    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "kvd.__version__"}
    assert kvd.__version__.count(".") == 2

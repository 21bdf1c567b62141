"""The part of the build that pyproject.toml can't say: with KVD_COMPILE=1, the modules that every
request goes through are compiled by mypyc into the wheel. Without it the wheel is pure Python.

The law of this file: what is compiled is what the type checker holds to the strictest rules, and it
is the very source that runs without a compiler, too.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

from setuptools import setup

ROOT = Path(__file__).resolve().parent
# Rooms of the package, and where they lie. `__init__` modules only name what others define.
COMPILED = {"kvd/core": "kvd/core", "kvd/chunk": "kvd/chunk", "kvd/eviction": "eviction"}
# Of other rooms, what each request, each chunk and each job of a tier goes through. Whoever is
# handed a caller's own numbers (leases, reservations, the client itself) stays as it is, for a
# compiled function takes no others than Python's; and so does what a weak reference points at (a
# channel): the compiler lets that be, and does not clear it.
ALSO = {
    "kvd": ("fair",),
    "kvd/arena": ("client", "table"),
    "kvd/client": (
        "acks", "call", "copies", "deadlines", "delays", "grants", "inline", "keys", "link", "load",
        "memory", "store", "stream",
    ),
    "kvd/server": (
        "carry", "counters", "dispatch", "holding", "ladder", "limiter", "loop", "replies",
        "requests", "respond",
    ),
    "kvd/tiers": (
        "breaker", "crew", "crossing", "health", "meter", "nvme/slabs", "pieces", "pool", "quiet",
        "seats", "waiting", "waking", "watch",
    ),
    "kvd/wire": ("codec", "frame", "replies", "requested", "requests"),
}  # fmt: skip
TOO = [f"{room}/{name}.py" for room, names in ALSO.items() for name in names]
# Messages are tuples with names, which a compiler can make nothing of.
# A spec remembers its digest once it was asked for it, which a compiled class has no place for.
LEFT_OUT = ("kvd/core/actions.py", "kvd/core/events.py", "kvd/chunk/spec.py")
OTHERS = ("tiers", "connectors", "tools")


def extensions() -> Any:
    """Compiled from a tree as the wheel would lay it out: package-dir is unknown to mypy."""
    from mypyc.build import mypycify

    tree = ROOT / "build" / "mypyc"
    shutil.rmtree(tree, ignore_errors=True)
    (tree / "kvd").mkdir(parents=True)
    for part in sorted((ROOT / "kvd").iterdir()):
        (tree / "kvd" / part.name).symlink_to(part)
    for folder in ("eviction", *OTHERS):
        (tree / "kvd" / folder).symlink_to(ROOT / folder)
    before = Path.cwd()
    os.chdir(tree)
    try:
        paths = [
            f"{room}/{path.name}"
            for room, folder in COMPILED.items()
            for path in sorted((ROOT / folder).glob("*.py"))
            if path.name != "__init__.py" and f"{room}/{path.name}" not in LEFT_OUT
        ]
        paths += TOO
        config = ["--config-file", str(ROOT / "pyproject.toml")]
        modules = mypycify(
            [*config, *paths],
            opt_level="2",
            debug_level="0",
            multi_file=True,
            target_dir=str(ROOT / "build" / "mypyc-c"),
            group_name="kvd",
        )
    finally:
        os.chdir(before)
    for module in modules:  # hashes count on it
        module.extra_compile_args.append("-fwrapv")
    return modules


if os.environ.get("KVD_COMPILE") == "1":
    # An installer asks for metadata first, and then brings what the build requires: the compiler,
    # and what the compiled modules import, for it checks their types.
    if {"editable_wheel", "develop"} & set(sys.argv):
        sys.exit("KVD_COMPILE=1 is not for editable installs: edits would change nothing")
    builds = {"bdist_wheel", "build", "build_ext"} & set(sys.argv)
    setup(
        ext_modules=extensions() if builds else [],
        setup_requires=["mypy>=1.11", "numpy>=1.26", "xxhash>=3.4"],
    )
else:
    setup()

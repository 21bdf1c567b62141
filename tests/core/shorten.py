"""Shorten a history that a state machine printed when it failed: `python shorten.py FILE`.

FILE holds the steps as they were printed (`state.reserve(...)`, one a line; other lines are passed
over). The machines do not let hypothesis shrink: a history of fifty steps takes it minutes in which
nothing is said. This drops steps, halves first, as long as the same error is met.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import test_core_twin as machines


def run(steps: Sequence[str], machine: type[machines.CoreMachine]) -> Exception | None:
    """What the history ends with."""
    state = machine()
    try:
        for step in steps:
            eval(step, {"state": state})
    except Exception as error:  # noqa: BLE001 - what is looked for
        return error
    return None


def shorten(steps: list[str], machine: type[machines.CoreMachine]) -> list[str]:
    """The first step stays."""
    found = run(steps, machine)
    if found is None:
        return []
    want = type(found), str(found)[:60]
    size = len(steps) // 2
    while size:
        at, shorter = 1, False
        while at < len(steps):
            some = steps[:at] + steps[at + size :]
            error = run(some, machine)
            if error is not None and (type(error), str(error)[:60]) == want:
                steps, shorter = some, True
            else:
                at += size
        if size > 1 or not shorter:
            size //= 2
    return steps


def main() -> None:
    lines = Path(sys.argv[1]).read_text().splitlines()
    steps = [line.strip() for line in lines if line.strip().startswith("state.")]
    steps = [step for step in steps if not step.startswith("state.teardown")]
    layered = "through=" in steps[0]
    machine = machines.LadderMachine if layered else machines.CoreMachine
    short = shorten(steps, machine)
    sys.stdout.write("\n".join(short or ["it does not fail"]) + "\n")
    error = run(short, machine) if short else None
    if error is not None:
        traceback.print_exception(error)


if __name__ == "__main__":
    main()

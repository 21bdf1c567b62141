"""kvd-cli: how an operator looks into a daemon, and takes things out of it.

The law of this package: it talks to the daemon as any client does, over `kvd.client`; it shows
what the daemon says and computes nothing that the daemon knows better. docs/cli.md states the
options, the JSON and the exit codes, which are stable.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> None:
    """The console script. Always ends by SystemExit with a documented code."""
    try:
        from kvd.tools.cli.guard import run

        code = run(sys.argv[1:] if argv is None else list(argv))
    except KeyboardInterrupt:  # before the guard was up, or once more while it was ending
        code = 130
    sys.exit(code)

"""kvd-bench: what kvd costs and how fast it is, beside what the machine can do at best.

The law of this package: a figure without its limit is no figure. Each rate is measured together
with the best that the same machine does with the same bytes, alternating in one run, and the
ratio is what counts. docs/claims.md names the command behind each claim.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> None:
    """The console script. Always ends by SystemExit."""
    try:
        from kvd.tools.bench.app import run

        code = run(sys.argv[1:] if argv is None else list(argv))
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)

"""Run as a process of its own: does kvikio read and write this file, and is GDS there?

The law of this module: it answers with one line of JSON on its standard output, or it crashes; the
daemon that asked lives on either way.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(path: str) -> int:
    answer: dict[str, object]
    try:
        import kvikio
        import kvikio.cufile_driver

        from kvd.tiers.nvme.choose import compare
        from kvd.tiers.nvme.kvikio import KvikioEngine

        gds = bool(kvikio.cufile_driver.get("is_gds_available"))
        compare(KvikioEngine(gds=gds, threads=1), Path(path))
        answer = {"ok": True, "gds": gds}
    except (ImportError, OSError, RuntimeError, ValueError, AttributeError) as error:
        answer = {"ok": False, "why": f"{type(error).__name__}: {error}"}
    sys.stdout.write(json.dumps(answer) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

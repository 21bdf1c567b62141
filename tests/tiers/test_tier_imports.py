"""A daemon imports only what its configuration names."""

from __future__ import annotations

import subprocess
import sys

import pytest

OPTIONAL = ("torch", "boto3", "botocore", "awscrt", "redis", "kvikio", "cupy")


@pytest.mark.parametrize(
    "module",
    [
        "base",
        "backend",
        "breaker",
        "pool",
        "faults",
        "memory",
        "meter",
        "hbm",
        "nvme",
        "s3",
        "redis",
    ],
)
def test_a_tiers_module_imports_no_optional_library(module: str) -> None:
    """torch alone would cost a daemon 200 MB and seconds; none may be needed for another tier."""
    code = (
        f"import sys, kvd.tiers.{module}\n"
        f"print([name for name in {OPTIONAL!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_nvme_tier_runs_without_any_of_them() -> None:
    code = (
        "import sys, tempfile\n"
        f"for name in {OPTIONAL!r}: sys.modules[name] = None\n"
        "from pathlib import Path\n"
        "from kvd.tiers.nvme import NvmeBackend, NvmeConfig\n"
        "with tempfile.TemporaryDirectory() as home:\n"
        "    backend = NvmeBackend(NvmeConfig(Path(home), 'i', 8 << 20, reserve_bytes=0))\n"
        "    print(backend.open().engine)\n"
        "    backend.close()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() in ("o_direct", "buffered")

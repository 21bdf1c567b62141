"""The NVMe tier keeps the contract, on a real directory, by each engine that works here."""

from __future__ import annotations

from pathlib import Path

import pytest
from conformance import Conformance, Medium

from kvd.tiers.backend import Backend
from kvd.tiers.nvme import NvmeBackend, NvmeConfig


class OnDisk:
    limit = 8 << 20

    def __init__(self, directory: Path, engine: str) -> None:
        self.directory = directory
        self.engine = engine

    def backend(self) -> Backend:
        return NvmeBackend(
            NvmeConfig(
                self.directory, "test", self.limit, engine=self.engine, reserve_bytes=1 << 20
            )
        )


class TestDirect(Conformance):
    """The conformance suite: K25, K26, K30, K35, K43, K55, K57, K58, K61, K64, K85, K86."""

    @pytest.fixture
    def medium(self, tmp_path: Path) -> Medium:
        return OnDisk(tmp_path, "auto")


class TestBuffered(Conformance):
    """The conformance suite, as on a directory without O_DIRECT: K25, K26, K30, K35, K43, K58."""

    @pytest.fixture
    def medium(self, tmp_path: Path) -> Medium:
        return OnDisk(tmp_path, "buffered")

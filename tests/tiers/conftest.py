"""What the tests of tiers share as fixtures."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from fake_s3 import FakeS3
from s3_kit import rig
from tiers_kit import Rig


@pytest.fixture
def fake(aws_keys: None, caplog: pytest.LogCaptureFixture) -> Iterator[FakeS3]:
    caplog.set_level(logging.ERROR, "urllib3")  # a record that is kept keeps its connection open
    server = FakeS3()
    yield server
    server.close()


@pytest.fixture
def it(fake: FakeS3) -> Iterator[Rig]:
    rig_ = rig(fake)
    yield rig_
    rig_.close()

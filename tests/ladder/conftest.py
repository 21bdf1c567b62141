"""What the tests of the ladder share as fixtures."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fake_s3 import FakeS3


@pytest.fixture
def fake() -> Iterator[FakeS3]:
    server = FakeS3()
    yield server
    server.close()

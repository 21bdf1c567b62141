"""The S3 tier keeps the contract, on a real server."""

from __future__ import annotations

import uuid

import pytest
from conformance import Conformance, Medium
from servers import Seaweed

from kvd.tiers.backend import Backend
from kvd.tiers.s3 import S3Backend, S3Config

MIB = 1 << 20


class OnSeaweed:
    limit = 8 * MIB

    def __init__(self, server: Seaweed) -> None:
        self.config = S3Config(
            bucket="kvd",
            installation="test",
            limit_bytes=self.limit,
            prefix=f"t{uuid.uuid4().hex}",
            endpoint=server.endpoint,
            addressing="path",
            concurrency=4,
        )

    def backend(self) -> Backend:
        return S3Backend(self.config)


class TestS3(Conformance):
    """The conformance suite: K25, K26, K30, K35, K43, K64, K65, K73, K86."""

    @pytest.fixture
    def medium(self, seaweed: Seaweed, aws_keys: None) -> Medium:
        return OnSeaweed(seaweed)

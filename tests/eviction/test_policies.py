"""Every policy of the table against the conformance suite."""

from __future__ import annotations

from policy_conformance import PolicyConformance

from kvd.eviction.adaptive import Adaptive
from kvd.eviction.arc import Arc
from kvd.eviction.crf import Crf
from kvd.eviction.fifo import Fifo
from kvd.eviction.lfuda import Lfuda
from kvd.eviction.recency import Recency
from kvd.eviction.registry import POLICIES
from kvd.eviction.reuse import Reuse
from kvd.eviction.s3fifo import S3Fifo


class TestFifo(PolicyConformance):
    make = staticmethod(Fifo)


class TestCrf(PolicyConformance):
    make = staticmethod(Crf)


class TestAdaptive(PolicyConformance):
    make = staticmethod(Adaptive)


class TestReuse(PolicyConformance):
    make = staticmethod(Reuse)


class TestRecency(PolicyConformance):
    make = staticmethod(Recency)


class TestLfuda(PolicyConformance):
    make = staticmethod(Lfuda)


class TestArc(PolicyConformance):
    make = staticmethod(Arc)


class TestS3Fifo(PolicyConformance):
    make = staticmethod(S3Fifo)


def test_every_policy_of_the_table_has_a_suite() -> None:
    here = {suite.make for suite in PolicyConformance.__subclasses__()}
    assert {policy for policy in POLICIES.values() if policy.name != "lru"} <= here

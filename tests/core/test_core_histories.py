"""Histories that the machines met once, step by step, against the twin."""

from __future__ import annotations

import pytest
import test_core_twin as machines
from world import KIB, O, S, World, chain, spec

from kvd.core import actions as ac
from kvd.core.config import TierConfig, WritePolicy

STEP = {"content": False, "finish": True, "one": False, "ttl": S, "wrong": False}


@pytest.fixture
def state() -> machines.LadderMachine:
    return machines.LadderMachine()


def test_a_seal_that_fails_ends_a_demotion_and_the_chunk_may_be_gone_with_it() -> None:
    tier = TierConfig("nvme", 400 * KIB, WritePolicy.THROUGH)
    world = World(512 * KIB, 64 * KIB, auto=False, tiers=(tier,))
    client, big = world.open(), spec("big", 60 * KIB)
    client.register(big)
    for name in range(8):
        assert client.store(big, chain(name, 1)) == [O.OK]
    urgent = [job for job in world.jobs if isinstance(job, ac.Seal) and job.urgent]
    assert urgent
    for job in urgent:
        world.do(job, fail=1)
    world.settle()
    assert world.stat()["counters"]["chunks_evicted"]["undemoted"] == len(urgent)


def test_a_store_waits_for_slots_whose_chunks_are_being_written_through(
    state: machines.LadderMachine,
) -> None:
    path = ("b", 0)
    state.start(manual=True, policy="lru", through=True)
    first = {**STEP, "content": True, "one": True}
    state.reserve(**first, n=96503, path=path, s=2, start=0, length=4)
    state.look_up_what_is_there(load=True, m=268, n=1238556)
    state.look_up_what_is_there(load=True, m=17185, n=21856243)
    state.reserve(**STEP, n=39947382, path=("b", 1), s=2, start=0, length=1)
    state.time_passes(ns=31 * S)
    state.reserve(**STEP, n=703367, path=path, s=2, start=1, length=6)
    state.all_is_as_the_twin_says()


def test_a_transient_chunk_stays_if_its_copy_below_is_lost_meanwhile(
    state: machines.LadderMachine,
) -> None:
    state.start(manual=False, policy="lru", through=True)
    state.store_and_push_down(n=703469, path=("a", 0), s=1)
    state.look_up_what_is_there(load=True, m=236, n=33641)
    state.tier_loses_something(gone=False, n=447877, tier=59025)
    state.release(m=54714888, n=2406)
    state.restart(n=49, now=True, survivors=True, torn=False)
    state.load_from_below(m=0, n=13)
    state.tiers_refuse(percent=100, seed=788657001)
    state.store_and_push_down(n=123698, path=("a", 1), s=1)
    state.release(m=447877, n=4)
    state.all_is_as_the_twin_says()


def test_a_slot_taken_after_a_restart_is_not_kept_for_readers_of_the_earlier_life(
    state: machines.LadderMachine,
) -> None:
    state.start(through=True, manual=False, policy="lru")
    state.store_and_push_down(n=70, path=("a", 0), s=1)
    state.load_from_below(m=16616, n=255)
    state.restart(n=275, now=True, survivors=True, torn=True)
    state.look_up_what_is_there(load=True, m=55790, n=68)
    state.renew(length=S, m=67223, n=708)
    state.time_passes(ns=S // 2)
    state.time_passes(ns=S // 2)
    state.store_and_push_down(n=433, path=("a", 1), s=1)
    state.all_is_as_the_twin_says()


def test_a_chunk_that_a_request_met_under_another_identity_stays_while_it_hangs_others_under_it(
    state: machines.LadderMachine,
) -> None:
    state.start(policy="adaptive", manual=False, through=True)
    state.reserve(**{**STEP, "finish": False}, n=222291745, path=("a", 0), s=1, start=3, length=4)
    state.come(foreign=False, grouped=False, inline=False)
    state.store_and_push_down(n=194, path=("a", 0), s=0)
    state.reserve(**{**STEP, "ttl": 30 * S}, n=2668, path=("a", 1), s=1, start=1, length=1)
    state.commit(digests=True, n=2321, some=False)
    state.reserve(**{**STEP, "finish": False}, n=228, path=("a", 0), s=2, start=0, length=5)
    state.commit(digests=False, n=6491, some=True)
    state.look_up_what_is_there(load=True, m=1900, n=9924066)
    state.reserve(
        **{**STEP, "finish": False, "one": True, "wrong": True},
        n=11015, path=("b", 1), s=2, start=0, length=1,
    )  # fmt: skip
    state.commit(digests=True, n=2321, some=False)
    state.look_up_what_is_there(load=True, m=127617, n=1_073_741_823)
    state.reserve(**{**STEP, "ttl": 30 * S}, n=312, path=("b", 0), s=2, start=0, length=4)
    state.all_is_as_the_twin_says()

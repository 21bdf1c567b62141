"""Requests through every state, over a real daemon: the right bytes in the right blocks, every
lease given back, every load reported once (the kit asserts both in each step)."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
from daemon import DaemonProcess
from engine_kit import Engine, MLAAttentionSpec, Shape

from kvd.client import Client
from kvd.connectors.vllm.request import Phase
from kvd.connectors.vllm.worker import Results

pytestmark = pytest.mark.usefixtures("settled")

CHUNK = 32


def prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(1000), k=length)


@pytest.fixture
def engine(daemon: DaemonProcess, request: pytest.FixtureRequest):
    with Engine(daemon.socket, name=request.node.name, chunk_tokens=CHUNK) as made:
        yield made


def slowed(method: Any, seconds: float) -> Any:
    def call(*args: Any) -> Any:
        time.sleep(seconds)
        return method(*args)

    return call


def side(engine: Engine, rank: int = 0) -> Any:
    return engine.workers[rank].connector._worker


def test_what_one_engine_stored_another_loads(daemon: DaemonProcess) -> None:
    tokens = prompt(300, 1)
    with Engine(daemon.socket, name="first", chunk_tokens=CHUNK) as one:
        assert one.ask("a", tokens) == 0
        assert one.counts["stored_chunks"] == 9
        with Engine(daemon.socket, name="second", chunk_tokens=CHUNK) as two:
            assert two.ask("a", tokens) == 288
            assert two.told.computed["a"] == 300 - 288 + 1
            assert two.ask("longer", tokens + prompt(100, 2)) == 0, "the local hit is as long"
            assert two.counts["stored_chunks"] == 12 - 9


def test_a_prompt_of_whole_chunks_leaves_its_last_token_to_compute(engine: Engine) -> None:
    tokens = prompt(4 * CHUNK, 3)
    engine.ask("a", tokens)
    engine.forget()
    assert engine.ask("b", tokens) == 3 * CHUNK
    engine.forget()
    assert engine.ask("c", [*tokens, 1]) == 4 * CHUNK


def test_a_load_begins_behind_the_local_hit_in_the_middle_of_a_chunk(engine: Engine) -> None:
    """K145: 1 local block of a chunk of two; the other block and the next chunk are loaded, each
    with its own tokens' content, and the last block is left to be computed."""
    tokens = prompt(65, 4)
    engine.ask("a", tokens)
    third = engine.cached.pop(tokens_key(engine, tokens, 1))
    engine.hash_of.pop(third)
    assert engine.ask("b", tokens) == 64 - 16
    assert engine.told.computed["b"] == 2


def tokens_key(engine: Engine, tokens: list[int], block: int) -> bytes:
    from engine_kit import Request

    return Request("x", tokens, block=engine.shape.block).block_hashes[block]


@pytest.mark.parametrize("block", [16, 32, 544])
def test_the_gain_is_what_is_there_beyond_the_local_hit(daemon: DaemonProcess, block: int) -> None:
    """K144: over local and external lengths, the gain is never negative, a multiple of the block,
    at most the prompt less one token, and asking again gives the same."""
    chunk = {16: 256, 32: 256, 544: 1088}[block]
    shape = Shape(block=block, blocks=2300 // block * 2 + 8, content=2, layers=1)
    tokens = prompt(2048, block)
    with Engine(daemon.socket, shape, name=f"k144-{block}", chunk_tokens=chunk) as engine:
        for external in range(0, 2049, chunk):
            if external:
                engine.ask(f"s{external}", tokens[:external])
                engine.forget()
            request = engine.add(f"m{external}", tokens)
            engine.waiting.remove(request)
            scheduler = engine.connector._scheduler
            entry = scheduler._entry(request)
            while scheduler.match(request, 0)[0] is None:
                time.sleep(0.001)
            assert entry.leading == min(external, 2047) // chunk
            for local in range(0, 2048, 16):
                if local % block:
                    continue
                gain, asynchronous = scheduler.match(request, local)
                usable = min(external // chunk, 2047 // chunk) * chunk
                assert gain == max(0, usable - local) and asynchronous == (gain > 0)
                assert gain % block == 0 and 0 <= gain <= 2047
                assert scheduler.match(request, local) == (gain, asynchronous)
            engine.abort(f"m{external}")


def test_a_gain_that_is_not_worth_it_is_left(daemon: DaemonProcess) -> None:
    tokens = prompt(200, 5)
    with Engine(daemon.socket, name="w", chunk_tokens=CHUNK, min_load_tokens=128) as engine:
        engine.ask("a", tokens)
        engine.forget()
        assert engine.ask("b", tokens[:120]) == 0
        engine.forget()
        assert engine.ask("c", tokens) == 192


def test_requests_that_may_not_read_the_cache_do_not_load_but_store(engine: Engine) -> None:
    tokens = prompt(200, 6)
    engine.ask("a", tokens)
    engine.forget()
    assert engine.ask("b", tokens, skip=True) == 0
    assert engine.told.computed["b"] == 201


def test_generated_tokens_are_stored_unless_told_otherwise(daemon: DaemonProcess) -> None:
    for policy, chunks in (("all", 5), ("prompt", 3), ("never", 0)):
        with Engine(daemon.socket, name=policy, chunk_tokens=CHUNK, store_policy=policy) as engine:
            engine.ask("a", prompt(100, hash(policy) % 1000), new=70)
            assert engine.counts.get("stored_chunks", 0) == chunks, policy


def test_chunked_prefill_stores_each_chunk_once_it_is_whole(daemon: DaemonProcess) -> None:
    tokens = prompt(500, 7)
    with Engine(daemon.socket, name="cp", chunk_tokens=CHUNK, budget=40) as engine:
        engine.ask("a", tokens)
        assert engine.counts["stored_chunks"] == 15
        assert not engine.counts.get("known_chunks")
        engine.forget()
        assert engine.ask("b", tokens) == 480


def test_batches_of_every_length_round_a_block(daemon: DaemonProcess) -> None:
    """K143: 256 requests of 1, 63, 64 and 65 tokens, blocks of 64, a budget of 4,096; requests end
    between steps in any order and nothing of an earlier step comes back."""
    shape = Shape(block=64, blocks=120, layers=1, content=2)
    order = random.Random(0)
    with Engine(daemon.socket, shape, name="k143", budget=4096) as engine:
        lengths = [1, 63, 64, 65] * 64
        order.shuffle(lengths)
        for number, length in enumerate(lengths):
            engine.add(f"r{number}", prompt(length, number % 32), new=order.choice((1, 2, 70)))
            if not number % 16:
                engine.step()
        engine.run()
        assert len(engine.told.finished) == 256
        assert engine.counts.get("errors", 0) == 0


def test_a_preempted_request_comes_back_clean(daemon: DaemonProcess) -> None:
    """K137: a slow store of blocks that are taken for another request: what is stored is from
    before, or the store is given up; the request is looked up and loaded anew."""
    shape = Shape(blocks=24)
    with Engine(
        daemon.socket, shape, name="k137", chunk_tokens=CHUNK, budget=64, local_cache=False
    ) as engine:
        worker = side(engine)
        worker._storer.gather = slowed(worker._storer.gather, 0.005)
        for number in range(5):
            engine.add(f"r{number}", prompt(150, 100 + number), new=40)
        engine.run()
        assert engine.told.preemptions
        assert len(engine.told.finished) == 5
    # Whatever is stored now is right: another engine checks every byte that it loads.
    with Engine(daemon.socket, Shape(blocks=64), name="k137b", chunk_tokens=CHUNK) as two:
        for number in range(5):
            two.ask(f"r{number}", prompt(150, 100 + number), new=40)
        assert two.counts.get("errors", 0) == 0


def test_stores_never_read_a_block_after_it_was_given_away(daemon: DaemonProcess) -> None:
    """K83: the copy of every chunk is slow, requests end at once and their blocks are rewritten;
    hundreds of chunks later each stored one still holds its own bytes."""
    shape = Shape(blocks=20, layers=1, content=2)
    with Engine(daemon.socket, shape, name="k83", chunk_tokens=CHUNK, local_cache=False) as engine:
        worker = side(engine)
        worker._storer.gather = slowed(worker._storer.gather, 0.002)
        for number in range(60):
            engine.add(f"r{number}", prompt(130, 1000 + number), new=1)
        engine.run()
        stored = engine.counts["stored_chunks"]
        assert stored and stored + engine.counts.get("fenced_chunks", 0) <= 240
    with Engine(daemon.socket, Shape(blocks=64, layers=1, content=2), name="k83b",
                chunk_tokens=CHUNK) as two:  # fmt: skip
        loaded = sum(two.ask(f"r{n}", prompt(130, 1000 + n)) for n in range(60))
        assert loaded > 0


PHASES = ["before the lookup's answer", "matched", "loading", "loaded", "running", "finished"]


@pytest.mark.parametrize("phase", PHASES)
def test_a_request_may_be_aborted_in_every_phase(
    engine: Engine, phase: str, leased, eventually
) -> None:
    """K138: nothing is held afterwards, nothing asserts, and the next request is served."""
    tokens = prompt(300, 8)
    engine.ask("first", tokens)
    engine.forget()
    worker = side(engine)
    if phase == "loading":
        worker._loader.scatter = slowed(worker._loader.scatter, 0.02)
    request = engine.add("victim", tokens, new=40)
    entry = engine.connector._scheduler._entries["victim"]
    if phase != PHASES[0]:
        while engine.connector.get_num_new_matched_tokens(request, 0)[0] is None:
            time.sleep(0.001)
        assert entry.phase is Phase.KNOWN and leased() == 9
    if phase in ("loading", "loaded", "running"):
        engine.step()
        assert entry.phase is Phase.LOADING
    if phase in ("loaded", "running"):
        while "victim" not in engine.received:
            engine.step()
            time.sleep(0.001)
    if phase == "running":
        engine.step()
        engine.step()
        assert request.state == "running"
    if phase == "finished":
        engine.run()
    engine.abort("victim")
    engine.abort("victim")
    engine.run()
    assert not engine.connector._scheduler._entries
    assert not {r for r, n in engine.refs.items() if n}
    eventually(lambda: leased() == 0)
    assert engine.ask("next", tokens) > 0 or engine.cached


def test_requests_that_were_never_scheduled_may_be_aborted_all_at_once(engine: Engine) -> None:
    """K138: 64 requests, a pool for a few; none leaves a store job or a lease behind."""
    for number in range(64):
        engine.add(f"r{number}", prompt(300, number))
    engine.step()
    for number in range(64):
        engine.abort(f"r{number}")
    engine.run()
    assert not engine.connector._scheduler._entries
    assert engine.counts.get("stored_chunks", 0) <= 9 * 4


def answered(engine: Engine) -> bool:
    """Whether nobody waits for the answer to a lookup any more."""
    scheduler = engine.connector._scheduler
    scheduler.daemon.look()
    return all(e.call is None or e.call.done for e in scheduler._entries.values())


def test_only_so_many_waiting_requests_hold_a_match(daemon: DaemonProcess, eventually) -> None:
    tokens = prompt(100, 9)
    with Engine(daemon.socket, name="la", chunk_tokens=CHUNK, lookahead=2) as engine:
        engine.ask("a", tokens)
        engine.forget()
        for number in range(10):
            engine.add(f"r{number}", tokens)
        assert engine.counts["lookups"] == 1 + 2
        # Whose answer comes first loads; others may find that in the engine's own cache by then.
        eventually(lambda: answered(engine))
        engine.run()
        assert [engine.told.loaded_tokens[name] for name in ("r0", "r1")] == [96, 96]


def test_an_answer_that_does_not_come_costs_its_deadline_and_no_more(
    daemon: DaemonProcess, eventually
) -> None:
    tokens = prompt(100, 10)
    with Engine(
        daemon.socket, name="dl", chunk_tokens=CHUNK, lookup_deadline_s=0.2, store_deadline_s=0.5
    ) as engine:
        engine.ask("a", tokens)
        engine.forget()
        daemon.signal(19)
        try:
            begun = time.monotonic()
            assert engine.ask("b", tokens) == 0
            assert engine.ask("c", prompt(100, 11)) == 0
            assert time.monotonic() - begun < 5
            assert engine.counts["lookup_timeouts"] == 1
        finally:
            daemon.signal(18)
        engine.forget()
        eventually(lambda: (engine.forget(), engine.ask(f"d{time.monotonic()}", tokens))[1] == 96)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("bad", [0, 3, 8])
def test_a_chunk_that_cannot_be_loaded_is_computed(
    daemon: DaemonProcess, groups: int, bad: int
) -> None:
    """K142: an ordinary result for one and for several KV groups: the valid prefix is kept where
    the engine can name it, at worst all is computed, and it is not tried again and again."""
    shape = Shape(groups=groups, layers=1, content=4)
    tokens = prompt(300, 12000 + bad)
    with Engine(daemon.socket, shape, name=f"k142-{groups}-{bad}", chunk_tokens=CHUNK) as engine:
        engine.ask("a", tokens)
        engine.forget()
        worker = side(engine)
        take = worker._take
        worker._take = lambda transfer, job, index: index != bad and take(transfer, job, index)
        engine.ask("b", tokens)
        kept = bad * CHUNK if groups == 1 else 0
        assert engine.told.recomputed == 288 - kept
        assert engine.told.computed["b"] == 301 - kept
        assert engine.counts["loads"] == 1 and engine.counts["failed_chunks"] == 1


def test_all_groups_are_stored_and_loaded_together(daemon: DaemonProcess) -> None:
    """K146: one entry holds every group's pages; there is none with a part only."""
    shape = Shape(groups=3, layers=2, content=4)
    tokens = prompt(200, 13)
    with Engine(daemon.socket, shape, name="g3", chunk_tokens=CHUNK) as engine:
        engine.ask("a", tokens)
        assert engine.counts["stored_bytes"] == 6 * 3 * 2 * CHUNK * 2 * 4 * 4
        engine.forget()
        assert engine.ask("b", tokens) == 192


def test_tensor_ranks_keep_their_own_shards_and_hit_only_together(daemon: DaemonProcess) -> None:
    """K146: a rank's shard that was not stored makes the chunk a miss for all."""
    tokens = prompt(200, 14)
    shape = Shape(content=6)
    with Engine(daemon.socket, shape, name="tp2", ranks=2, chunk_tokens=CHUNK) as engine:
        engine.ask("a", tokens)
        assert engine.counts["stored_chunks"] == 12
        engine.forget()
        assert engine.ask("b", tokens) == 192
        side(engine, 1)._writes = False
        other = prompt(200, 15)
        engine.ask("c", other)
        engine.forget()
        assert engine.ask("d", other) == 0


def test_ranks_that_hold_the_same_bytes_store_them_once(daemon: DaemonProcess) -> None:
    """K82: eight replicas of MLA's latent are one shard, which all of them load."""
    shape = Shape(spec=MLAAttentionSpec, heads=1, content=12, layers=1)
    tokens = prompt(200, 16)
    with Engine(
        daemon.socket, shape, name="mla", ranks=8, replicas=8, chunk_tokens=CHUNK
    ) as engine:
        engine.ask("a", tokens)
        assert engine.counts["stored_chunks"] == 6
        engine.forget()
        assert engine.ask("b", tokens) == 192
        assert engine.counts["loaded_chunks"] == 6 * 8


def test_models_with_blocks_of_16_544_and_640_share_one_daemon(daemon: DaemonProcess) -> None:
    """K147: each has its own chunk size, all store and load, and entries are never mixed."""
    tokens = prompt(2000, 17)
    for block in (16, 544, 640):
        width = 256 if block == 16 else 512
        blocks = 2300 // block * 2 + 8
        shape = Shape(block=block, blocks=blocks, content=width, heads=1, layers=1)
        with Engine(daemon.socket, shape, name=f"b{block}", budget=4096) as engine:
            assert engine.ask("a", tokens) == 0
            engine.forget()
            chunk = max(block, 256)
            assert engine.ask("b", tokens) == 1999 // chunk * chunk


def test_a_chunk_larger_than_the_daemon_takes_is_said_once(
    daemon: DaemonProcess, caplog: pytest.LogCaptureFixture
) -> None:
    shape = Shape(block=512, blocks=12, content=1024, heads=1, layers=2)
    with Engine(daemon.socket, shape, name="big", budget=4096) as engine:
        for number in range(3):
            engine.ask(f"r{number}", prompt(600, number))
        assert engine.counts["unstored_chunks"] == 3
    said = [r for r in caplog.records if "lower chunk_tokens" in r.getMessage()]
    assert len(said) == 1


def test_a_reset_forgets_this_identity_only(daemon: DaemonProcess) -> None:
    tokens = prompt(200, 18)
    with (
        Engine(daemon.socket, name="one", chunk_tokens=CHUNK, weights="x") as one,
        Engine(daemon.socket, name="two", chunk_tokens=CHUNK, weights="y") as two,
    ):
        one.ask("a", tokens)
        two.ask("a", tokens)
        assert one.connector.reset_cache() is True
        for engine, expected in ((one, 0), (two, 192)):
            engine.forget()
            assert engine.ask("b", tokens) == expected


def test_loads_are_compared_with_their_digests_when_asked(daemon: DaemonProcess) -> None:
    tokens = prompt(200, 19)
    with Engine(daemon.socket, name="v", chunk_tokens=CHUNK, verify=True) as engine:
        engine.ask("a", tokens)
        engine.forget()
        assert engine.ask("b", tokens) == 192
        assert not engine.counts.get("failed_chunks")


@pytest.mark.parametrize(
    "where", ["_look_up", "_take_answer", "plan", "_job", "allocated", "worker_output"]
)
def test_an_error_inside_a_hook_is_counted_and_the_engine_goes_on(
    engine: Engine, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No promised load is lost, no block is wrong, no request hangs."""
    tokens = prompt(200, 20)
    engine.ask("a", tokens)
    engine.forget()

    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError(where)

    scheduler = engine.connector._scheduler
    storing = where in ("plan", "_job")
    with monkeypatch.context() as patch:
        patch.setattr(scheduler._stores if storing else scheduler, where, broken)
        engine.add("b", prompt(200, 21) if storing else tokens)
        end = time.monotonic() + 10
        while engine.requests and time.monotonic() < end:
            engine.step()
        assert not engine.requests
    assert engine.counts["errors"] >= 1
    for entry in scheduler._entries.values():
        entry.let_go(scheduler.daemon)
    scheduler._stores._under_way.clear()
    engine.forget()
    assert engine.ask("c", tokens) == 192


def test_two_engines_write_the_same_chunks_at_once(daemon: DaemonProcess) -> None:
    tokens = prompt(300, 21)
    with (
        Engine(daemon.socket, name="p", chunk_tokens=CHUNK) as one,
        Engine(daemon.socket, name="q", chunk_tokens=CHUNK) as two,
    ):
        one.add("a", tokens)
        two.add("a", tokens)
        while one.requests or two.requests:
            one.step()
            two.step()
        one.run()
        two.run()
        both = one.counts["stored_chunks"] + two.counts.get("stored_chunks", 0)
        assert both >= 9
        with Client(daemon.socket) as client:
            assert client.stat()["tiers"][0]["writing_bytes"] == 0


def stored(daemon: DaemonProcess, name: str, *prompts: list[int]) -> None:
    with Engine(daemon.socket, Shape(blocks=128), name=name, chunk_tokens=CHUNK) as one:
        for number, tokens in enumerate(prompts):
            one.ask(f"w{number}", tokens)


def test_loads_that_together_hold_all_blocks_do_not_wait_for_each_other_for_ever(
    daemon: DaemonProcess,
) -> None:
    """Three prompts of which all but the end was loaded leave no block to compute the end in."""
    prompts = [prompt(150, 200 + number) for number in range(3)]
    stored(daemon, "full", *prompts)
    loaded = 150 // CHUNK * CHUNK
    shape = Shape(blocks=1 + 3 * loaded // 16)
    with Engine(daemon.socket, shape, name="full", chunk_tokens=CHUNK, local_cache=False) as two:
        for number, tokens in enumerate(prompts):
            two.add(f"r{number}", tokens)
        two.run()
        assert len(two.told.finished) == 3
        assert two.told.loaded_tokens["r0"] >= loaded


def test_a_load_that_would_lack_blocks_for_its_end_waits_while_another_holds_some(
    daemon: DaemonProcess,
) -> None:
    """An engine that lets in what does not fit as a whole, and two loads that end in one step: the
    later one, of the higher priority, would need blocks that the earlier one holds for ever."""
    early, late = prompt(130, 210), prompt(200, 211)
    stored(daemon, "tight", early, late[:129])
    with Engine(
        daemon.socket, Shape(blocks=1 + 18), name="tight", chunk_tokens=CHUNK, local_cache=False,
        config={"reserve": False},
    ) as engine:  # fmt: skip
        worker = side(engine)
        results = worker.results
        worker.results = lambda: Results(set(), set(), set())
        engine.add("early", early, priority=1)
        while not engine.told.loaded_tokens.get("early"):
            engine.step()
        engine.add("late", late, priority=0)
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            engine.step()
        assert engine.counts["loads"] == 1
        worker.results = results
        engine.run()
        assert engine.told.finished == ["early", "late"]
        assert engine.told.loaded_tokens == {"early": 128, "late": 128}

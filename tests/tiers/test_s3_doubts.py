"""What was sent and not answered counts, and is taken back when the server works again."""

from __future__ import annotations

import time

import pytest
from fake_s3 import FakeS3, Request, Response, error
from s3_kit import MIB, on, rig, the_object
from tiers_kit import Chunk, Rig, chunks, in_

from kvd.tiers.backend import Refused
from kvd.tiers.base import Answer, Probe, State
from kvd.tiers.s3.objects import name_of


@pytest.fixture(autouse=True)
def not_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is, nothing is taken back before a test wants it to be."""
    monkeypatch.setattr("kvd.tiers.s3.doubts.SETTLED_NS", 1 << 62)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What may have been written is looked for without a pause."""
    monkeypatch.setattr("kvd.tiers.s3.doubts.SETTLED_NS", 0)


@pytest.mark.parametrize("length", [10_000, 17 * MIB])
def test_what_was_written_and_not_answered_counts_and_is_taken_back(
    fake: FakeS3, it: Rig, at_once: None, length: int
) -> None:
    """Nobody knows that it is there: else it would stay, beside the limit, and be found by the next
    start although it was evicted here."""
    chunk = Chunk(1, length)

    def lost(request: Request) -> object:
        if "range" in request.headers:  # what lies there, as it is asked after a 412 or 404
            return error(503, "SlowDown")
        makes = "uploadId" in request.query if request.method == "POST" else length < MIB
        return "reset" if makes and request.method in ("PUT", "POST") and request.key else None

    fake.hook = lost  # type: ignore[assignment]
    assert it.one(chunk.write(), 60).answer is Answer.FAILED
    usage = it.tier.usage()
    assert the_object(fake) and (usage.chunks, usage.used_bytes) == (0, length + 512)
    fake.hook = lambda request: None
    assert it.tier.untidy == 1 and it.one(Probe(None)).answer is Answer.OK
    assert it.tier.untidy == 0
    usage = it.tier.usage()
    assert not fake.objects and (usage.chunks, usage.used_bytes) == (0, 0)
    assert it.tier.stat().notes["taken_back"] == 1
    assert it.one(chunk.write()).answer is Answer.OK


def test_what_was_written_and_not_answered_is_ours_once_it_is_written_again(
    fake: FakeS3, it: Rig, at_once: None
) -> None:
    chunk = Chunk(1)
    fake.hook = on("PUT", "reset")
    it.one(chunk.write())
    fake.hook = lambda request: None
    assert it.one(chunk.write()).answer is Answer.OK
    assert it.one(Probe(None)).answer is Answer.OK
    usage = it.tier.usage()
    assert (usage.chunks, usage.used_bytes) == (1, 10_512)
    assert it.one(chunk.read()).answer is Answer.OK


def test_another_installations_object_is_not_taken_back(
    fake: FakeS3, it: Rig, at_once: None
) -> None:
    other, chunk = rig(fake, installation="two"), Chunk(1)
    other.one(chunk.write())
    other.close()
    fake.hook = on("PUT", "reset")
    assert it.one(chunk.write()).answer is Answer.FAILED
    fake.hook = lambda request: None
    assert it.one(Probe(None)).answer is Answer.OK
    assert the_object(fake) and it.tier.usage().used_bytes == 0


def unanswered(fake: FakeS3, it: Rig, chunk: Chunk) -> None:
    """It is written, and nobody is told."""
    fake.hook = on("PUT", "reset")
    down = fake.hook
    fake.hook = lambda request: (
        error(503, "SlowDown") if "range" in request.headers else down(request)
    )
    assert it.one(chunk.write(), 30).answer is Answer.FAILED
    fake.hook = lambda request: None
    it.until(lambda: it.tier.state is State.READY)
    assert it.tier.usage().used_bytes >= chunk.length + 512


@pytest.mark.parametrize("how", ["busy", "refused", "late", "full"])
def test_a_write_that_surely_failed_says_nothing_of_one_that_may_not_have(
    fake: FakeS3, it: Rig, how: str
) -> None:
    """Else the first would lie there, uncounted, and not be taken back."""
    chunk = Chunk(1)
    unanswered(fake, it, chunk)
    backend = it.tier.backend.below  # type: ignore[attr-defined]
    if how == "full":
        backend._mine._limit = 10_511
        answer = Answer.NO_SPACE
    elif how == "late":
        with pytest.raises(Refused, match="deadline"):
            backend.put(chunk.key, chunk.header, chunk.memory, 0)
        answer = None
    else:
        says = error(503, "SlowDown") if how == "busy" else error(403, "AccessDenied")
        fake.hook = on("PUT", says)
        answer = Answer.FAILED
    if answer is not None:
        assert it.one(chunk.write(), 30).answer is answer
    fake.hook = lambda request: None
    assert it.tier.usage().used_bytes == 10_512 and the_object(fake)
    doubts_are_settled(it)
    assert not fake.objects and it.tier.usage().used_bytes == 0


def doubts_are_settled(it: Rig) -> None:
    with pytest.MonkeyPatch.context() as now:
        now.setattr("kvd.tiers.s3.doubts.SETTLED_NS", 0)
        assert it.one(Probe(None)).answer is Answer.OK


@pytest.mark.parametrize("length", [10_000, 17 * MIB])
def test_what_may_have_been_written_and_is_not_to_be_seen_is_in_doubt(
    fake: FakeS3, it: Rig, length: int
) -> None:
    """An answer was lost, the next one says that somebody has been there, and then nothing is."""
    chunk = Chunk(1, length)

    def lost(request: Request) -> object:
        if "range" in request.headers:
            return error(404, "NoSuchKey")
        makes = "uploadId" in request.query if request.method == "POST" else length < MIB
        if not makes or request.method not in ("PUT", "POST") or not request.key:
            return None
        return "reset" if fake.uploads or (length < MIB and not fake.objects) else None

    fake.hook = lost  # type: ignore[assignment]
    assert it.one(chunk.write(), 30).answer is Answer.FAILED
    fake.hook = lambda request: None
    assert the_object(fake) and it.tier.usage().used_bytes == length + 512
    doubts_are_settled(it)
    assert not fake.objects and it.tier.usage().used_bytes == 0


@pytest.mark.parametrize("how", ["half", "gzip", "teapot"])
def test_what_comes_broken_may_be_ours_all_the_same(fake: FakeS3, it: Rig, how: str) -> None:
    chunk = Chunk(1)
    unanswered(fake, it, chunk)
    fake.hook = on("GET", error(418, "Teapot") if how == "teapot" else how)
    doubts_are_settled(it)
    assert the_object(fake) and it.tier.usage().used_bytes == 10_512
    fake.hook = lambda request: None
    doubts_are_settled(it)
    assert not fake.objects and it.tier.usage().used_bytes == 0


@pytest.mark.parametrize("body", [b"", b"short", b"x" * 600])
def test_what_is_no_chunk_of_that_length_is_not_ours(fake: FakeS3, it: Rig, body: bytes) -> None:
    unanswered(fake, it, Chunk(1))
    fake.objects[the_object(fake)] = body
    doubts_are_settled(it)
    assert fake.objects[the_object(fake)] == body and it.tier.usage().used_bytes == 0


def test_what_was_replaced_since_it_was_looked_at_stays(fake: FakeS3, it: Rig) -> None:
    """By another installation, for it was too old to be read."""
    unanswered(fake, it, Chunk(1))
    name = the_object(fake)

    def replaced(request: Request) -> None:
        if request.method == "DELETE" and request.key == name:
            fake.objects[name] = b"another's"

    fake.hook = replaced  # type: ignore[assignment]
    doubts_are_settled(it)
    assert fake.objects[name] == b"another's" and it.tier.usage().used_bytes == 0
    assert it.tier.stat().notes.get("taken_back", 0) == 0


@pytest.mark.parametrize(
    "says", [error(501, "NotImplemented"), error(400, "InvalidArgument"), error(501, "")]
)
def test_a_server_that_can_not_delete_by_etag_is_asked_without(
    fake: FakeS3, it: Rig, says: Response
) -> None:
    for n in (1, 2):
        unanswered(fake, it, Chunk(n))
    asked = []

    def old(request: Request) -> Response | None:
        if request.method != "DELETE" or "if-match" not in request.headers:
            return None
        asked.append(request)
        return says

    fake.hook = old
    doubts_are_settled(it)
    assert not fake.objects and it.tier.usage().used_bytes == 0
    assert len(asked) == 1, "once is enough"


def test_one_that_can_not_be_settled_keeps_no_other(fake: FakeS3, it: Rig) -> None:
    many = list(chunks(20))
    for chunk in many:
        unanswered(fake, it, chunk)
    first = name_of("kvd", many[0].key)
    fake.hook = lambda r: error(403, "AccessDenied") if r.key == first else None
    doubts_are_settled(it)
    doubts_are_settled(it)
    assert list(fake.objects) == [first] and it.tier.usage().used_bytes == 10_512


def test_a_write_takes_nothing_back_itself(fake: FakeS3, it: Rig, at_once: None) -> None:
    """It would be answered after that, with its slot held, beyond its deadline."""
    unanswered(fake, it, Chunk(1))
    fake.requests.clear()
    assert it.one(Chunk(2).write()).answer is Answer.OK
    assert [r.method for r in fake.requests] == ["PUT"] and it.tier.untidy == 1


def test_a_server_works_though_nothing_can_be_taken_back(
    fake: FakeS3, it: Rig, at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    unanswered(fake, it, Chunk(1))
    fake.hook = on("GET", "silent")
    began = time.monotonic()
    assert it.one(Probe(None, in_(2)), 30).answer is Answer.OK
    assert time.monotonic() - began < 4
    fake.hook = lambda request: None

    def wrong(*args: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("kvd.tiers.s3.doubts.Doubts._take_back", wrong)
    assert it.one(Probe(None)).answer is Answer.OK
    monkeypatch.undo()
    doubts_are_settled(it)
    assert not fake.objects


def test_an_upload_that_fails_is_given_back_later_when_its_time_is_over(
    fake: FakeS3, it: Rig
) -> None:
    def hangs(request: Request) -> str | None:
        return "silent" if request.method == "DELETE" or "partNumber" in request.query else None

    fake.hook = hangs
    began = time.monotonic()
    done = it.one(Chunk(1, 17 * MIB).write(in_(1.0)), 30)
    assert done.answer in (Answer.TIMEOUT, Answer.FAILED) and time.monotonic() - began < 3
    fake.hook = lambda request: None
    assert len(fake.uploads) == 1
    assert it.one(Probe(None)).answer is Answer.OK and not fake.uploads


def test_what_was_too_old_and_is_written_anew_is_not_expired_at_once(fake: FakeS3) -> None:
    """By the server it was too old, and not yet by our account."""
    it = rig(fake, ttl_s=100.0)
    chunk = Chunk(1)
    assert it.one(chunk.write()).answer is Answer.OK
    name = the_object(fake)
    mine = it.tier.backend.below._mine  # type: ignore[attr-defined]
    ago = mine._objects[name].written - 99.5
    mine._objects[name] = mine._objects[name]._replace(written=ago)
    mine._ages[:] = [(ago, name)]
    fake.modified[name] -= 101
    assert it.one(chunk.read()).answer is Answer.MISS
    assert it.one(chunk.write()).answer is Answer.OK
    time.sleep(0.6)
    assert it.one(Chunk(2).write()).answer is Answer.OK
    assert it.one(chunk.read()).answer is Answer.OK and it.tier.usage().chunks == 2
    it.close()


def test_what_another_installation_has_replaced_is_not_ours_any_more(fake: FakeS3) -> None:
    one, two = rig(fake, ttl_s=100.0), rig(fake, ttl_s=100.0, installation="two")
    chunk = Chunk(1)
    assert one.one(chunk.write()).answer is Answer.OK
    fake.modified[the_object(fake)] -= 101
    assert two.one(chunk.write()).answer is Answer.OK
    assert one.one(chunk.write()).answer is Answer.EXISTS
    assert one.tier.usage().used_bytes == 0
    assert one.one(chunk.delete()).answer is Answer.MISS and the_object(fake)
    one.close()
    two.close()

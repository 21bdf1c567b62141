"""Uploads that a server began and did not say so are found, and nobody else's with them."""

from __future__ import annotations

import time

import pytest
from fake_s3 import FakeS3, Request, Response, error
from s3_kit import MIB
from servers import Seaweed
from tiers_kit import CONFIG, Chunk, Rig, in_

from kvd.tiers.base import Answer, Probe
from kvd.tiers.s3 import S3Backend, S3Config
from kvd.tiers.s3.objects import name_of

LEFT = "kvd.tiers.s3.unanswered.LEFT_NS"
LARGE = 17 * MIB


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No upload is too young to tell whose it is."""
    monkeypatch.setattr(LEFT, 0)


def begins(request: Request) -> bool:
    return request.method == "POST" and bool(request.key) and "uploads" in request.query


def unanswered(fake: FakeS3, it: Rig, how: object = "silent", within_s: float = 1.0) -> Chunk:
    """A write whose uploads began, and were not told."""
    chunk = Chunk(1, LARGE)
    fake.hook = lambda request: how if begins(request) else None  # type: ignore[assignment,return-value]
    done = it.one(chunk.write(in_(within_s)), 30)
    assert done.answer in (Answer.TIMEOUT, Answer.FAILED) and fake.uploads
    fake.hook = lambda request: None
    return chunk


@pytest.mark.parametrize("how", ["silent", "reset", "half"])
def test_an_upload_whose_begin_was_not_answered_is_aborted_by_a_probe(
    fake: FakeS3, it: Rig, at_once: None, how: str
) -> None:
    unanswered(fake, it, how)
    began = len(fake.uploads)
    assert it.tier.untidy == 1 and it.tier.stat().notes["lost_uploads"] == 1
    assert it.one(Probe(None)).answer is Answer.OK
    assert not fake.uploads and it.tier.untidy == 0
    assert it.tier.stat().notes["aborted_uploads"] == began


def test_an_attempt_without_an_answer_is_looked_for_though_the_next_one_worked(
    fake: FakeS3, it: Rig, at_once: None
) -> None:
    left = [1]

    def once(request: Request) -> str | None:
        if not (begins(request) and left[0]):
            return None
        left[0] -= 1
        return "reset"

    fake.hook = once
    assert it.one(Chunk(1, LARGE).write()).answer is Answer.OK
    assert len(fake.uploads) == 1 and len(fake.objects) == 1
    assert it.one(Probe(None)).answer is Answer.OK
    assert not fake.uploads and len(fake.objects) == 1


def test_a_begin_that_was_refused_is_nothing_to_look_for(
    fake: FakeS3, it: Rig, at_once: None
) -> None:
    fake.hook = lambda r: error(403, "AccessDenied") if begins(r) else None
    assert it.one(Chunk(1, LARGE).write(), 30).answer is Answer.FAILED
    assert it.tier.untidy == 0 and "lost_uploads" not in it.tier.stat().notes


def test_what_may_be_anothers_is_left(fake: FakeS3, it: Rig, at_once: None) -> None:
    """Of the same object: one that began before, one with a part. And all of other objects."""
    chunk = unanswered(fake, it)
    name, now = name_of("kvd", chunk.key), time.time()
    plant(fake, "before", name, now - 60)
    plant(fake, "with a part", name, now)[1] = b"part"
    plant(fake, "another", name_of("kvd", Chunk(2).key), now)
    assert it.one(Probe(None)).answer is Answer.OK
    assert sorted(fake.uploads) == ["another", "before", "with a part"] and it.tier.untidy == 0


def plant(fake: FakeS3, upload: str, name: str, at: float) -> dict[int, bytes]:
    fake.uploads[upload] = parts = {}
    fake.begun[upload] = (name, at)
    return parts


def test_what_is_young_is_left_until_it_is_not(
    fake: FakeS3, it: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another daemon may be about to send its first part."""
    unanswered(fake, it)
    assert it.tier.untidy == 0, "it is too early to look"
    backend = it.tier.backend.below  # type: ignore[attr-defined]
    asked = backend._uploads._unanswered._asked
    for _ in range(2):
        for name, one in asked.items():
            asked[name] = one._replace(due=0)
        assert it.one(Probe(None)).answer is Answer.OK and fake.uploads
    for name, one in asked.items():
        asked[name] = one._replace(due=0)
    monkeypatch.setattr(LEFT, 0)
    assert it.one(Probe(None)).answer is Answer.OK and not fake.uploads


def test_an_upload_that_this_daemon_is_at_is_left(fake: FakeS3, it: Rig, at_once: None) -> None:
    chunk = unanswered(fake, it)
    backend = it.tier.backend.below  # type: ignore[attr-defined]
    lost = set(fake.uploads)
    tidied: list[set[str]] = []

    def meanwhile(request: Request) -> None:
        if "partNumber" in request.query and not tidied:
            tidied.append(set())
            backend._uploads.tidy(in_(5))
            tidied[0] = set(fake.uploads)

    fake.hook = meanwhile  # type: ignore[assignment]
    assert it.one(chunk.write(), 30).answer is Answer.OK
    assert len(tidied[0]) == 1 and not tidied[0] & lost
    assert not fake.uploads and len(fake.objects) == 1


@pytest.mark.parametrize("of", ["list", "parts"])
@pytest.mark.parametrize("code", [403, 501, 503])
def test_who_may_not_look_asks_no_more_than_a_few_times(
    fake: FakeS3, it: Rig, at_once: None, of: str, code: int
) -> None:
    """A server that is busy is asked again; one that has no such request is not, for long."""
    unanswered(fake, it)
    asked = []

    def no(request: Request) -> Response | None:
        of_parts = request.method == "GET" and "uploadId" in request.query
        if not (of_parts if of == "parts" else not request.key and "uploads" in request.query):
            return None
        asked.append(request)
        return error(code, {403: "AccessDenied", 501: "NotImplemented", 503: "SlowDown"}[code])

    fake.hook = no
    for _ in range(3):
        assert it.one(Probe(None), 30).answer is Answer.OK
    assert fake.uploads and asked
    assert it.tier.untidy == (1 if code == 503 else 0)
    fake.hook = lambda request: None
    assert it.one(Probe(None)).answer is Answer.OK
    assert bool(fake.uploads) == (code != 503)


def test_a_real_server_tells_what_it_began(
    seaweed: Seaweed, aws_keys: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LEFT, -3_000_000_000)
    backend = S3Backend(
        S3Config(
            "kvd", "one", 64 * MIB, prefix=f"t{time.time_ns()}", endpoint=seaweed.endpoint,
            addressing="path", attempts=1,
        )
    )  # fmt: skip
    it = Rig(backend, "s3", CONFIG).start()
    client = backend._bucket.client
    begin = client.create_multipart_upload

    def unheard(**how: object) -> None:
        begin(**how)
        raise ConnectionResetError

    monkeypatch.setattr(client, "create_multipart_upload", unheard)
    chunk = Chunk(1, LARGE)
    assert it.one(chunk.write()).answer is Answer.FAILED
    name = backend._name(chunk.key)
    other = begin(Bucket="kvd", Key=name)["UploadId"]
    client.upload_part(Bucket="kvd", Key=name, UploadId=other, PartNumber=1, Body=b"part")
    listed = client.list_multipart_uploads(Bucket="kvd", Prefix=name)["Uploads"]
    assert len(listed) == 2
    assert it.one(Probe(None)).answer is Answer.OK
    listed = client.list_multipart_uploads(Bucket="kvd", Prefix=name)["Uploads"]
    assert [one["UploadId"] for one in listed] == [other]
    client.abort_multipart_upload(Bucket="kvd", Key=name, UploadId=other)
    it.close()

"""What S3 servers, and what lies between, do to requests: never wrong bytes, never a hang."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_s3 import FakeS3, Request, Response, element, error
from s3_kit import MIB, config, on, rig, the_object
from tiers_kit import CONFIG, Chunk, Rig, chunks, in_

from kvd.errors import ConfigError
from kvd.tiers.base import Answer, Key, Probe, Reason, State
from kvd.tiers.s3 import S3Backend, S3Config
from kvd.tiers.s3.objects import Body, name_of, owner_of
from kvd.tools.services import free_ports

GOLDEN = "kvd/c1/33/4b4f4fe9691221d279c3044668a1911090a25dbcbab8779e98c1ea093d3363"


# -- bodies -------------------------------------------------------------------------------------

BODIES = [
    "half",
    "longer",
    "appended",
    "chunked",
    "gzip",
    "xml",
    "reset",
    "trickle",
    "head",
    "silent",
]


@pytest.mark.parametrize("how", BODIES)
def test_a_body_that_is_not_the_object_is_never_data(fake: FakeS3, it: Rig, how: str) -> None:
    """K68: cut, too long, chunked, encoded, an error with status 200, a byte at a time: tried
    again, a miss at the end, and the object is not blamed for it."""
    chunk = Chunk(1, 3_000)
    assert it.one(chunk.write()).answer is Answer.OK
    fake.hook = on("GET", how)
    done = it.one(chunk.read(deadline=in_(1.5)), 10)
    assert done.answer in (Answer.FAILED, Answer.TIMEOUT) and done.header is None
    if how not in ("trickle", "head", "silent"):
        assert it.tier.stat().notes["requests"] >= 5
    assert len(fake.objects) == 1
    fake.hook = on("GET", how, times=1)
    it.until(lambda: it.tier.state is State.READY)
    job = chunk.read(deadline=in_(10))
    assert it.one(job, 15).answer is Answer.OK and bytes(job.into) == bytes(chunk.memory)


@pytest.mark.parametrize(
    "where", ["payload", "record", "check", "appended", "cut", "swapped", "empty"]
)
def test_an_object_that_does_not_hold_is_quarantined_and_heals(
    fake: FakeS3, it: Rig, where: str
) -> None:
    """K35: a miss each time, counted, no data; it is deleted by its ETag, and a new store heals."""
    chunk, other = Chunk(1), Chunk(2)
    assert it.one(chunk.write()).answer is Answer.OK
    name = the_object(fake)
    body = bytearray(fake.objects[name])
    if where == "swapped":
        it.one(other.write())
        body = bytearray(next(v for k, v in fake.objects.items() if k != name))
    elif where == "appended":
        body += b"x"
    elif where == "cut":
        del body[-1]
    elif where == "empty":
        body.clear()
    else:
        body[{"payload": 5_000, "record": 90, "check": 510}[where]] ^= 4
    fake.objects[name] = bytes(body)
    assert it.one(chunk.read()).answer is Answer.CORRUPT
    assert it.tier.stat().notes["quarantined"] == 1
    assert name not in fake.objects and it.one(chunk.read()).answer is Answer.MISS
    assert it.one(chunk.write()).answer is Answer.OK
    job = chunk.read()
    assert it.one(job).answer is Answer.OK and bytes(job.into) == bytes(chunk.memory)


def test_another_installations_bad_object_is_left_and_then_replaced(fake: FakeS3) -> None:
    one, two = rig(fake), rig(fake, installation="two")
    chunk = Chunk(1)
    one.one(chunk.write())
    name = the_object(fake)
    body = bytearray(fake.objects[name])
    body[5_000] ^= 1
    fake.objects[name] = bytes(body)
    assert two.one(chunk.read()).answer is Answer.CORRUPT
    assert two.one(chunk.read()).answer is Answer.MISS
    assert fake.objects[name] == bytes(body), "not ours to delete"
    assert two.one(chunk.delete()).answer is Answer.MISS and name in fake.objects
    assert two.one(chunk.write()).answer is Answer.OK, "replaced, by its ETag"
    assert one.one(chunk.read()).answer is Answer.OK
    one.close()
    two.close()


# -- if absent ----------------------------------------------------------------------------------


def test_a_412_is_present_only_after_its_record_was_read(fake: FakeS3) -> None:
    one, two = rig(fake), rig(fake, installation="two")
    chunk = Chunk(1)
    assert one.one(chunk.write()).answer is Answer.OK
    assert two.one(chunk.write()).answer is Answer.EXISTS
    assert two.tier.usage().chunks == 0, "it counts where it was written"
    assert two.one(chunk.read()).answer is Answer.OK
    name = the_object(fake)
    for lie in (b"", b"x" * 600, Chunk(2).header.pack() + bytes(10_000)):
        fake.objects[name] = lie
        done = two.one(chunk.write())
        assert done.answer is Answer.FAILED and done.reason is Reason.CONFLICT
        assert fake.objects[name] == lie
    one.close()
    two.close()


def test_a_409_is_tried_again(fake: FakeS3, it: Rig) -> None:
    fake.hook = on("PUT", error(409, "ConditionalRequestConflict"), times=2)
    assert it.one(Chunk(1).write()).answer is Answer.OK
    assert it.tier.stat().notes["retries"] == 2


def test_a_put_whose_answer_was_lost_is_still_ours(fake: FakeS3, it: Rig) -> None:
    """It was stored, the answer was not heard, the second attempt says 412."""
    fake.hook = on("PUT", "reset", times=1)
    done = it.one(Chunk(1).write())
    assert done.answer is Answer.OK and it.tier.usage().chunks == 1
    assert it.one(Chunk(1).delete()).answer is Answer.OK and not fake.objects


def test_a_large_put_whose_answer_was_lost_is_still_ours(fake: FakeS3, it: Rig) -> None:
    """Its parts are an object, the answer was not heard, and then there is no such upload."""
    chunk = Chunk(1, 17 * MIB)

    def lost(request: Request) -> str | None:
        ends = request.method == "POST" and "uploadId" in request.query
        return "reset" if ends and request.query["uploadId"][0] in fake.uploads else None

    fake.hook = lost
    assert it.one(chunk.write()).answer is Answer.OK
    fake.hook = lambda request: None
    usage = it.tier.usage()
    assert (usage.chunks, usage.used_bytes) == (1, 17 * MIB + 512)
    assert it.one(chunk.read()).answer is Answer.OK
    assert it.one(chunk.delete()).answer is Answer.OK and not fake.objects


def test_an_upload_that_somebody_ended_is_a_failed_write(fake: FakeS3, it: Rig) -> None:
    def ended(request: Request) -> None:
        if request.method == "POST" and "uploadId" in request.query:
            fake.uploads.clear()

    fake.hook = ended  # type: ignore[assignment]
    assert it.one(Chunk(1, 17 * MIB).write()).answer is Answer.FAILED
    assert not fake.objects and it.tier.usage().used_bytes == 0
    fake.hook = lambda request: None
    assert it.one(Chunk(1, 17 * MIB).write()).answer is Answer.OK


def test_sixteen_writers_of_one_key_leave_one_whole_object(fake: FakeS3) -> None:
    """K56: winners and losers all say present, or failed; the object is complete."""
    rigs = [rig(fake, installation=str(n)) for n in range(4)]
    chunk = Chunk(1, 100_000)
    fake.hook = on("PUT", error(500, "InternalError"), times=5)
    for one in rigs:
        one.tier.submit([chunk.write()])
    answers = []
    for one in rigs:
        one.until(lambda one=one: one.tier.stat().pending == 0)
        answers += [done.answer for done in one.completions.take()]
    assert sorted(a.value for a in answers) == ["exists"] * 3 + ["ok"]
    assert rigs[0].one(chunk.read()).answer is Answer.OK
    for one in rigs:
        one.close()


# -- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [
        error(503, "SlowDown"), error(429, "TooManyRequests"), error(500, "InternalError"),
        error(400, "RequestTimeout"), error(502, "BadGateway"), Response(503, b"<html>no"),
    ],
)  # fmt: skip
def test_what_passes_by_itself_is_tried_again_and_not_more_often_than_said(
    fake: FakeS3, it: Rig, answer: Response
) -> None:
    """K66: capped, jittered, within the deadline; no key is believed present that is not."""
    fake.hook = on("PUT", answer, times=2)
    assert it.one(Chunk(1).write()).answer is Answer.OK
    fake.hook = on("PUT", answer)
    fake.requests.clear()
    done = it.one(Chunk(2).write(), 30)
    assert done.answer is Answer.FAILED and done.reason is not Reason.OTHER
    assert len([r for r in fake.requests if r.method == "PUT" and "probe" not in r.key]) == 4
    assert it.one(Chunk(2).read()).answer is Answer.MISS and it.tier.usage().chunks == 1


def test_a_server_that_refuses_everything_is_asked_less_and_less(fake: FakeS3, it: Rig) -> None:
    """K66: the request rate falls; then the tier resumes by itself."""
    fake.hook = lambda request: error(503, "SlowDown")
    jobs = [c.write() for c in chunks(30)]
    done = it.do(jobs, 60)
    assert {d.answer for d in done} == {Answer.FAILED, Answer.OFF}
    assert it.tier.state is State.DEGRADED
    fake.requests.clear()
    assert {d.answer for d in it.do([c.write() for c in chunks(30)])} == {Answer.OFF}
    time.sleep(0.3)
    assert len(fake.requests) < 10
    fake.hook = lambda request: None
    it.until(lambda: it.tier.state is State.READY)
    assert it.one(Chunk(1).write()).answer is Answer.OK


@pytest.mark.parametrize(
    ("answer", "reason", "says"),
    [
        (error(403, "AccessDenied"), Reason.DENIED, "AccessDenied"),
        (error(403, "SignatureDoesNotMatch"), Reason.CREDENTIALS, "not accepted"),
        (error(403, "InvalidAccessKeyId"), Reason.CREDENTIALS, "not accepted"),
        (error(404, "NoSuchBucket"), Reason.NOT_FOUND, "NoSuchBucket"),
        (error(400, "AuthorizationHeaderMalformed", "<Region>eu-west-1</Region>"), Reason.REGION,
         "region eu-west-1"),
        (error(301, "PermanentRedirect", x_amz_bucket_region="eu-west-1"), Reason.REGION,
         "region eu-west-1"),
        (error(403, "RequestTimeTooSkewed", "<RequestTime>20260101T000000Z</RequestTime>"
               "<ServerTime>2026-01-01T00:20:00Z</ServerTime>"), Reason.SKEW,
         "this host says 20260101T000000Z, the server 2026-01-01T00:20:00Z"),
    ],
)  # fmt: skip
def test_what_does_not_pass_is_told_at_once_at_start_and_later(
    fake: FakeS3, it: Rig, answer: Response, reason: Reason, says: str
) -> None:
    """K70, K72, K73, K75: named, not stormed; a running tier is degraded and heals."""
    fake.hook = lambda request: answer
    began = time.monotonic()
    with pytest.raises(ConfigError, match="tier s3: bucket bkt: ") as refused:
        S3Backend(config(fake)).open()
    assert says in str(refused.value) and time.monotonic() - began < 5
    assert "kvdsecret" not in str(refused.value)
    fake.requests.clear()
    done = it.one(Chunk(1).write())
    assert (done.answer, done.reason) == (Answer.FAILED, reason) and says in done.detail
    puts = [r for r in fake.requests if r.method == "PUT" and "probe" not in r.key]
    assert len(puts) <= 2, "no storm, no redirect loop"
    assert it.tier.state is State.DEGRADED and says in it.tier.stat().last_error
    assert it.one(Chunk(1).write()).answer is Answer.OFF
    fake.hook = lambda request: None
    it.until(lambda: it.tier.state is State.READY)
    assert it.one(Chunk(1).write()).answer is Answer.OK


def test_each_attempt_is_signed_anew(fake: FakeS3, it: Rig) -> None:
    """K70: a retry carries the date of its own time."""
    fake.requests.clear()
    fake.hook = on("PUT", error(503, "SlowDown"), times=3)
    assert it.one(Chunk(1).write(), 30).answer is Answer.OK
    puts = [r.headers for r in fake.requests if r.method == "PUT"]
    assert len(puts) == 4 == len({p["amz-sdk-invocation-id"] for p in puts})
    assert [p["x-amz-date"] for p in puts] == sorted(p["x-amz-date"] for p in puts)


@pytest.mark.parametrize("right", ["ListBucket", "PutObject", "GetObject", "DeleteObject"])
def test_the_right_that_is_missing_is_named(fake: FakeS3, right: str) -> None:
    """K72"""

    def hook(request: Request) -> Response | None:
        what = "ListBucket" if not request.key else f"{request.method.capitalize()}Object"
        return error(403, "AccessDenied") if what == right else None

    fake.hook = hook
    with pytest.raises(ConfigError, match=f"{right}: AccessDenied"):
        S3Backend(config(fake)).open()


def test_no_credentials_at_all_is_a_quick_and_clear_refusal(
    fake: FakeS3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """K72: within seconds, although there is no instance role to ask."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://127.0.0.1:9/")
    monkeypatch.setenv("HOME", str(tmp_path))
    began = time.monotonic()
    with pytest.raises(ConfigError, match="no credentials found"):
        S3Backend(config(fake)).open()
    assert time.monotonic() - began < 10


# -- time ---------------------------------------------------------------------------------------


def test_an_endpoint_that_is_away_is_degraded_within_bounds_and_heals(aws_keys: None) -> None:
    """K65: nobody listens, then somebody does."""
    (port,) = free_ports(1)
    began = time.monotonic()
    start = S3Config("bkt", "one", 8 * MIB, endpoint=f"http://127.0.0.1:{port}", addressing="path")
    it = Rig(S3Backend(start), "s3", CONFIG).start()
    assert time.monotonic() - began < 9 and it.tier.state is State.DEGRADED
    assert "can't be reached" in it.tier.stat().last_error
    assert it.one(Chunk(1).write(), 1).answer is Answer.OFF
    asked = it.tier.stat().notes["requests"]
    it.until(lambda: it.tier.stat().notes["requests"] > asked + 8)  # without traffic
    fake = FakeS3(port)
    it.until(lambda: it.tier.state is State.READY)
    assert it.one(Chunk(1).write()).answer is Answer.OK
    it.close()
    fake.close()


def test_an_endpoint_that_says_nothing_costs_a_deadline_and_no_more(fake: FakeS3, it: Rig) -> None:
    """K65: accepted and never answered; one byte now and then."""
    chunk = Chunk(1, 5_000)
    it.one(chunk.write())
    for how in ("silent", "trickle", "head"):
        fake.hook = lambda request, how=how: how
        began = time.monotonic()
        done = it.do([chunk.read(deadline=in_(1.0)) for _ in range(3)], 10)
        assert time.monotonic() - began < 3
        assert {d.answer for d in done} <= {Answer.TIMEOUT, Answer.FAILED, Answer.OFF}
        fake.hook = lambda request: None
        it.until(lambda: it.tier.state is State.READY, 20)


def test_connections_are_kept_and_not_more_than_work_side_by_side(fake: FakeS3) -> None:
    """K67: as many as run at a time, used again and again."""
    it = rig(fake)
    many = list(chunks(60, 2_000))
    it.do([c.write() for c in many])
    it.do([c.read() for c in many])
    assert fake.accepts <= CONFIG.workers + 2
    it.close()


# -- unfinished uploads ----------------------------------------------------------------------------


def test_an_upload_that_could_not_be_given_back_is_when_the_server_works(
    fake: FakeS3, it: Rig
) -> None:
    def down(request: Request) -> object:
        ends = request.query.get("partNumber") == ["2"] or request.method == "DELETE"
        return error(500, "InternalError") if ends else None

    fake.hook = down  # type: ignore[assignment]
    assert it.one(Chunk(1, 17 * MIB).write(), 60).answer is Answer.FAILED
    assert len(fake.uploads) == 1 and it.tier.stat().notes["lost_uploads"] == 1
    fake.hook = lambda request: None
    assert it.tier.untidy == 1 and it.one(Probe(None)).answer is Answer.OK
    assert it.tier.untidy == 0
    assert not fake.uploads and it.tier.stat().notes["aborted_uploads"] == 1


def test_an_old_upload_that_is_gone_meanwhile_does_not_keep_the_others(
    fake: FakeS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = "".join(
        f"<Upload><Key>kvd/c1/{n}</Key><UploadId>{n}</UploadId>"
        "<Initiated>2020-01-01T00:00:00.000Z</Initiated></Upload>"
        for n in range(3)
    )
    ended: list[str] = []

    def hook(request: Request) -> Response | None:
        if request.method == "DELETE" and "uploadId" in request.query:
            ended.append(request.query["uploadId"][0])
            return error(404, "NoSuchUpload") if ended[-1] == "0" else Response(204)
        asks = not request.key and "uploads" in request.query
        return element("ListMultipartUploadsResult", listed) if asks else None

    fake.hook = hook
    it = rig(fake)
    assert ended == ["0", "1", "2"] and it.tier.stat().notes["aborted_uploads"] == 2
    assert it.tier.untidy == 0
    it.one(Probe(None))
    assert len(ended) == 3, "not with each probe"
    it.close()
    monkeypatch.setattr("kvd.tiers.s3.uploads.STALE_EVERY_NS", 0)
    it = rig(fake)
    assert it.tier.untidy == 1
    it.one(Probe(None))
    assert len(ended) == 9, "and not at a start only"
    it.close()


@pytest.mark.parametrize("body", [b"", b"garbage", b"<a/>"])
@pytest.mark.parametrize("of", ["uploads", "partNumber", "uploadId"])
def test_an_answer_that_says_nothing_is_tried_again(
    fake: FakeS3, it: Rig, of: str, body: bytes
) -> None:
    """A 200 of something in between: no upload has begun, no part has come, no object is there."""
    left = [2]

    def hook(request: Request) -> Response | None:
        method = "PUT" if of == "partNumber" else "POST"
        if not (left[0] and request.key and of in request.query and request.method == method):
            return None
        left[0] -= 1
        return Response(200, body)

    fake.hook = hook
    chunk = Chunk(1, 17 * MIB)
    assert it.one(chunk.write()).answer is Answer.OK
    assert left == [0] and it.one(chunk.read()).answer is Answer.OK


# -- objects ------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [16 * MIB - 512, 16 * MIB, 20 * MIB + 1])
def test_large_objects_go_in_parts_and_come_in_ranges(fake: FakeS3, it: Rig, length: int) -> None:
    chunk = Chunk(1, length)
    assert it.one(chunk.write()).answer is Answer.OK
    assert fake.objects[the_object(fake)][512:] == chunk.memory and not fake.uploads
    job = chunk.read()
    assert it.one(job).answer is Answer.OK and bytes(job.into) == bytes(chunk.memory)
    ranged = [r for r in fake.requests if "range" in r.headers]
    assert len(ranged) == 0 if length == 16 * MIB - 512 else len(ranged) >= 3
    assert it.one(Chunk(1, length).write()).answer is Answer.OK, "412 of our own"
    short = chunk.read(into=memoryview(bytearray(length - 1)))
    assert it.one(short).answer is Answer.MISS


def test_an_upload_that_fails_is_aborted(fake: FakeS3, it: Rig) -> None:
    """K73: nothing of it is left, and nothing counted."""
    fake.hook = lambda r: (
        error(500, "InternalError") if r.query.get("partNumber") == ["3"] else None
    )
    assert it.one(Chunk(1, 20 * MIB).write(), 60).answer is Answer.FAILED
    assert not fake.uploads and not fake.objects and it.tier.usage().used_bytes == 0
    fake.hook = lambda r: None
    assert it.one(Chunk(1, 20 * MIB).write()).answer is Answer.OK


def test_names_are_fixed_short_and_the_same_everywhere() -> None:
    """K20, K53, K62: what differs in a key differs in its name; no text of a user is in it."""
    key = Key(1, b"n" * 32, b"s" * 32, b"c" * 32, 3)
    others = [
        key._replace(kind=2), key._replace(namespace=b"m" * 32), key._replace(spec=b"t" * 32),
        key._replace(chunk=b"d" * 32), key._replace(shard=4), key._replace(shard=31),
        key._replace(namespace=key.spec, spec=key.namespace),
    ]  # fmt: skip
    assert len({name_of("kvd", one) for one in (key, *others)}) == 1 + len(others)
    assert name_of("kvd", key) == name_of("/kvd/", key) == GOLDEN
    assert len(name_of("p" * 512, key)) <= 1024
    assert name_of("", key).startswith("c1/")
    assert owner_of("a") != owner_of("b") and len(owner_of("a")) == 16


def test_a_body_of_several_buffers_reads_like_one_file() -> None:
    body = Body(b"abc", b"", memoryview(b"defgh"))
    assert len(body) == 8 and body.read() == b"abcdefgh" and body.read() == b""
    for at in range(9):
        for size in range(9):
            body.seek(at)
            assert body.read(size) == b"abcdefgh"[at : at + size]
    body.seek(-2, 2)
    assert body.tell() == 6 and body.read(-1) == b"gh"


def test_a_time_to_live_ends_objects(fake: FakeS3) -> None:
    it = rig(fake, ttl_s=0.2)
    it.do([c.write() for c in chunks(5)])
    time.sleep(1.3)  # Last-Modified has whole seconds
    assert it.one(Chunk(1).read()).answer is Answer.MISS
    assert it.one(Chunk(9).write()).answer is Answer.OK
    assert len(fake.objects) == 1 and it.tier.usage().chunks == 1
    it.close()


def test_a_young_object_does_not_keep_old_ones_after_a_restart(fake: FakeS3) -> None:
    """Pages come by name, and records as they are read: in no order of age."""
    it = rig(fake, ttl_s=600)
    it.do([c.write() for c in chunks(20)])
    it.close()
    for name in list(fake.objects)[::2]:
        fake.modified[name] -= 700
    it = rig(fake, ttl_s=600)
    assert len(it.recovered()) == 10 and it.tier.usage().chunks == 20
    refuse = on("POST", error(503, "SlowDown"))
    fake.hook = lambda r: error(503, "SlowDown") if "delete" in r.query else refuse(r)
    assert it.one(Chunk(30).write()).answer is Answer.OK
    assert len(fake.objects) == 21, "they could not be deleted"
    fake.hook = lambda request: None
    assert it.one(Chunk(31).write()).answer is Answer.OK
    assert len(fake.objects) == 12 and it.tier.usage().chunks == 12
    assert it.tier.stat().notes["expired"] == 10
    it.close()


@pytest.mark.parametrize("whose", ["one", "two"])
def test_what_is_too_old_to_be_read_is_no_chunk_that_is_there(fake: FakeS3, whose: str) -> None:
    """A write that is told that it is there would be a miss until its owner comes, or for ever."""
    it = rig(fake, installation=whose)
    chunk = Chunk(1)
    it.one(chunk.write())
    it.close()
    fake.modified[the_object(fake)] -= 700
    it = rig(fake, ttl_s=600)
    assert it.one(chunk.read()).answer is Answer.MISS
    assert it.one(chunk.write()).answer is Answer.OK
    assert it.one(chunk.read()).answer is Answer.OK
    usage = it.tier.usage()
    assert (usage.chunks, usage.used_bytes) == (1, 10_512)
    it.close()


def test_what_was_deleted_behind_its_back_counts_no_more_and_is_nobodys(fake: FakeS3) -> None:
    one, two = rig(fake), rig(fake, installation="two")
    chunk = Chunk(1)
    one.one(chunk.write())
    fake.objects.clear()
    assert one.one(chunk.read()).answer is Answer.MISS
    assert one.tier.usage().used_bytes == 0 and one.tier.stat().notes["vanished"] == 1
    assert two.one(chunk.write()).answer is Answer.OK
    assert one.one(chunk.delete()).answer is Answer.MISS and the_object(fake)
    one.close()
    two.close()


def test_recovery_tells_whole_pages_and_owns_only_its_own(fake: FakeS3) -> None:
    one, two = rig(fake), rig(fake, installation="two")
    one.do([c.write() for c in chunks(7)])
    two.do([c.write() for c in chunks(4, first=20)])
    one.close()
    two.close()
    fake.objects["kvd/c1/00/" + "0" * 62] = b"somebody's"
    fake.objects["kvd/c1/readme"] = b"somebody's"
    again = rig(fake)
    assert len(again.recovered()) == 11
    usage = again.tier.usage()
    assert usage.chunks == 7 and usage.used_bytes == 7 * 10_512
    assert again.tier.stat().notes["bad_records"] == 2
    assert again.one(Chunk(20).delete()).answer is Answer.MISS
    assert again.one(Chunk(20).read()).answer is Answer.OK
    again.close()
    assert len(fake.objects) == 13


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"bucket": "no/bucket"}, "no name of a bucket"), ({"addressing": "x"}, "auto, path"),
        ({"limit_bytes": 5}, "at least 1 MiB"), ({"endpoint": "localhost"}, "begin with http"),
        ({"prefix": "a//b"}, "empty part"), ({"part_bytes": 3}, "part_bytes"),
        ({"verify_tls": "/no/such/file"}, "not there"), ({"installation": ""}, "empty"),
    ],
)  # fmt: skip
def test_settings_are_checked_and_named(how: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=f"tier s3: .*{says}"):
        S3Backend(S3Config("bucket", "one", 8 * MIB)._replace(**how))  # type: ignore[arg-type]


def test_profiles_and_credential_files(fake: FakeS3, tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    file = tmp_path / "credentials"
    file.write_text("[default]\naws_access_key_id=fromfile\naws_secret_access_key=x\n")
    backend = S3Backend(config(fake, credentials_file=str(file)))
    backend.open()
    backend.close()
    assert "Credential=fromfile/" in fake.requests[-1].headers["authorization"]
    with pytest.raises(ConfigError, match="is not there"):
        S3Backend(config(fake, credentials_file=str(tmp_path / "no"))).open()
    with pytest.raises(ConfigError, match="nobody"):
        S3Backend(config(fake, profile="nobody")).open()


def test_without_boto3_the_extra_is_named() -> None:
    code = (
        "import sys; sys.modules['botocore'] = None\n"
        "from kvd.tiers.s3 import S3Backend, S3Config\n"
        "from kvd.errors import ConfigError\n"
        "try: S3Backend(S3Config('bucket', 'one', 1 << 23)).open()\n"
        "except ConfigError as e: print(e)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'kvd[s3]'" in done.stdout

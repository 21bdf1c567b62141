"""What only a real server shows: signatures, rights, conditions, unfinished uploads."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from servers import Seaweed
from tiers_kit import CONFIG, Chunk, Rig

from kvd.errors import ConfigError
from kvd.tiers.base import Answer, Probe
from kvd.tiers.s3 import S3Backend, S3Config

MIB = 1 << 20


@pytest.fixture
def config(seaweed: Seaweed, aws_keys: None) -> S3Config:
    return S3Config(
        "kvd", "one", 64 * MIB, prefix=f"t{uuid.uuid4().hex}", endpoint=seaweed.endpoint,
        addressing="path", concurrency=4,
    )  # fmt: skip


def test_a_wrong_secret_is_refused_at_start(
    config: S3Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K72: told at once, by name, without the secret."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-the-secret")
    with pytest.raises(ConfigError, match="credentials are not accepted") as refused:
        S3Backend(config).open()
    assert "not-the-secret" not in str(refused.value)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    with pytest.raises(ConfigError, match="credentials are not accepted"):
        S3Backend(config).open()


@pytest.mark.parametrize("name", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
@pytest.mark.parametrize("value", ["of two\nlines", "\udcff"])
def test_credentials_that_can_not_be_sent_are_refused_at_start(
    config: S3Config, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    """K72: whoever took them over with a line end, or in another encoding."""
    monkeypatch.setenv(name, value)
    # a secret with a line end is another secret, and the server says so
    says = "can't be sent|are not accepted"
    with pytest.raises(ConfigError, match=says) as refused:
        S3Backend(config).open()
    assert value not in str(refused.value)


def test_a_key_that_may_only_read_names_the_missing_right(
    config: S3Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K72"""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "readkey")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "readsecret")
    with pytest.raises(ConfigError, match="PutObject: AccessDenied"):
        S3Backend(config).open()


def test_a_missing_bucket_is_refused_at_start(config: S3Config) -> None:
    """K73"""
    with pytest.raises(ConfigError, match="NoSuchBucket"):
        S3Backend(config._replace(bucket="no-such-bucket")).open()


def test_two_daemons_share_a_bucket(config: S3Config) -> None:
    first, second = S3Backend(config), S3Backend(config._replace(installation="two"))
    one = Rig(first, "s3", CONFIG).start()
    two = Rig(second, "s3", CONFIG).start()
    chunk = Chunk(1, 300_000)
    assert not first.owns(chunk.key)
    assert one.one(chunk.write()).answer is Answer.OK
    assert two.one(chunk.write()).answer is Answer.EXISTS
    assert first.owns(chunk.key) and not second.owns(chunk.key)
    job = chunk.read()
    assert two.one(job).answer is Answer.OK and bytes(job.into) == bytes(chunk.memory)
    assert two.one(chunk.delete()).answer is Answer.MISS
    assert one.one(chunk.read()).answer is Answer.OK
    assert one.one(chunk.delete()).answer is Answer.OK
    assert two.one(chunk.read()).answer is Answer.MISS
    assert not first.owns(chunk.key)
    one.close()
    two.close()


def test_large_objects_by_a_real_server(config: S3Config) -> None:
    it = Rig(S3Backend(config), "s3", CONFIG).start()
    chunk = Chunk(1, 20 * MIB + 7)
    assert it.one(chunk.write(), 60).answer is Answer.OK
    job = chunk.read()
    assert it.one(job, 60).answer is Answer.OK and job.into == chunk.memory
    other = Rig(S3Backend(config._replace(installation="two")), "s3", CONFIG).start()
    assert other.one(chunk.write(), 60).answer is Answer.EXISTS
    other.close()
    it.close()


def test_uploads_that_nobody_finished_are_aborted_at_start(
    config: S3Config, seaweed: Seaweed
) -> None:
    client = seaweed.client()
    name = f"{config.prefix}/c1/00/left"
    foreign = f"{config.prefix}-other/left"
    client.create_multipart_upload(Bucket="kvd", Key=name)
    client.create_multipart_upload(Bucket="kvd", Key=foreign)
    backend = S3Backend(config)
    backend.open()
    backend.close()
    young = client.list_multipart_uploads(Bucket="kvd").get("Uploads", [])
    assert name in {u["Key"] for u in young}, "it may be somebody's who is at it"
    backend = S3Backend(config._replace(stale_upload_s=0.0))
    backend.open()
    assert backend.notes()["aborted_uploads"] == 1
    backend.close()
    left = {u["Key"] for u in client.list_multipart_uploads(Bucket="kvd").get("Uploads", [])}
    assert name not in left and foreign in left
    client.close()


def test_what_is_taken_back_is_deleted_by_its_etag(
    config: S3Config, seaweed: Seaweed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvd.tiers.s3.doubts.SETTLED_NS", 0)
    backend, client = S3Backend(config), seaweed.client()
    it = Rig(backend, "s3", CONFIG).start()
    for chunk in (Chunk(1), Chunk(2)):
        assert it.one(chunk.write()).answer is Answer.OK
        name = backend._name(chunk.key)
        backend._mine.forget([name])  # as if it had not been answered
        assert backend._mine.begin(name, 10_512)
        backend._mine.unsure(name, 10_512)
        if chunk.number == 2:  # another's comes between the look and the deletion
            lies = backend._downloads.lies

            def then(*args: Any, lies: Any = lies, name: str = name) -> Any:
                there = lies(*args)
                client.put_object(Bucket="kvd", Key=name, Body=b"another's")
                return there

            monkeypatch.setattr(backend._downloads, "lies", then)
        assert it.one(Probe(None)).answer is Answer.OK
        there = client.list_objects_v2(Bucket="kvd", Prefix=name).get("Contents", [])
        assert len(there) == chunk.number - 1 and it.tier.usage().used_bytes == 0
    assert it.tier.stat().notes["taken_back"] == 1 and backend._doubts._by_etag
    client.close()
    it.close()

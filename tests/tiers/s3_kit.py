"""What the tests of S3 over a fake server share."""

from __future__ import annotations

from fake_s3 import FakeS3, Request
from tiers_kit import CONFIG, Rig

from kvd.tiers.s3 import S3Backend, S3Config

MIB = 1 << 20


def config(fake: FakeS3, **how: object) -> S3Config:
    start = S3Config(
        bucket="bkt", installation="one", limit_bytes=64 * MIB, endpoint=fake.endpoint,
        addressing="path", concurrency=4, read_timeout_s=0.5, connect_timeout_s=0.5,
    )  # fmt: skip
    return start._replace(**how)  # type: ignore[arg-type]


def rig(fake: FakeS3, **how: object) -> Rig:
    return Rig(S3Backend(config(fake, **how)), "s3", CONFIG).start()


def the_object(fake: FakeS3) -> str:
    (name,) = fake.objects
    return name


def on(method: str, how: object, times: int | None = None):  # type: ignore[no-untyped-def]
    """A hook that shapes requests for objects of one method, `times` of them."""
    left = [times]

    def hook(request: Request) -> object:
        if request.method != method or "/c1/" not in f"/{request.key}" or "probe-" in request.key:
            return None
        if left[0] is not None:
            if left[0] == 0:
                return None
            left[0] -= 1
        return how

    return hook

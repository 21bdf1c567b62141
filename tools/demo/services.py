"""What the tiers of the demo stand on, where the environment names nothing of the kind.

The law of this module: a bucket or a Redis that the caller names (KVD_S3_..., KVD_REDIS_...) is
used as it is, and nothing beside the demo's own objects is touched there; else real servers are
started in a temporary folder, and gone with the context.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from kvd.tools.services import ACCESS, SECRET, Redis, Seaweed

__all__ = ["BUCKET", "services"]

BUCKET = "kvd-demo"


@contextmanager
def services(
    tiers: Sequence[str], told: Callable[[str], None], environ: Mapping[str, str] | None = None
) -> Iterator[dict[str, str]]:
    """The daemon's environment for these tiers: the caller's settings of them, or those of a
    server that is started here. ServiceFailed."""
    environ = os.environ if environ is None else environ
    kept = tuple(f"KVD_{name.upper()}_" for name in tiers if name != "nvme")
    found = {k: v for k, v in environ.items() if not k.startswith("KVD_") or k.startswith(kept)}
    with ExitStack() as stack:

        def folder(name: str) -> Path:
            path = Path(tempfile.mkdtemp(prefix=f"kvd-demo-{name}-", dir="/tmp"))
            stack.callback(shutil.rmtree, path, ignore_errors=True)
            return path

        if "s3" in tiers and not (found.get("KVD_S3_ENDPOINT") or found.get("KVD_S3_BUCKET")):
            told("an S3 server is started (SeaweedFS), for KVD_S3_ENDPOINT names none")
            weed = Seaweed(folder("s3"))
            stack.callback(weed.stop)
            weed.make_bucket(BUCKET)
            found |= {
                "KVD_S3_ENDPOINT": weed.endpoint,
                "KVD_S3_BUCKET": BUCKET,
                "KVD_S3_ADDRESSING": "path",
                "KVD_S3_LIMIT": "2GiB",
                "AWS_ACCESS_KEY_ID": ACCESS,
                "AWS_SECRET_ACCESS_KEY": SECRET,
                "AWS_EC2_METADATA_DISABLED": "true",
            }
            for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN"):
                found.pop(name, None)
        if "redis" in tiers and not found.get("KVD_REDIS_URL"):
            told("a Redis is started, for KVD_REDIS_URL names none")
            redis = Redis(folder("redis"))
            stack.callback(redis.stop)
            found |= {"KVD_REDIS_URL": redis.url, "KVD_REDIS_LIMIT": "1GiB"}
        yield found

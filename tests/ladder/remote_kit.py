"""What the tests of a daemon over S3 and Redis share: chunks whose bytes belong to one key."""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from daemon import DaemonProcess
from fake_s3 import FakeS3
from servers import ACCESS, SECRET, Seaweed

from kvd.chunk import KVSpec, Outcome, ShardSpec
from kvd.client import Client, Selector

MIB = 1 << 20
SIZE = 256 * 1024
OK, MISS = Outcome.OK, Outcome.MISS


def spec(nbytes: int = SIZE) -> KVSpec:
    shards = (ShardSpec(0, 0, 0, 0, 0, 1, 0, 1, nbytes),)
    return KVSpec("remote", "", "w", "test", "bf16", "", "raw", 16, 1, 1, 1, (), (), shards)


def chain(name: object, count: int) -> list[bytes]:
    return [hashlib.sha256(f"{name}/{n}".encode()).digest() for n in range(count)]


def payload(hash_: bytes, nbytes: int = SIZE) -> np.ndarray[Any, Any]:
    seed = int.from_bytes(hash_[:8], "little")
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def store(client: Client, handle: Any, hashes: list[bytes], nbytes: int = SIZE) -> list[Outcome]:
    prints = [hashlib.blake2b(h, digest_size=16).digest() for h in hashes]
    return client.store_chunks(handle, hashes, prints, [payload(h, nbytes) for h in hashes])


def load(
    client: Client, handle: Any, hashes: list[bytes], nbytes: int = SIZE, timeout_s: float = 30
) -> list[Outcome]:
    """Load, and compare every byte of what is called OK."""
    seen: dict[int, bytes] = {}

    def take(result: int, view: memoryview) -> None:
        seen[result] = bytes(view)

    outcomes = client.load_chunks(handle, hashes, take, timeout_s=timeout_s)
    for n, outcome in enumerate(outcomes):
        if outcome is OK:
            assert seen[n] == payload(hashes[n], nbytes).tobytes(), "wrong bytes"
    return outcomes


def until(true: Callable[[], Any], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.02)


def tier(client: Client, name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(t for t in client.stat()["tiers"] if t["name"] == name)
    return found


def counters(client: Client) -> dict[str, Any]:
    found: dict[str, Any] = client.stat()["counters"]
    return found


def empty(client: Client, *names: str) -> None:
    """Forget everything in these tiers."""
    for name in names:
        client.evict(Selector(tier=name, everything=True))


def drain(client: Client, name: str) -> None:
    client.tier(name, "drain")
    until(lambda: not counters(client)["moving"])


def healed(client: Client, name: str, seconds: float = 60.0) -> None:
    """Wait until a tier has come back by itself; then the core knows it, too."""
    until(lambda: tier(client, name)["state"] == "ok", seconds)
    assert client.tier(name, "probe").ok


def s3_flags(seaweed: Seaweed, prefix: str | None = None, **more: object) -> list[str]:
    return flags(
        s3_endpoint=seaweed.endpoint,
        s3_bucket="kvd",
        s3_prefix=prefix or f"t{uuid.uuid4().hex}",
        s3_addressing="path",
        s3_limit="256MiB",
        **more,
    )


def flags(**settings: object) -> list[str]:
    return [
        part
        for name, value in settings.items()
        for part in (f"--{name.replace('_', '-')}", str(value))
    ]


def on_fake(fake: FakeS3, **more: object) -> list[str]:
    return flags(
        s3_endpoint=fake.endpoint, s3_bucket="bkt", s3_addressing="path", s3_limit="1GiB", **more
    )


def keys(access: str = ACCESS, secret: str = SECRET) -> dict[str, str]:
    """Of the daemon's environment: the credentials, and no others of this machine."""
    return {
        "AWS_ACCESS_KEY_ID": access,
        "AWS_SECRET_ACCESS_KEY": secret,
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
    }


def daemon(*args: str, start: bool = True, **more: Any) -> DaemonProcess:
    """With short pauses: a tier that was away is tried again within a second."""
    more = {"arena_size": "16MiB", "env": keys(), **more}
    return DaemonProcess(args=["--tiers-retry-s", "1", *args], start=start, **more)


def refused(*args: str, env: dict[str, str] | None = None) -> str:
    """What a start that is refused says: one line, exit code 2, within 15 s."""
    with daemon(*args, env=env or keys(), start=False) as process:
        assert process.spawn().wait(15) == 2, process.log
        last = process.log.splitlines()[-1]
        assert last.startswith("kvd: ") and "Traceback" not in process.log
        return last


def no_shm(process: DaemonProcess) -> None:
    """Remove the arena of a daemon that is not running: as after a reboot."""
    import shutil

    for file in Path("/dev/shm").glob(f"kvd-*-{process.instance}*"):
        shutil.rmtree(file) if file.is_dir() else file.unlink()

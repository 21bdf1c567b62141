"""The golden inputs, and what kvd makes of them: one line of JSON-able values a vector.

Run as a program it prints all of them; `golden.json` beside it is what they must be for ever. It
was written once by this program and is not to be written again: a difference is a broken format.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np

from kvd.chunk import (
    NO_FINGERPRINT,
    ChunkHeader,
    ChunkKey,
    HeaderFlag,
    Kind,
    KVSpec,
    ShardSpec,
    State,
    block_digests,
    chain_fingerprints,
    chain_hashes,
    content_hash,
    fingerprint,
    namespace_digest,
    payload_digest,
)

SPEC = KVSpec(
    model="org/Model-7B",
    revision="main",
    weights="sha256:00ff",
    engine="transformers",
    dtype="bfloat16",
    quantisation="none",
    codec="kvd/lkvthd/1",
    chunk_tokens=64,
    pipeline=1,
    tensor=2,
    groups=1,
    rope=(("theta", "10000.0"), ("type", "default")),
    extra=(("salt", "Grüße"),),
    shards=(
        ShardSpec(0, 0, 0, 0, 0, 30, 0, 2, 983040),
        ShardSpec(0, 1, 0, 0, 0, 30, 2, 3, 491520),
    ),
)

HEADER = ChunkHeader(
    kind=Kind.PREFIX,
    state=State.READY,
    namespace_digest=bytes(range(32)),
    spec=bytes(range(32, 64)),
    chunk=bytes(range(64, 96)),
    parent=bytes(range(96, 128)),
    shard=1,
    shard_count=2,
    index=7,
    tokens=64,
    fingerprint=bytes(range(128, 144)),
    pos0=448,
    flags=HeaderFlag.SEALED | HeaderFlag.K_ROTATED,
    length=491520,
    generation=0x0102030405060708,
    epoch=1_700_000_000_000_000_000,
    session=bytes(range(144, 160)),
    created_unix_ns=1_700_000_000_123_456_789,
    digest=bytes(range(160, 176)),
)

TOKENS = [(i * 2654435761) % 49152 for i in range(200)]
MEDIA = [(60, 10, b"picture-one"), (130, 2, b"picture-two")]
EDGES = [0, 1, 2**31 - 1, 2**31, 2**32 - 1] * 8


def payload(size: int) -> bytes:
    return ((np.arange(size, dtype=np.uint64) * 2654435761 >> 7) & 0xFF).astype(np.uint8).tobytes()


def _hex(values: list[bytes]) -> list[str]:
    return [v.hex() for v in values]


def vectors() -> dict[str, Any]:
    key = ChunkKey(Kind.PREFIX, "team-ü", SPEC.digest, chain_hashes(TOKENS, 64)[0], 1)
    return {
        "spec_encoding": SPEC.encode().hex(),
        "spec_digest": SPEC.digest.hex(),
        "header": HEADER.pack().hex(),
        "namespace_default": namespace_digest("default").hex(),
        "namespace_umlaut": namespace_digest("team-ü").hex(),
        "storage_name": key.storage_name(),
        "chain": _hex(chain_hashes(TOKENS, 64)),
        "chain_salt": _hex(chain_hashes(TOKENS, 64, salt=b"pepper")),
        "chain_parent": _hex(chain_hashes(TOKENS, 64, parent=b"p" * 32)),
        "chain_media": _hex(chain_hashes(TOKENS, 64, media=MEDIA)),
        "chain_edges": _hex(chain_hashes(EDGES, 20)),
        "content": content_hash(TOKENS[:64]).hex(),
        "content_salt_media": content_hash(TOKENS[:64], salt=b"pepper", media=MEDIA).hex(),
        "prints": _hex(chain_fingerprints(TOKENS, 64)),
        "prints_salt_media": _hex(chain_fingerprints(TOKENS, 64, salt=b"pepper", media=MEDIA)),
        "print_content": fingerprint(TOKENS[:64]).hex(),
        "print_root": fingerprint(TOKENS[:64], NO_FINGERPRINT).hex(),
        "print_parent_hash": fingerprint(TOKENS[:64], b"p" * 32).hex(),
        "payload": {
            str(n): payload_digest(payload(n)).hex() for n in (0, 1, 4096, 1 << 20, (5 << 19) + 3)
        },
        "blocks": block_digests(payload((5 << 19) + 3)).hex(),
    }


if __name__ == "__main__":
    json.dump(vectors(), sys.stdout, indent=1)
    sys.stdout.write("\n")

"""Identity and formats: what a chunk is called, and what its record looks like.

The law of this package: it is pure. Every byte it makes is fixed by golden vectors.
"""

from kvd.chunk.digest import (
    BLOCK_BYTES,
    DIGEST_BYTES,
    block_digests,
    copy_with_digest,
    payload_digest,
    root_digest,
    verify_blocks,
)
from kvd.chunk.hashing import (
    FINGERPRINT_BYTES,
    NO_FINGERPRINT,
    NO_PARENT,
    Media,
    chain_fingerprints,
    chain_hashes,
    content_hash,
    fingerprint,
    token_bytes,
)
from kvd.chunk.header import (
    HEADER_BYTES,
    IDENTITY_DTYPE,
    RECORD_DTYPE,
    ChunkHeader,
    HeaderFlag,
    State,
    verify_table,
)
from kvd.chunk.key import (
    HASH_BYTES,
    ChunkKey,
    check_hash,
    check_namespace,
    namespace_digest,
)
from kvd.chunk.outcome import Kind, Outcome
from kvd.chunk.ref import REF_BYTES, REF_DTYPE, SlotRef, list_refs, pack_refs, unpack_refs
from kvd.chunk.spec import KVSpec, ShardSpec, canonical_pairs

__all__ = [
    "BLOCK_BYTES",
    "DIGEST_BYTES",
    "FINGERPRINT_BYTES",
    "HASH_BYTES",
    "HEADER_BYTES",
    "IDENTITY_DTYPE",
    "NO_FINGERPRINT",
    "NO_PARENT",
    "RECORD_DTYPE",
    "REF_BYTES",
    "REF_DTYPE",
    "ChunkHeader",
    "ChunkKey",
    "HeaderFlag",
    "KVSpec",
    "Kind",
    "Media",
    "Outcome",
    "ShardSpec",
    "SlotRef",
    "State",
    "block_digests",
    "canonical_pairs",
    "chain_fingerprints",
    "chain_hashes",
    "check_hash",
    "check_namespace",
    "content_hash",
    "copy_with_digest",
    "fingerprint",
    "list_refs",
    "namespace_digest",
    "pack_refs",
    "payload_digest",
    "root_digest",
    "token_bytes",
    "unpack_refs",
    "verify_blocks",
    "verify_table",
]

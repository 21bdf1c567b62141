"""SGLang's page hashes as kvd's chunk hashes.

The law of this module: a page hash is taken whole, 32 bytes of SHA-256, or not at all; what it
leaves out (dtype, layout, weights, rank) is in the KVSpec. SGLang chains its hashes and seeds the
first of a chain with the request's salt and extra key, so tokens before, salt and adapter are in
every hash.
"""

from __future__ import annotations

import string
from collections.abc import Iterable
from typing import Any, NamedTuple

__all__ = ["ROOT", "Place", "page_hashes", "place_of"]

_HEX = frozenset(string.hexdigits)


class Place(NamedTuple):
    """Where in its chain a batch of pages begins."""

    parent: bytes | None  # hash of the page before; None: a root, or not told
    number: int  # of the first page

    def at(self, position: int, hashes: list[bytes]) -> Place:
        """The place of page `position` of the batch `hashes` that begins here."""
        if position == 0:
            return self
        return Place(hashes[position - 1], self.number + position)


ROOT = Place(None, 0)


def page_hashes(keys: Iterable[Any]) -> list[bytes]:
    """The hashes of the leading keys that are page hashes: 64 hex digits. It ends at the first
    that is none (the pages behind it have lost their chain)."""
    found: list[bytes] = []
    for key in keys:
        if not isinstance(key, str) or len(key) != 64 or not _HEX.issuperset(key):
            break
        found.append(bytes.fromhex(key))
    return found


def place_of(extra_info: Any) -> Place:
    """The place that `HiCacheStorageExtraInfo.prefix_keys` tells: the hashes of all pages before
    the batch. Without it (hicache_storage_pass_prefix_keys is off) every batch is a chain of its
    own: kvd then can't tell leaves from trunks when it evicts."""
    prefix = getattr(extra_info, "prefix_keys", None)
    if not prefix:
        return ROOT
    last = page_hashes(prefix[-1:])
    return Place(last[0], len(prefix)) if last else ROOT

"""The journal outside the daemon: what it acknowledged, written only after it did.

The law of this module: a key stands for one content for ever, so that whatever comes back can be
judged by its key alone. A key is used by one store, or by one that is surely aborted, never both.
"""

from __future__ import annotations

import hashlib
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np


def content(hash_: bytes, nbytes: int) -> bytes:
    """The bytes under a key."""
    seed = int.from_bytes(hash_[:8], "little")
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8).tobytes()


def chain(name: str, count: int) -> list[bytes]:
    return [hashlib.sha256(f"{name}/{n}".encode()).digest() for n in range(count)]


def fingerprints(hashes: list[bytes]) -> list[bytes]:
    return [hashlib.blake2b(h, digest_size=16).digest() for h in hashes]


class Journal:
    """From several threads. `acknowledged`: chains whose commit was answered OK, in this order;
    `tried`: chains that may be there; `never`: chains that must not; `gone`: chains that somebody
    may have evicted; `held`: chains under a lease that was answered and not given back."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a")
        self._lock = threading.Lock()
        self.acknowledged: list[str] = []
        self.tried: set[str] = set()
        self.never: set[str] = set()
        self.gone: set[str] = set()
        self.held: set[str] = set()

    def write(self, what: str, name: str) -> None:
        with self._lock:
            self._file.write(json.dumps([what, name]) + "\n")
            self._file.flush()
            if what == "tried":
                self.tried.add(name)
            elif what == "acknowledged":
                self.acknowledged.append(name)
            elif what == "never":
                self.never.add(name)
            elif what == "held":
                self.held.add(name)
            elif what == "let go":
                self.held.discard(name)
            elif name:
                self.gone.add(name)
            else:  # all of a tier: also what was stored and is not acknowledged here yet
                self.gone.update(self.tried)

    def take_held(self) -> list[str]:
        """What must be there after a kill: nothing may make room for something else while it is
        leased. For the next life it is let go."""
        with self._lock:
            held, self.held = self.held - self.gone, set()
            return sorted(held)

    def state(self) -> dict[str, Any]:
        return {
            "acknowledged": len(self.acknowledged),
            "tried": len(self.tried),
            "never": len(self.never),
        }

    def close(self) -> None:
        self._file.close()

"""Two tenants of one daemon, and how each asks.

The law of this module: a tenant is a client with a token of its own, which asks as an engine does:
the longest run that is there, then a store of the rest.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from kvd.chunk import NO_PARENT, Kind, KVSpec, ShardSpec, payload_digest
from kvd.client import Client
from kvd.wire import LookupFlag
from kvd.wire import messages as m

CHUNK = 4096
VICTIM, NEIGHBOUR = "victim", "neighbour"


class Pair:
    """Tokens of the two, and configurations that know them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokens = {name: os.urandom(24).hex().encode() for name in (VICTIM, NEIGHBOUR)}
        for name, token in self.tokens.items():
            path = folder / f"{name}.token"
            path.write_bytes(token)
            path.chmod(0o600)

    def config(self, name: str, *, isolation: bool = True, tier: str = "dram") -> str:
        """Path of one that gives each half of a tier."""
        text = f"[tenancy]\nisolation = {str(isolation).lower()}\n"
        for tenant in self.tokens:
            text += f'[tenants.{tenant}]\ntoken_file = "{self.folder / tenant}.token"\n'
            text += f'[tenants.{tenant}.{tier}]\nmin = "50%"\n'
        path = self.folder / f"{name}.toml"
        path.write_text(text)
        return str(path)


class Tenant:
    """One tenant's client, and how it asks: look up, then store what is missing."""

    def __init__(self, socket: str, token: bytes, salt: int, nbytes: int = CHUNK) -> None:
        self.client = Client(socket, token=token, timeout_s=60, name=f"tenant-{salt}")
        shard = ShardSpec(0, 0, 0, 0, 0, 1, 0, 1, nbytes)
        spec = KVSpec("bench", "", "w", "b", "bf16", "", "raw", 16, 1, 1, 1, (), (), (shard,))
        self.spec = spec
        self.handle = self.client.register(spec)
        self.payload = np.random.default_rng(salt).integers(0, 256, nbytes, np.uint8).tobytes()
        self.digest = payload_digest(self.payload)
        self._salt = np.uint64(salt * 0x9E3779B97F4A7C15 % 2**64)

    def hashes(self, blocks: Any) -> bytes:
        words = np.empty((len(blocks), 4), np.uint64)
        words[:] = np.asarray(blocks, np.uint64)[:, None]
        words[:, 1:] *= np.uint64(0xBF58476D1CE4E5B9)
        words ^= self._salt
        words[:, 3] = self._salt
        return words.tobytes()

    def ask(self, blocks: Any, parent: bytes = NO_PARENT, index0: int = 0) -> int:
        """One prompt: the longest run that is there; the rest is stored. Blocks that were hit."""
        hashes = self.hashes(blocks)
        prints = np.frombuffer(hashes, np.uint64).reshape(-1, 4)[:, :2].tobytes()
        flags = int(LookupFlag.LEASE | LookupFlag.RESERVE_MISSES)
        message = m.Lookup(
            self.spec.digest, int(Kind.PREFIX), (0,), hashes, prints, flags, 30_000_000_000,
            parent, index0, 30_000_000_000,
        )  # fmt: skip
        client = self.client
        with client.lookup_of(client.submit_at(message, client.deadline_ns(60))) as found:
            made = found.reservation
            if made is not None and made.granted:
                for index in made.granted:
                    made.view(index)[:] = self.payload
                made.commit([self.digest] * len(made.granted))
        return int(found.leading)

    def close(self) -> None:
        self.client.close()

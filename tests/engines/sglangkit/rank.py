"""One tensor rank: SGLang's HiCacheController with its four threads, over a host pool, without a
GPU. Reads commands from stdin, one JSON list a line, and answers each in one line of JSON.

    python rank.py RANK RANKS SOCKET RENDEZVOUS {mha|mla} LAYOUT {v1|generic}

write [seed, pages]    fill pages from a seed and back them up; what was acknowledged, in tokens
prefetch [seed, pages] ask the store as the scheduler does: [tokens found by all ranks, tokens
                       completed by all ranks, whether their bytes are those of the seed]
detach, attach         the runtime's way
clear                  POST /hicache/storage-backend/clear
stats                  kvd's counters
"""

from __future__ import annotations

import json
import sys
from typing import Any

import real
import torch
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.runtime_context import get_parallel

PAGE = 16
WAIT_S = 30.0


class DevicePool:
    """What the controller asks of the device's pool when nothing goes to a device."""

    device = "cpu"
    layer_num = 4

    def register_layer_transfer_counter(self, counter: object) -> None:
        return


class Allocator:
    def get_kvcache(self) -> DevicePool:
        return DevicePool()


class Rank:
    def __init__(
        self, rank: str, ranks: str, socket: str, rendezvous: str, kind: str, layout: str, way: str
    ) -> None:
        self.rank, self.mla = int(rank), kind == "mla"
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{rendezvous}", rank=self.rank, world_size=int(ranks)
        )
        get_parallel().override_permanently(
            tp_rank=self.rank, tp_size=int(ranks), pp_rank=0, pp_size=1, attn_dcp_size=1,
            attn_dcp_rank=0,
        )  # fmt: skip
        self.pool = getattr(real, kind)(layout, pages=512)
        self.extra = real.extra_config(
            socket, interface_v1=int(way == "v1"), lookup_deadline_s=2.0, load_deadline_s=2.0,
            store_deadline_s=2.0,
        )  # fmt: skip
        self.controller = HiCacheController(
            token_to_kv_pool_allocator=Allocator(),  # type: ignore[arg-type]
            mem_pool_host=self.pool, page_size=PAGE, tp_group=torch.distributed.group.WORLD,
            load_cache_event=None, write_policy="write_through",
        )  # fmt: skip
        if self.mla:  # the controller looks at the device pool's class for this
            made = self.controller._generate_storage_config

            def storage_config(*told: Any) -> Any:
                config = made(*told)
                config.is_mla_model = True
                return config

            self.controller._generate_storage_config = storage_config
        self.attach()

    def attach(self) -> bool:
        self.controller.attach_storage_backend("dynamic", 16, "controlled", dict(self.extra))
        return self.controller.enable_storage

    def detach(self) -> bool:
        self.controller.detach_storage_backend()
        return self.controller.enable_storage

    def clear(self) -> bool:
        self.controller.storage_backend.clear()
        return True

    def stats(self) -> dict[str, int]:
        return self.controller.storage_backend.stats.snapshot()

    def write(self, seed: int, pages: int) -> int:
        indices = self.pool.alloc(pages * PAGE)
        self._put(indices, self._bytes(seed, pages))
        tokens = self._tokens(seed, pages)
        self.controller.write_storage(indices, tokens, real.page_hashes(tokens), [])
        done = self.controller.ack_backup_queue.get(timeout=WAIT_S)
        self.pool.free(indices)
        return done.completed_tokens

    def prefetch(self, seed: int, pages: int) -> tuple[int, int, bool]:
        controller = self.controller
        controller.prefetch(f"r{seed}", self._tokens(seed, pages), None, [])
        operation = controller.prefetch_hit_queue.get(timeout=WAIT_S)
        found = operation.storage_hit_count
        if not found:
            return 0, 0, True
        operation.host_indices = self.pool.alloc(found)
        pages_found = found // PAGE
        self._put(operation.host_indices, [b"\0"] * pages_found)
        controller.prefetch_buffer.put(operation)
        completed = 0
        while not (ack := controller.ack_prefetch_queue.get(timeout=WAIT_S)).completed_req:
            completed = ack.completed_tokens
        got = real.content(self.pool, operation.host_indices)[: completed // PAGE]
        self.pool.free(operation.host_indices)
        return found, completed, got == self._bytes(seed, pages)[: completed // PAGE]

    @staticmethod
    def _tokens(seed: int, pages: int) -> list[int]:
        return [seed * 100_000 + n for n in range(pages * PAGE)]

    def _bytes(self, seed: int, pages: int) -> list[bytes]:
        """A page's bytes say whose they are; MLA ranks hold the same."""
        size = self.pool.get_size_per_token() * PAGE
        owner = 0 if self.mla else self.rank
        generator = torch.Generator().manual_seed(seed * 10 + owner)
        raw = torch.randint(0, 256, (pages, size), generator=generator, dtype=torch.uint8)
        return [page.tobytes() for page in raw.numpy()]

    def _put(self, indices: torch.Tensor, pages: list[bytes]) -> None:
        import ctypes

        for tokens, data in zip(indices.reshape(-1, PAGE), pages, strict=True):
            at = 0
            for pointer, size in zip(*self.pool.get_page_buffer_meta(tokens), strict=True):
                part = data[at : at + size].ljust(size, b"\0")
                ctypes.memmove(pointer, part, size)
                at += size


def main() -> None:
    rank = Rank(*sys.argv[1:])
    answers = sys.stdout
    sys.stdout = sys.stderr
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(getattr(rank, name)(*arguments)), file=answers, flush=True)
    rank.detach()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

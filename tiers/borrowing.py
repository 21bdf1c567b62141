"""Device memory of the daemon, as another process sees it: what it is told, and how it maps it.

The law of this module: a mapping is good for one life of the daemon, and what lies there for as
long as the place has its generation. torch is imported when something is mapped, and not before.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from kvd.errors import ConfigError
from kvd.tiers.base import Place

__all__ = ["Borrowed", "Export"]


class Export(NamedTuple):
    """One slot, for another process: plain values that a message can carry. Good while the daemon
    has this epoch and until the owner's release; a copy out is good only if the place's generation
    is the same after it as before."""

    epoch: int
    device: int
    handle: bytes
    storage_bytes: int
    storage_offset: int
    ref_counter: bytes
    ref_counter_offset: int
    event: bytes
    event_needed: bool
    offset: int  # of the slot in the slab, bytes
    length: int
    place: Place


class Borrowed:
    """An engine's view of lent slabs, by export. Each slab is mapped once a process."""

    def __init__(self) -> None:
        self._storages: dict[tuple[int, bytes, int], Any] = {}

    def tensor(self, export: Export, epoch: int) -> Any:
        """A uint8 tensor over the lent chunk, on its device. ConfigError if the export is of
        another life of the daemon: its memory is gone."""
        import torch

        if export.epoch != epoch:
            raise ConfigError(f"an export of epoch {export.epoch}, the daemon's is {epoch}")
        key = (export.device, export.handle, export.storage_offset)
        if key not in self._storages:
            torch.cuda._lazy_init()
            self._storages[key] = torch.UntypedStorage._new_shared_cuda(
                export.device,
                export.handle,
                export.storage_bytes,
                export.storage_offset,
                export.ref_counter,
                export.ref_counter_offset,
                export.event,
                export.event_needed,
            )
        whole = torch.empty(0, dtype=torch.uint8, device=f"cuda:{export.device}")
        whole.set_(self._storages[key], 0, (export.storage_bytes,))
        return whole[export.offset : export.offset + export.length]

    def close(self) -> None:
        self._storages.clear()

"""Copies between pages in a CUDA device's memory and slots.

The law of this module: three orders hold, by events and not by luck. A store reads pages after the
forward that wrote them (`ready`), a later forward writes to them after the store's read (`fence`),
and a load writes to pages after the forwards that may still read their old content (`ready`); the
engine uses loaded pages only after the host has seen the load's end (`finish`). A slot is handed
over only when the copy into it has arrived.

Each thread has its own stream and staging buffer; pages are gathered on the device and cross in
one copy a chunk. Slots are registered with CUDA on first use, where it accepts that,
because a pinned copy is several times faster; what it refuses is copied unpinned.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from kvd.connectors.vllm.paging import Pages

__all__ = ["DeviceCopier"]

log = logging.getLogger("vllm.kvd")

_PORTABLE = 1  # cudaHostRegisterPortable
_KNOWN = 712  # cudaErrorHostMemoryAlreadyRegistered


class DeviceCopier:
    """For one thread; `ready` and `fence` are called by the thread that runs the model."""

    _pinned: set[int] = set()  # noqa: RUF012 - registration is a fact of the process
    _refused = False

    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        self._device = pages.device
        self._stream: Any = torch.cuda.Stream(self._device)
        self._forward: Any = None  # after the forward that was launched last
        self._read: Any = None  # after the last gather
        self._staging = torch.empty(pages.chunk_bytes, dtype=torch.uint8, device=self._device)

    def ready(self) -> None:
        """Called after a forward was launched: copies from now on come after it."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        self._forward = event

    def fence(self) -> None:
        """The model's stream goes on after the gathers that were begun."""
        if self._read is not None:
            torch.cuda.current_stream(self._device).wait_event(self._read)

    def gather(self, blocks: Sequence[Sequence[int]], chunk: int, slot: memoryview) -> None:
        """One chunk into a slot; it has arrived when this returns."""
        rows = self._pages.rows(blocks, chunk)
        if not all(row.all() for row in rows):
            raise ValueError(f"chunk {chunk} has a null block: it is not whole")
        host = self._host(slot)
        with torch.cuda.stream(self._stream):
            if self._forward is not None:
                self._stream.wait_event(self._forward)
            at = 0
            for group, row in zip(self._pages.groups, rows, strict=True):
                index = torch.from_numpy(row).to(self._device)
                for view, page in zip(group.views, group.page_bytes, strict=True):
                    end = at + len(row) * page
                    out = self._staging[at:end].view(-1, page)
                    torch.index_select(view, 0, index, out=out)
                    at = end
            read = torch.cuda.Event()
            read.record(self._stream)
            self._read = read
            host.copy_(self._staging, non_blocking=True)
            self._stream.synchronize()

    def scatter(self, slot: memoryview, blocks: Sequence[Sequence[int]], chunk: int) -> None:
        """One chunk out of a slot, to the blocks that are not 0. The slot's bytes have been read,
        and the pages written, when `finish` returns."""
        rows = self._pages.rows(blocks, chunk)
        host = self._host(slot)
        with torch.cuda.stream(self._stream):
            if self._forward is not None:
                self._stream.wait_event(self._forward)
            self._staging.copy_(host, non_blocking=True)
            at = 0
            for group, row in zip(self._pages.groups, rows, strict=True):
                wanted = np.flatnonzero(row)
                index = torch.from_numpy(row[wanted]).to(self._device)
                chosen = torch.from_numpy(wanted).to(self._device)
                for view, page in zip(group.views, group.page_bytes, strict=True):
                    end = at + len(row) * page
                    part = self._staging[at:end].view(-1, page)
                    view.index_copy_(0, index, part if len(wanted) == len(row) else part[chosen])
                    at = end

    def finish(self) -> None:
        self._stream.synchronize()

    def _host(self, slot: memoryview) -> Any:
        if slot.nbytes != self._pages.chunk_bytes:
            raise ValueError(f"{slot.nbytes} bytes for a chunk of {self._pages.chunk_bytes}")
        array = np.frombuffer(slot, dtype=np.uint8)
        address = array.ctypes.data
        self._pin(address, array.nbytes)
        # Not from `slot` itself: torch has no read-only tensors and warns of what it can't protect.
        memory = (ctypes.c_uint8 * array.nbytes).from_address(address)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def _pin(self, address: int, length: int) -> None:
        """Register the pages under a slot, unless that was done. Slots of one size class never
        share a page with another's, so whole slots are registered, each once."""
        cls = DeviceCopier
        if cls._refused or address in cls._pinned:
            return
        size = -(-length // 4096) * 4096
        error = int(torch.cuda.cudart().cudaHostRegister(address, size, _PORTABLE))
        if error in (0, _KNOWN):
            cls._pinned.add(address)
        else:
            cls._refused = True
            log.warning("kvd: CUDA refuses to register the arena (error %d): copies go unpinned; "
                        "raise the memlock limit (ulimit -l)", error)  # fmt: skip

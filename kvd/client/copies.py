"""Payloads between slots and the caller's buffers, arrays and CPU tensors.

The law of this module: all of a payload is copied, or nothing; large copies don't hold the GIL.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from kvd.chunk import copy_with_digest

__all__ = ["as_bytes", "copy_into", "copy_into_with_digest", "copy_out", "copy_out_with_digest"]


def as_bytes(buffer: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Any C-contiguous buffer, array or CPU tensor as flat bytes, without a copy. ValueError if
    it is not contiguous, or holds no plain values: those of Python objects are pointers, and what
    came back into such an array would be called one."""
    if hasattr(buffer, "untyped_storage"):  # a torch tensor: numpy does not know all its dtypes
        import torch

        if not buffer.is_contiguous() or buffer.device.type != "cpu":
            raise ValueError("a contiguous tensor on the CPU is due")
        return np.asarray(buffer.detach().reshape(-1).view(torch.uint8).numpy())
    view = memoryview(buffer)
    if "O" in view.format and "O" in re.sub(":[^:]*:", "", view.format):  # names of fields aside
        raise ValueError("a buffer of plain values is due, not one of Python objects")
    if not view.c_contiguous:
        raise ValueError("a C-contiguous buffer is due")
    return np.frombuffer(view.cast("B"), dtype=np.uint8)


def copy_into(target: memoryview, source: Any) -> None:
    """Copy all of `source` into `target`, without the GIL. ValueError if the sizes differ."""
    data = as_bytes(source)
    if data.nbytes != target.nbytes:
        raise ValueError(f"the chunk has {target.nbytes} bytes, the buffer {data.nbytes}")
    np.copyto(np.frombuffer(target, dtype=np.uint8), data)


def copy_out(source: memoryview, target: Any) -> None:
    """Copy all of `source` into the buffer `target`. ValueError if it is too small."""
    data = as_bytes(target)
    if data.nbytes < source.nbytes:
        raise ValueError(f"the chunk has {source.nbytes} bytes, the buffer {data.nbytes}")
    np.copyto(data[: source.nbytes], np.frombuffer(source, dtype=np.uint8))


def copy_into_with_digest(target: memoryview, source: Any) -> bytes:
    """`copy_into`, and the digest of what is in the slot then."""
    data = as_bytes(source)
    if data.nbytes != target.nbytes:
        raise ValueError(f"the chunk has {target.nbytes} bytes, the buffer {data.nbytes}")
    return copy_with_digest(np.frombuffer(target, dtype=np.uint8), data)


def copy_out_with_digest(source: memoryview, target: Any) -> bytes:
    """`copy_out`, and the digest of what arrived."""
    data = as_bytes(target)
    if data.nbytes < source.nbytes:
        raise ValueError(f"the chunk has {source.nbytes} bytes, the buffer {data.nbytes}")
    return copy_with_digest(data[: source.nbytes], np.frombuffer(source, dtype=np.uint8))

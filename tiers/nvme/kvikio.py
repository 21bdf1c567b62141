"""The engine of kvikio: cuFile (GPUDirect Storage) where it is there, its POSIX threads elsewhere.

The law of this module: kvikio is imported only after a child process showed that it works here (see
choose.py): opening the GDS driver has crashed processes. What it raises becomes OSError, so that
the tier falls back to plain system calls when it fails later.
"""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import numpy as np

from kvd.tiers.nvme.posix import Engine, File

TASK_BYTES = 4 << 20


class KvikioEngine(Engine):
    """`gds`: the probe found GPUDirect Storage. `threads`: of kvikio's own pool."""

    def __init__(self, *, gds: bool, threads: int) -> None:
        import kvikio  # only here: the daemon runs without it
        import kvikio.defaults

        self._kvikio: Any = kvikio
        self.name = "cufile" if gds else "kvikio-posix"
        mode = kvikio.CompatMode.AUTO if gds else kvikio.CompatMode.ON
        kvikio.defaults.set(
            {
                "compat_mode": mode,
                "num_threads": threads,
                "task_size": TASK_BYTES,
                "auto_direct_io_read": True,
                "auto_direct_io_write": True,
            }
        )

    def open(self, path: Path) -> File:
        try:
            return KvikioFile(self._kvikio.CuFile(str(path), "r+"))
        except (RuntimeError, OSError, ValueError) as error:
            raise OSError(errno.EIO, f"kvikio can't open the slab: {error}") from error


class KvikioFile(File):
    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, at: int, source: memoryview) -> None:
        self._move(self._file.pwrite, at, source)

    def read(self, at: int, into: memoryview) -> None:
        self._move(self._file.pread, at, into)

    def read_device(self, at: int, tensor: Any) -> None:
        """Straight into device memory (an object with __cuda_array_interface__)."""
        self._move(self._file.pread, at, tensor)

    def _move(self, call: Any, at: int, memory: Any) -> None:
        if isinstance(memory, memoryview):
            memory = np.frombuffer(memory, np.uint8)
        try:
            done = call(memory, memory.nbytes, at).get()
        except (RuntimeError, OSError, ValueError) as error:
            raise OSError(errno.EIO, f"kvikio: {error}") from error
        if done != memory.nbytes:
            raise OSError(errno.EIO, f"kvikio moved {done} of {memory.nbytes} bytes")

    def close(self) -> None:
        self._file.close()

"""The NVMe tier: a bounded set of preallocated slab files in one directory of its own.

The law of this package: the record on disk is the authority. A chunk is there when its record in
its slab's table holds; payload first, then its record; the record first, when it goes. There is no
index file that could disagree, and never a file a chunk.
"""

from kvd.tiers.nvme.backend import NvmeBackend
from kvd.tiers.nvme.choose import ENGINES
from kvd.tiers.nvme.config import NvmeConfig

__all__ = ["ENGINES", "NvmeBackend", "NvmeConfig"]

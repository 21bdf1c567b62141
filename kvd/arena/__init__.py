"""The arena: shared memory that the daemon owns and its clients map.

The law of this package: the daemon alone writes the record table, reserves memory before it is
used, and never truncates; a client's references are checked before use (bounds) and after
(generation, epoch); ownership and life are locks, not files.
"""

from kvd.arena.client import ArenaMap
from kvd.arena.hugepages import WISHES, Wish
from kvd.arena.inodes import why_no_file
from kvd.arena.layout import Geometry, plan
from kvd.arena.owner import ArenaOwner
from kvd.arena.preflight import MEMORY_KINDS, check_room, file_system_kind
from kvd.arena.table import Registry, Scan

__all__ = [
    "MEMORY_KINDS",
    "WISHES",
    "ArenaMap",
    "ArenaOwner",
    "Geometry",
    "Registry",
    "Scan",
    "Wish",
    "check_room",
    "file_system_kind",
    "plan",
    "why_no_file",
]

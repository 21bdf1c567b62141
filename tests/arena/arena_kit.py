"""Names that the arena's tests share."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

from kvd.arena import ArenaOwner

SIZE = 1 << 20  # bytes of an arena unless a test says otherwise: 16 slabs of 64 KiB
NOW = 1_700_000_000_000_000_000

Open = Callable[..., ArenaOwner]
Spawn = Callable[..., "subprocess.Popen[str]"]

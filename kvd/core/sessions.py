"""Sessions: who holds what.

The law of this module: whatever is held is held by a session, and ends with it. A lease may be
used by every session of its group, an unfinished write only by the session that made it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from kvd.core.leases import Lease
    from kvd.core.write import Write


class Session:
    """One client's connection. `closed` ones are being cleaned up and can do nothing."""

    def __init__(
        self,
        number: int,
        public_id: bytes,
        namespace: str,
        group: bytes,
        admin: bool,
        name: str,
        maps_memory: bool,
    ) -> None:
        self.number = number
        self.public_id = public_id
        self.namespace = namespace
        self.group = group
        self.admin = admin
        self.name = name
        self.maps_memory = maps_memory
        self.closed = False
        self.stopped = False  # no process of it can still be copying
        self.write_bytes = 0  # slots of unfinished and condemned writes
        self.lease_bytes = 0  # slots of chunks under a lease of it, each once
        self.pins: NDArray[np.int32] | None = None  # its leases, by chunk
        self.writes: dict[int, Write] = {}
        self.leases: dict[int, Lease] = {}


class Sessions:
    """By number. A number is never used twice."""

    def __init__(self) -> None:
        self.by_number: dict[int, Session] = {}

    def open(self, session: Session) -> None:
        self.by_number[session.number] = session

    def get(self, number: int) -> Session | None:
        return self.by_number.get(number)

    def close(self, number: int) -> Session | None:
        """Take it out: from now on it is unknown."""
        session = self.by_number.pop(number, None)
        if session is not None:
            session.closed = True
        return session

    def __len__(self) -> int:
        return len(self.by_number)

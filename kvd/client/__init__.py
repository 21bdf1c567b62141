"""What connectors and tools use to talk to a daemon.

The law of this package: nothing here blocks beyond a call's deadline, needs a thread of its own,
or survives a fork. Bytes go through shared memory; the daemon is asked where.
"""

from kvd.client.base import SpecHandle
from kvd.client.call import Call
from kvd.client.client import Client
from kvd.client.copies import as_bytes, copy_into, copy_out
from kvd.client.lease import Lease, Transfer
from kvd.client.lookup import Lookup
from kvd.client.reservation import Reservation
from kvd.client.settings import Counters, Curve, Info, SharedLease
from kvd.wire.messages import EvictReply, ListReply, Selector

__all__ = [
    "Call",
    "Client",
    "Counters",
    "Curve",
    "EvictReply",
    "Info",
    "Lease",
    "ListReply",
    "Lookup",
    "Reservation",
    "Selector",
    "SharedLease",
    "SpecHandle",
    "Transfer",
    "as_bytes",
    "copy_into",
    "copy_out",
]

"""The core: a state machine, `Core.handle(event, now) -> [Action]`.

The law of this package: it is pure. No I/O, no clock, no threads, no sockets.
"""

from kvd.core.config import CoreConfig, TierConfig, WritePolicy
from kvd.core.core import Core, CoreFault

__all__ = ["Core", "CoreConfig", "CoreFault", "TierConfig", "WritePolicy"]

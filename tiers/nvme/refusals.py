"""What an error of the file system means to whoever asked the tier.

The law of this module: that there is no space is no failure; all else is one, told in the system's
own words.
"""

from __future__ import annotations

import errno

from kvd.tiers.backend import Refused, failed
from kvd.tiers.base import Answer, Reason

_REASONS = {
    errno.EROFS: Reason.READ_ONLY,
    errno.EACCES: Reason.DENIED,
    errno.EPERM: Reason.DENIED,
    errno.ENOENT: Reason.NOT_FOUND,
    errno.EIO: Reason.IO,
    errno.ESTALE: Reason.SHORT,
}


def refusal(error: OSError) -> Refused:
    what = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Refused(Answer.NO_SPACE, Reason.SPACE, what)
    reason = _REASONS.get(error.errno or 0, Reason.OTHER)
    return failed(reason, what, permanent=reason is Reason.READ_ONLY)

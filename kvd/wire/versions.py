"""Which versions of the protocol may talk to each other.

The law of this module: the same major talks, whatever the minor; another major is refused with
both versions named. A minor only adds: operations, features, and trailing fields of a body, which
an older peer ignores. Nothing is done with a message of a refused peer.
"""

from __future__ import annotations

from kvd.errors import VersionError

MAJOR = 1
# 1: a lookup says in which tier its hits lie; operation `tier`. 2: `hint`. 3: `prefetch`.
# 4: `tenant`, the namespace `public`, the error `busy`
MINOR = 4

# What this code can do beyond the bare protocol; both sides use the intersection.
FEATURES: tuple[str, ...] = (
    "hints", "inline", "lookup-load", "lookup-reserve", "prefetch", "public", "tenants", "tiers",
    "trace",
)  # fmt: skip

MAX_FEATURES = 64
MAX_FEATURE_BYTES = 64


def check_version(major: int, minor: int, *, peer: str = "the peer") -> bool:
    """True if the peer's minor is newer than ours (so that unknown trailing fields are ignored).

    VersionError, naming both versions, on another major.
    """
    if major != MAJOR:
        raise VersionError(
            f"{peer} speaks version {major}.{minor} of the kvd protocol, this side speaks "
            f"{MAJOR}.{MINOR}: only equal majors can talk; install the same kvd on both sides"
        )
    return minor > MINOR


def common_features(theirs: tuple[str, ...]) -> tuple[str, ...]:
    """Features that both sides have, in our order."""
    return tuple(name for name in FEATURES if name in theirs)

"""Redis: a small remote tier, and a directory that several daemons share.

The law of this package: Redis may be away, full, flushed or replaced at any moment, and none of
that is ever a wrong hit. What it says is a hint (the directory) or is verified (the tier).
"""

from kvd.tiers.redis.backend import RedisBackend
from kvd.tiers.redis.config import RedisConfig
from kvd.tiers.redis.directory import Directory, Entry

__all__ = ["Directory", "Entry", "RedisBackend", "RedisConfig"]

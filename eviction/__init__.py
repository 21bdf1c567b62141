"""Eviction policies: which chunk is worth least.

The law of this package: it is pure, knows no engine and no store, and a policy is chosen by name.
"""

from kvd.eviction.base import Policy
from kvd.eviction.registry import POLICIES, factory, make

make_policy = make

__all__ = ["POLICIES", "Policy", "factory", "make", "make_policy"]

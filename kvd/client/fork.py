"""What happens to clients when their process forks.

The law of this module: the parent is undisturbed, and the child inherits nothing that works: its
copies of the descriptors are closed, so that the daemon sees the parent's end when it comes, and
every method raises Forked. The channels' locks are taken around the fork, so that no child gets
one in the middle of a change.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref

from kvd.client.channel import Channel
from kvd.client.lock import SessionLock

_channels: weakref.WeakSet[Channel] = weakref.WeakSet()
_guard = threading.Lock()
_held: list[Channel] = []
# A lock is only ever held for microseconds; a fork from a signal handler of the thread that
# holds one must not wait for itself for ever.
_PATIENCE_S = 1.0


def watch(channel: Channel) -> None:
    """Look after this channel at every fork from now on."""
    with _guard:
        _channels.add(channel)


def _before() -> None:
    _guard.acquire(timeout=_PATIENCE_S)
    for channel in sorted(_channels, key=id):
        if channel.lock.acquire(timeout=_PATIENCE_S):
            _held.append(channel)


def _after_in_parent() -> None:
    for channel in _held:
        channel.lock.release()
    _held.clear()
    _free_guard()


def _after_in_child() -> None:
    for channel in list(_channels):
        channel.leave_in_child()
    SessionLock.drop_all_in_child()
    _held.clear()
    _channels.clear()
    _free_guard()


def _free_guard() -> None:
    if _guard.locked():
        _guard.release()


def _at_exit() -> None:
    """Clients that nobody closed end before the interpreter takes their modules apart."""
    for channel in list(_channels):
        if is_ours(channel):
            channel.close()


os.register_at_fork(
    before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child
)


atexit.register(_at_exit)


def is_ours(channel: Channel) -> bool:
    """Whether this process made the channel."""
    return channel.pid == os.getpid()

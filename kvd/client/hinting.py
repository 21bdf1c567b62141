"""What an engine says of the future of its keys.

The law of this module: a hint costs nothing when it is wrong and may be dropped; a daemon that is
away, or does not know hints, is a typed error like any other, and no harm is done by passing it
over.
"""

from __future__ import annotations

from kvd.chunk import Kind
from kvd.client.base import ClientBase, SpecLike
from kvd.client.durations import span_ns
from kvd.client.keys import Hashes, pack_hashes, whole
from kvd.wire import HintKind
from kvd.wire import messages as m


class Hinting(ClientBase):
    """session_end, expect_reuse, pin, priority. `hashes`: keys of one chain, from its root on."""

    def session_end(
        self,
        spec: SpecLike,
        hashes: Hashes,
        *,
        kind: Kind = Kind.PREFIX,
        timeout_s: float | None = None,
    ) -> m.HintReply:
        """The session of these keys is over: what it shares with no other goes first, when room is
        needed and nobody has come back to it for a while. A use takes that back."""
        return self._hint(spec, hashes, kind, HintKind.SESSION_END, 0, 0.0, timeout_s)

    def expect_reuse(
        self,
        spec: SpecLike,
        hashes: Hashes,
        in_s: float,
        *,
        kind: Kind = Kind.PREFIX,
        timeout_s: float | None = None,
    ) -> m.HintReply:
        """These keys will be asked for again in about `in_s` seconds (a tool is at work, a user
        types): until then, and a quarter longer, they go only when nothing else can."""
        return self._hint(spec, hashes, kind, HintKind.EXPECT_REUSE, 0, in_s, timeout_s)

    def pin(
        self,
        spec: SpecLike,
        hashes: Hashes,
        ttl_s: float,
        *,
        kind: Kind = Kind.PREFIX,
        timeout_s: float | None = None,
    ) -> m.HintReply:
        """These keys are no victims for `ttl_s` seconds (the daemon's limits.pin_max_s at most); 0
        ends that. `over` of the reply: so many were not pinned, for the tenant's share
        (limits.pin_share) is used up."""
        return self._hint(spec, hashes, kind, HintKind.PIN, 0, ttl_s, timeout_s)

    def priority(
        self,
        spec: SpecLike,
        hashes: Hashes,
        level: int,
        *,
        within_s: float = 0.0,
        kind: Kind = Kind.PREFIX,
        timeout_s: float | None = None,
    ) -> m.HintReply:
        """0: these keys go first; 1: like others; 2: only when nothing else can, for `within_s`
        seconds (0: limits.pin_max_s), within the same share as pins."""
        return self._hint(spec, hashes, kind, HintKind.PRIORITY, level, within_s, timeout_s)

    def _hint(
        self,
        spec: SpecLike,
        hashes: Hashes,
        kind: Kind,
        hint: HintKind,
        level: int,
        within_s: float,
        timeout_s: float | None,
    ) -> m.HintReply:
        message = m.Hint(
            self._digest(spec, timeout_s),
            whole(kind, "kind"),
            pack_hashes(hashes),
            int(hint),
            whole(level, "level"),
            span_ns(within_s, "seconds of a hint"),
        )
        return self._ask(message, m.HintReply, timeout_s)

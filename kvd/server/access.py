"""Who may speak to the daemon, in which namespace, and with which role.

The law of this module: a namespace comes from what the kernel or CURVE says about the peer, or from
a secret that only its members can read; never from a field that a client fills in. A token that is
offered must hold: a wrong one is a refusal, not a fall-back to the uid.
"""

from __future__ import annotations

import hmac
import os
import stat
from collections.abc import Iterable
from typing import NamedTuple

from kvd.errors import AuthError, ConfigError
from kvd.server.settings import NamespaceRule
from kvd.wire.limits import TOKEN_BYTES

__all__ = ["DEFAULT_NAMESPACE", "Access", "Grant", "Peer"]

DEFAULT_NAMESPACE = "default"
TOKEN_MIN = 16
TOKEN_MAX = TOKEN_BYTES


class Peer(NamedTuple):
    """What the kernel says about the process at the other end."""

    pid: int  # 0: it lives in a pid namespace that we can't see
    uid: int
    gids: tuple[int, ...]  # primary and supplementary


class Grant(NamedTuple):
    namespace: str
    admin: bool


class Access:
    """The rules, with the token files read once at start."""

    def __init__(
        self, rules: Iterable[NamespaceRule], admin_uids: Iterable[int], admin_gid: int | None
    ) -> None:
        self._rules = tuple(rules)
        self._tokens = [
            (rule.name, _read_token(rule.token_file)) for rule in self._rules if rule.token_file
        ]
        self._admin_uids = frozenset({os.getuid(), 0, *admin_uids})
        self._admin_gid = admin_gid

    @property
    def namespaces(self) -> list[str]:
        """All that a session can be bound to by this configuration."""
        return list(dict.fromkeys([DEFAULT_NAMESPACE, *(rule.name for rule in self._rules)]))

    def grant(self, peer: Peer, token: bytes | None) -> Grant:
        """The namespace and role of a peer. AuthError names what would let it in."""
        admin = peer.uid in self._admin_uids or self._admin_gid in peer.gids
        if token is not None:
            return Grant(self.by_token(token), admin)
        for rule in self._rules:
            if peer.uid in rule.uids:
                return Grant(rule.name, admin)
        for rule in self._rules:
            if not set(peer.gids).isdisjoint(rule.gids):
                return Grant(rule.name, admin)
        if peer.uid in (os.getuid(), 0):
            return Grant(DEFAULT_NAMESPACE, admin)
        raise AuthError(
            f"uid {peer.uid} belongs to no namespace; add it to a [[namespaces]] entry's uids or "
            "gids, or offer a token"
        )

    def by_token(self, token: bytes) -> str:
        """The namespace whose members hold this token. AuthError if there is none."""
        token = token.strip()
        # every token is compared, so that time tells nothing about which ones exist
        names = [name for name, held in self._tokens if hmac.compare_digest(held, token)]
        if not names:
            raise AuthError("the token belongs to no namespace; see [[namespaces]] token_file")
        return names[0]


def _read_token(path: str) -> bytes:
    try:
        with open(path, "rb") as stream:
            mode = os.fstat(stream.fileno()).st_mode
            token = stream.read(TOKEN_MAX + 1).strip() if stat.S_ISREG(mode) else b""
    except OSError as error:
        raise ConfigError(f"namespaces: token_file {path}: {error.strerror}") from None
    if not TOKEN_MIN <= len(token) <= TOKEN_MAX:
        raise ConfigError(
            f"namespaces: token_file {path}: {len(token)} bytes; a token is a file of {TOKEN_MIN} "
            f"to {TOKEN_MAX} bytes: head -c 32 /dev/urandom | base64 > {path}"
        )
    if mode & 0o007:
        raise ConfigError(f"namespaces: token_file {path}: open to all users; chmod o= {path}")
    return token

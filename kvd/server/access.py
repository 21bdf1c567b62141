"""Who may speak to the daemon, in which namespace, and with which role.

The law of this module: a namespace comes from what the kernel or CURVE says about the peer, or from
a secret that only its members can read; never from a field that a client fills in. A token that is
offered must hold: a wrong one is a refusal, not a fall-back to the uid. What would let one peer
into two namespaces is refused before it holds: nobody could tell which one it gets.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Iterable
from typing import NamedTuple

from kvd.core.shares import PUBLIC
from kvd.errors import AuthError, ConfigError
from kvd.server.files import open_file
from kvd.server.settings import NamespaceRule
from kvd.server.tenantrules import Tenant
from kvd.server.tenants import token_digest
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
    """The rules, with the token files read once at start; and those of tenants, which may change:
    see `set_tenants`. A tenant's file is read when the tenant is let in."""

    def __init__(
        self,
        rules: Iterable[NamespaceRule],
        admin_uids: Iterable[int],
        admin_gid: int | None,
        tenants: Iterable[Tenant] = (),
        public_writers: Iterable[str] = (),
    ) -> None:
        self._rules = tuple(rules)
        self._tokens = [
            (rule.name, _read_token(rule.token_file)) for rule in self._rules if rule.token_file
        ]
        self._writers = frozenset(public_writers)
        # Tenants' token files as they were when their tenants were let in, and as they were when it
        # was asked last whether others could be.
        self._files: dict[str, bytes] = {}
        self._offered: dict[str, bytes] = {}
        self._tenants: tuple[Tenant, ...] = ()
        self.set_tenants(tenants)
        self._admin_uids = frozenset({os.getuid(), 0, *admin_uids})
        self._admin_gid = admin_gid

    @property
    def namespaces(self) -> list[str]:
        """All that a session can be bound to by this configuration."""
        tenants = (tenant.name for tenant in self._tenants)
        return list(
            dict.fromkeys([DEFAULT_NAMESPACE, *(rule.name for rule in self._rules), *tenants])
        )

    def set_tenants(self, tenants: Iterable[Tenant]) -> None:
        """These are all tenants from now on. ConfigError, and they are not, for a token file that
        can't be used, and for a member of two namespaces; neither after `check` of the same."""
        tenants = tuple(tenants)
        self._files = self._checked(tenants)
        self._offered = {}
        self._tenants = tenants

    def check(self, tenants: Iterable[Tenant]) -> None:
        """Whether these could be all tenants. ConfigError as for `set_tenants`: what is in a file
        by the next time counts then."""
        self._offered = {}
        self._offered = self._checked(tuple(tenants))

    def _checked(self, tenants: tuple[Tenant, ...]) -> dict[str, bytes]:
        """The token files of these. ConfigError."""
        files: dict[str, bytes] = {}
        for tenant in tenants:
            path = tenant.token_file
            if path is not None:
                known = self._files.get(path) or self._offered.get(path)
                files[path] = known or _read_token(path)
        members = _Members()
        for name, token in self._tokens:
            members.add("token", token_digest(token), name)
        rules: list[NamespaceRule | Tenant] = [*self._rules, *tenants]
        for rule in rules:
            for what, ids in (("uid", rule.uids), ("gid", rule.gids)):
                for one in ids:
                    members.add(what, str(one), rule.name)
        for tenant in tenants:
            for key in tenant.curve_keys:
                members.add("CURVE key", key, tenant.name)
            held = files.get(tenant.token_file or "")
            own = () if held is None else (token_digest(held),)
            for digest in (*own, *tenant.token_sha256):
                members.add("token", digest, tenant.name)
        return files

    def grant(self, peer: Peer, token: bytes | None, wanted: str | None = None) -> Grant:
        """The namespace and role of a peer. `wanted`: `public`, for who may write there. AuthError
        names what would let it in."""
        admin = peer.uid in self._admin_uids or self._admin_gid in peer.gids
        own = self.by_token(token) if token is not None else self._by_peer(peer)
        return Grant(self.choose(own, wanted, admin=admin), admin)

    def choose(self, own: str, wanted: str | None, *, admin: bool) -> str:
        """The namespace that a member of `own` gets who wants another. AuthError."""
        if wanted is None or wanted == own:
            return own
        writes = own in self._writers or any(
            tenant.public_writer for tenant in self._tenants if tenant.name == own
        )
        if wanted == PUBLIC and (writes or admin):
            return PUBLIC
        raise AuthError(
            "no session in another namespace than one's own, but for `public`: that is open to "
            "admins and to tenancy.public_writers"
        )

    def _by_peer(self, peer: Peer) -> str:
        members: list[NamespaceRule | Tenant] = [*self._rules, *self._tenants]
        for rule in members:
            if peer.uid in rule.uids:
                return rule.name
        for rule in members:
            if not set(peer.gids).isdisjoint(rule.gids):
                return rule.name
        if peer.uid in (os.getuid(), 0):
            return DEFAULT_NAMESPACE
        raise AuthError(
            f"uid {peer.uid} belongs to no namespace; add it to a tenant's uids or gids "
            "(docs/tenants.md), or offer a token"
        )

    def by_token(self, token: bytes) -> str:
        """The namespace whose members hold this token. AuthError if there is none."""
        token = token.strip()
        # every token is compared, so that time tells nothing about which ones exist
        names = [name for name, held in self._tokens if hmac.compare_digest(held, token)]
        digest = token_digest(token)
        for tenant in self._tenants:
            held = self._files.get(tenant.token_file or "")
            if held is not None and hmac.compare_digest(held, token):
                names.append(tenant.name)
            for known in tenant.token_sha256:
                if hmac.compare_digest(known, digest):
                    names.append(tenant.name)
        if not names:
            raise AuthError("the token belongs to no namespace; ask for a new one")
        return names[0]


class _Members:
    """Who belongs where. A secret is told apart by its digest, and not shown."""

    def __init__(self) -> None:
        self._of: dict[tuple[str, str], str] = {}

    def add(self, what: str, value: str, name: str) -> None:
        """ConfigError if it belongs to another namespace."""
        other = self._of.setdefault((what, value), name)
        if other != name:
            shown = "one token" if what == "token" else f"{what} {value}"
            raise ConfigError(
                f"{shown} belongs to two namespaces, {other!r} and {name!r}: nobody could tell "
                "which one it lets in to; take it from one of them (tenants that were added "
                "stand in tenancy.state_file)"
            )


def _read_token(path: str) -> bytes:
    try:
        with open_file(path) as stream:
            mode = os.fstat(stream.fileno()).st_mode
            token = stream.read(TOKEN_MAX + 1).strip()
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

"""Tenants while the daemon runs: what an operator asks for is kept first, then it holds everywhere.

The law of this module: whoever lets somebody in, shares out room or bounds requests learns of a
change before the operator is told that it is done. A session learns of its own tenant only.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from kvd.core import Core
from kvd.core import events as ev
from kvd.core.shares import TierShare
from kvd.errors import AuthError, BadKey, ConfigError
from kvd.server.access import Access, Grant
from kvd.server.config import Config
from kvd.server.sessions import Session, Sessions
from kvd.server.tcp import TcpEndpoint
from kvd.server.tenantrules import Tenant, shown_tenant
from kvd.server.tenants import Registry, curve_clients, state_path
from kvd.wire import messages as m

__all__ = ["Tenancy", "open_access", "open_registry"]

_LOOKS = ("list", "show")
_PAGE = 32  # tenants in one reply: a row takes some 50 us of the loop's time


def open_registry(config: Config) -> Registry:
    """All tenants that are known at start. ConfigError if the state file does not hold."""
    path = state_path(config.tenants_file, config.file, os.environ, config.instance)
    return Registry(config.tenants, path)


def open_access(config: Config, registry: Registry) -> Access:
    """Who is let in. ConfigError for a token file that can't be used."""
    return Access(
        config.namespaces,
        config.admin_uids,
        config.admin_gid,
        registry.tenants(),
        config.public_writers,
    )


class TenancyHost(Protocol):
    """The server."""

    sessions: Sessions

    def feed(self, event: Any) -> None:
        """Give the core an event."""

    def end(self, session: Session, why: str) -> None: ...


class Tenancy:
    """`host` is set before the first request."""

    host: TenancyHost

    def __init__(
        self,
        registry: Registry,
        access: Access,
        tcp: TcpEndpoint | None,
        weigh: Callable[[str, Mapping[str, TierShare]], None],
    ) -> None:
        """`weigh(name, shares)`: the tiers below share their bandwidth by these weights."""
        self._registry = registry
        self._access = access
        self._tcp = tcp
        self._weigh = weigh
        self._asking: Session | None = None
        registry.check = self._check
        registry.changed = self._changed
        for tenant in registry.tenants():
            weigh(tenant.name, tenant.rules.tiers)
        self._let_in()

    def _check(self, tenants: list[Tenant]) -> None:
        """Before these are kept: a token file that can't be read, or a member of two namespaces,
        would stop the next start."""
        try:
            self._access.check(tenants)
            curve_clients(tenants, None if self._tcp is None else self._tcp.clients)
        except ConfigError as error:
            raise BadKey(str(error)) from None

    def _let_in(self) -> None:
        tenants = self._registry.tenants()
        self._access.set_tenants(tenants)
        if self._tcp is not None:
            self._tcp.added = curve_clients(tenants, self._tcp.clients)

    def _changed(self, name: str, tenant: Tenant | None) -> None:
        self._let_in()
        self.host.feed(ev.SetTenant(name, None if tenant is None else tenant.rules))
        self._weigh(name, {} if tenant is None else tenant.rules.tiers)
        if tenant is None:
            for session in self.host.sessions.all():
                if session.grant.namespace == name and session is not self._asking:
                    self.host.end(session, "removed")

    def carry_out(self, message: m.Tenant, session: Session, core: Core) -> m.TenantReply:
        """One command. AuthError, BadKey; InternalError if it could not be kept. Who removes the
        own tenant keeps this session: it has still to be told."""
        self._asking, grant = session, session.grant
        try:
            return self._carry_out(message, grant, core)
        finally:
            self._asking = None

    def _carry_out(self, message: m.Tenant, grant: Grant, core: Core) -> m.TenantReply:
        if message.command not in _LOOKS and not grant.admin:
            raise AuthError(f"tenant {message.command} needs the admin role")
        token = None if message.command in _LOOKS else self._change(message)
        known = core.tenants if grant.admin else [grant.namespace]
        if message.command == "list":
            after = str(message.settings.get("after", ""))
            names = [name for name in self._names(grant, known) if name > after][:_PAGE]
        elif message.command == "show":
            names = [message.name or grant.namespace]
            if not grant.admin and names[0] != grant.namespace:
                raise AuthError("a session is told about its own tenant only; others: admin role")
            if names[0] not in self._names(grant, known):
                raise BadKey(f"tenant {names[0]!r} is unknown: see `kvd-cli tenant list`")
        else:
            names = [message.name]
        return m.TenantReply(self._rows(names, known, grant, core), token)

    def _change(self, message: m.Tenant) -> str | None:
        registry, given = self._registry, dict(message.settings)
        flag = {"add": "token", "rotate": "keep"}.get(message.command)
        wanted = bool(given.pop(flag, False)) if flag is not None else False
        if message.command == "add":
            return registry.add(message.name, given, token=wanted)
        if message.command == "set":
            registry.set(message.name, given)
            return None
        if given:
            raise BadKey(f"{message.command} takes no settings, {next(iter(given))!r} came")
        if message.command == "rotate":
            return registry.rotate(message.name, keep=wanted)
        registry.remove(message.name)
        return None

    def _names(self, grant: Grant, known: list[str]) -> list[str]:
        if not grant.admin:
            return known
        return sorted({*known, *(told.tenant.name for told in self._registry.all())})

    def _rows(
        self, names: list[str], known: list[str], grant: Grant, core: Core
    ) -> list[dict[str, Any]]:
        used = set(known)
        told = core.tenant_rows([name for name in names if name in used], own=not grant.admin)
        sessions = Counter(session.grant.namespace for session in self.host.sessions.all())
        return [self._row(name, told.get(name, {}), sessions[name]) for name in names]

    def _row(self, name: str, told: dict[str, Any], sessions: int) -> dict[str, Any]:
        found = self._registry.find(name)
        origin = "seen" if found is None else "config" if found.configured else "added"
        tenant = self._registry.get(name)
        return {
            "name": name,
            "origin": origin,
            "settings": shown_tenant(tenant),
            "tokens": len(tenant.token_sha256) + (tenant.token_file is not None),
            "sessions": sessions,
            **told,
        }

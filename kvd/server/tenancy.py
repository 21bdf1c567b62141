"""Tenants while the daemon runs: what an operator asks for is kept first, then it holds everywhere.

The law of this module: whoever lets somebody in, shares out room or bounds requests learns of a
change before the operator is told that it is done. A session learns of its own tenant only.
"""

from __future__ import annotations

import os
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
_PAGE = 64  # tenants in one reply


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
        registry.changed = self._changed
        for tenant in registry.tenants():
            weigh(tenant.name, tenant.rules.tiers)
        self._let_in()

    def _let_in(self) -> None:
        tenants = self._registry.tenants()
        try:
            self._access.set_tenants(tenants)
        except ConfigError as error:
            raise BadKey(str(error)) from None
        if self._tcp is not None:
            self._tcp.added = curve_clients(tenants)

    def _changed(self, name: str, tenant: Tenant | None) -> None:
        self._let_in()
        self.host.feed(ev.SetTenant(name, None if tenant is None else tenant.rules))
        self._weigh(name, {} if tenant is None else tenant.rules.tiers)
        if tenant is None:
            for session in self.host.sessions.all():
                if session.grant.namespace == name:
                    self.host.end(session, "removed")

    def carry_out(self, message: m.Tenant, grant: Grant, core: Core) -> m.TenantReply:
        """One command. AuthError, BadKey; InternalError if it could not be kept."""
        if message.command not in _LOOKS and not grant.admin:
            raise AuthError(f"tenant {message.command} needs the admin role")
        stat = core.stat(None if grant.admin else grant.namespace)["tenants"]
        if message.command == "list":
            after = message.settings.get("after", "")
            names = [name for name in self._names(grant, stat) if name > str(after)]
            return m.TenantReply([self._row(name, stat) for name in names[:_PAGE]], None)
        if message.command == "show":
            name = message.name or grant.namespace
            if not grant.admin and name != grant.namespace:
                raise AuthError("a session is told about its own tenant only; others: admin role")
            if name not in self._names(grant, stat):
                raise BadKey(f"tenant {name!r} is unknown: see `kvd-cli tenant list`")
            return m.TenantReply([self._row(name, stat)], None)
        token = self._change(message)
        stat = core.stat(None)["tenants"]
        return m.TenantReply([self._row(message.name, stat)], token)

    def _change(self, message: m.Tenant) -> str | None:
        registry, given = self._registry, dict(message.settings)
        flags = {key: bool(given.pop(key, False)) for key in ("token", "keep")}
        if message.command == "add":
            return registry.add(message.name, given, token=flags["token"])
        if message.command == "set":
            registry.set(message.name, given)
            return None
        if given:
            raise BadKey(f"{message.command} takes no settings, {next(iter(given))!r} came")
        if message.command == "rotate":
            return registry.rotate(message.name, keep=flags["keep"])
        registry.remove(message.name)
        return None

    def _names(self, grant: Grant, stat: dict[str, Any]) -> list[str]:
        if not grant.admin:
            return [grant.namespace]
        return sorted({*stat, *(told.tenant.name for told in self._registry.all())})

    def _row(self, name: str, stat: dict[str, Any]) -> dict[str, Any]:
        found = self._registry.find(name)
        origin = "seen" if found is None else "config" if found.configured else "added"
        tenant = self._registry.get(name)
        return {
            "name": name,
            "origin": origin,
            "settings": shown_tenant(tenant),
            "tokens": len(tenant.token_sha256) + (tenant.token_file is not None),
            "sessions": sum(s.grant.namespace == name for s in self.host.sessions.all()),
            **stat.get(name, {}),
        }

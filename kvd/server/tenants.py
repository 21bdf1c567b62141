"""The tenants of a daemon: those of its configuration, and those that were added while it ran.

The law of this module: what the configuration says is shown and never changed here. All else
stands in a state file of its own, which is replaced as a whole or not at all, before anybody is
told that it has changed. A token is told once and kept as its SHA-256 only. Two tenants never share
a uid or a key.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import logging
import os
import secrets
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from zmq.utils import z85

from kvd.errors import BadKey, ConfigError, InternalError
from kvd.server.files import open_file
from kvd.server.tenantrules import Tenant, check_keys, parse_tenant, raw_key, shown_tenant

__all__ = ["Registry", "state_path", "token_digest"]

log = logging.getLogger(__name__)

VERSION = 1
MAX_TENANTS = 4096
MAX_BYTES = 16 << 20
TOKEN_BYTES = 32


class Told(NamedTuple):
    """A tenant, and where it stands."""

    tenant: Tenant
    configured: bool


def token_digest(token: bytes) -> str:
    """What is kept of a token. It has 256 random bits, so that a fast hash does."""
    return hashlib.sha256(token.strip()).hexdigest()


def state_path(
    told: str | None, config_file: str | None, environ: Mapping[str, str], instance: str
) -> str:
    """Where the state file stands: as told; where the service manager keeps state; beside the
    configuration file; or, without one, in the user's place for state. Each instance has its own:
    two that replace one file lose each other's tenants, and let them in."""
    if told is not None:
        return told
    name = "tenants.json" if instance == "default" else f"tenants-{instance}.json"
    directory = environ.get("STATE_DIRECTORY", "").split(":")[0]
    if directory:
        return os.path.join(directory, name)
    if config_file is not None:
        return f"{os.path.abspath(config_file)}.{name}"
    home = environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return os.path.join(home, "kvd", name)


class Registry:
    """`check(tenants)` is asked before these are kept, and raises BadKey if nobody could go by
    them; `changed(name, tenant)` is called for each tenant that is new, other, or gone (None)."""

    def __init__(self, configured: Iterable[Tenant], path: str) -> None:
        self.path = path
        self._configured = {tenant.name: tenant for tenant in configured}
        self._added: dict[str, Tenant] = {}
        self.check: Callable[[list[Tenant]], None] = lambda tenants: None
        self.changed: Callable[[str, Tenant | None], None] = lambda name, tenant: None
        self._load()

    # -- looking --------------------------------------------------------------------------------

    def all(self) -> list[Told]:
        """Configured ones first, each in the order in which they came."""
        return [
            *(Told(tenant, True) for tenant in self._configured.values()),
            *(Told(tenant, False) for tenant in self._added.values()),
        ]

    def tenants(self) -> list[Tenant]:
        return [told.tenant for told in self.all()]

    def find(self, name: str) -> Told | None:
        if name in self._configured:
            return Told(self._configured[name], True)
        tenant = self._added.get(name)
        return None if tenant is None else Told(tenant, False)

    def get(self, name: str) -> Tenant:
        """The tenant; one without rules if nobody wrote any."""
        found = self.find(name)
        return Tenant(name) if found is None else found.tenant

    # -- changing -------------------------------------------------------------------------------

    def add(self, name: str, given: Mapping[str, Any], *, token: bool) -> str | None:
        """A new tenant; its token, if one was asked for. BadKey."""
        if self.find(name) is not None:
            raise BadKey(f"tenant {name!r} is there already: see `kvd-cli tenant show`")
        if len(self._added) >= MAX_TENANTS:
            raise BadKey(f"{MAX_TENANTS} tenants were added, no more fit: remove some")
        made, digest = _new_token() if token else (None, None)
        tenant = self._parsed(name, given)
        if digest is not None:
            tenant = tenant._replace(token_sha256=(digest,))
        self._put(tenant)
        return made

    def set(self, name: str, given: Mapping[str, Any]) -> None:
        """Change what is given, and leave the rest. A value of None takes a key back. BadKey."""
        tenant = self._own(name)
        try:
            check_keys(name, given)  # one that is taken back is seen by no parser
        except ValueError as refused:
            raise BadKey(str(refused)) from None
        merged = shown_tenant(tenant)
        for key, value in given.items():
            if value is None:
                merged.pop(key, None)
            elif isinstance(value, Mapping) and isinstance(merged.get(key), dict):
                inner = {**merged[key], **value}
                merged[key] = {k: v for k, v in inner.items() if v is not None}
            elif isinstance(value, Mapping):
                merged[key] = {k: v for k, v in value.items() if v is not None}
            else:
                merged[key] = value
        changed = self._parsed(name, merged)._replace(token_sha256=tenant.token_sha256)
        self._put(changed)

    def rotate(self, name: str, *, keep: bool) -> str:
        """A new token; `keep`: the one before holds until the next rotation. BadKey."""
        tenant = self._own(name)
        made, digest = _new_token()
        before = tenant.token_sha256[-1:] if keep else ()
        self._put(tenant._replace(token_sha256=(*before, digest)))
        return made

    def remove(self, name: str) -> None:
        """Nobody is let in as this tenant any more. BadKey."""
        self._own(name)
        left = {key: tenant for key, tenant in self._added.items() if key != name}
        self._store(left)
        self._added = left
        self.changed(name, None)

    def _own(self, name: str) -> Tenant:
        found = self.find(name)
        if found is None:
            raise BadKey(f"tenant {name!r} is unknown: see `kvd-cli tenant list`")
        if found.configured:
            raise BadKey(
                f"tenant {name!r} stands in the configuration file: change it there, and restart"
            )
        return found.tenant

    def _parsed(self, name: str, given: Mapping[str, Any]) -> Tenant:
        try:
            return parse_tenant(name, given)
        except ValueError as refused:
            raise BadKey(str(refused)) from None

    def _put(self, tenant: Tenant) -> None:
        self._check_distinct(tenant)
        changed = {**self._added, tenant.name: tenant}
        self.check([*self._configured.values(), *changed.values()])
        self._store(changed)
        self._added = changed
        self.changed(tenant.name, tenant)

    def _check_distinct(self, tenant: Tenant) -> None:
        for other in self.tenants():
            if other.name == tenant.name:
                continue
            for what in ("uids", "curve_keys"):
                shared = set(getattr(other, what)) & set(getattr(tenant, what))
                if shared:
                    raise BadKey(f"{what}: {next(iter(shared))} belongs to another tenant already")

    # -- the state file -------------------------------------------------------------------------

    def _load(self) -> None:
        try:
            with open_file(self.path) as stream:
                data = stream.read(MAX_BYTES + 1)
        except FileNotFoundError:
            return
        except OSError as error:
            raise ConfigError(
                f"tenancy.state_file {self.path}: {error.strerror}; let the daemon's user read it"
            ) from None
        try:
            document = json.loads(data)
            if not isinstance(document, dict) or document.get("version") != VERSION:
                raise ValueError(f"not a file of version {VERSION}")
            for name, given in document["tenants"].items():
                if name not in self._configured:  # the configuration has the last word
                    self._added[name] = parse_tenant(name, given, stored=True)
        except (ValueError, KeyError, AttributeError, RecursionError) as error:
            raise ConfigError(
                f"tenancy.state_file {self.path}: does not hold ({error}); restore it from a copy, "
                "or move it away and add the tenants again"
            ) from None

    def _store(self, tenants: Mapping[str, Tenant]) -> None:
        """Replace the file, durably. InternalError, and the old one stays, if that can't be."""
        document = {
            "version": VERSION,
            "tenants": {name: shown_tenant(t, secrets=True) for name, t in tenants.items()},
        }
        data = json.dumps(document, indent=1, ensure_ascii=True).encode()
        draft = f"{self.path}.{os.getpid()}.new"
        try:
            os.makedirs(os.path.dirname(self.path), 0o700, exist_ok=True)
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(draft, self.path)
            directory = os.open(os.path.dirname(self.path), os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(draft)
            log.error("tenancy.state_file %s: %s", self.path, error)
            raise InternalError(
                f"nothing was changed: the daemon can't write {self.path}: {error.strerror}; "
                "set tenancy.state_file to a place that it can"
            ) from None


def _new_token() -> tuple[str, str]:
    token = base64.urlsafe_b64encode(secrets.token_bytes(TOKEN_BYTES)).rstrip(b"=")
    return token.decode(), token_digest(token)


def curve_clients(
    tenants: Iterable[Tenant], listed: Mapping[bytes, str] | None = None
) -> dict[bytes, str]:
    """Public key (raw) -> namespace. ConfigError if one is another's in tcp.clients_file, of which
    `listed` are the lines."""
    found = {raw_key(key): tenant.name for tenant in tenants for key in tenant.curve_keys}
    for raw, name in found.items():
        other = (listed or {}).get(raw, name)
        if other != name:
            raise ConfigError(
                f"CURVE key {z85.encode(raw).decode()} belongs to two namespaces, {other!r} in "
                f"tcp.clients_file and {name!r}: take it from one of them"
            )
    return found

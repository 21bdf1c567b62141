"""From an arena to a core: what an earlier life left behind is taken over.

The law of this module: a record is believed only when it holds and its spec and namespace are known
by name; what can't be believed is free again. Sessions of the earlier life whose lock is still held
may still be copying: their slots stay out of use until the lock is free.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvd.arena import MEMORY_KINDS, ArenaOwner, file_system_kind
from kvd.chunk import KVSpec
from kvd.core import Core, CoreConfig, TierConfig
from kvd.errors import ArenaError, ConfigError, SpecError
from kvd.eviction import Policy, factory
from kvd.server.config import Config
from kvd.server.counters import Counters
from kvd.server.remembering import read_memory
from kvd.server.tenantrules import Tenant

__all__ = ["Opened", "SpecRegistry", "check_arena_path", "open_core", "policy_of"]

log = logging.getLogger(__name__)

NS = 1_000_000_000
_DRAM = "dram"


class SpecRegistry:
    """Names and encoded specs as they stand in the table file, so that a later life knows them."""

    def __init__(self, arena: ArenaOwner, core: Core, counters: Counters) -> None:
        self._arena = arena
        self._core = core
        self._counters = counters
        self._version = -1

    def store(self) -> None:
        """Keep what the core knows, if that has grown. Called before a client is told that its
        spec is registered. What can't be kept costs hits after a restart, and refuses nothing: it
        is tried again with the next spec."""
        core = self._core
        if core.registry_version == self._version:
            return
        try:
            dropped = self._arena.registry_store(
                core.namespaces, [spec.encode() for spec in core.specs]
            )
        except ArenaError as error:
            log.warning("a restart may not know the specs of now: %s", error)
            self._counters.add("registry_failures")
            return
        if dropped:
            log.warning("registry is full: the %d oldest will not be adopted by a restart", dropped)
        self._version = core.registry_version


class Opened(NamedTuple):
    core: Core
    actions: list[Any]  # to be carried out before anything else
    registry: SpecRegistry
    locked: list[bytes]  # public ids of earlier sessions that still hold their lock
    records: int  # that held
    invalid: int  # that did not
    took_s: float


def check_arena_path(config: Config) -> None:
    """ConfigError unless the arena's directory is shared memory, or may be anything."""
    if not Path(config.arena_path).is_dir():
        raise ConfigError(f"arena.path: {config.arena_path} is not a directory; make it")
    kind = file_system_kind(config.arena_path)
    if config.arena_any_fs or kind in MEMORY_KINDS:
        return
    raise ConfigError(
        f"arena.path: {config.arena_path} is on {kind}, not in memory; choose a directory on a "
        f"tmpfs such as /dev/shm (or set arena.any_file_system = true for a slow, worn disk)"
    )


def policy_of(config: Config) -> Callable[[], Policy]:
    """The maker of the policy that is configured, one for each tier. ConfigError if there is none
    of that name."""
    try:
        return factory(config.eviction_policy, importlib.import_module)
    except ConfigError as refused:
        origin = config.origins.get("eviction.policy", "default")
        raise ConfigError(
            f"eviction.policy = {config.eviction_policy!r} ({origin}): {refused}"
        ) from None


def core_config(
    config: Config,
    arena: ArenaOwner,
    tiers: Sequence[TierConfig] = (),
    tenants: Sequence[Tenant] = (),
) -> CoreConfig:
    return CoreConfig(
        instance=config.instance,
        epoch=arena.epoch,
        size=arena.size,
        slab_size=arena.slab_size,
        arena=0,
        unix_offset_ns=time.time_ns() - time.monotonic_ns(),
        seed=secrets.randbits(63),
        lease_default_ns=int(config.lease_s * NS),
        lease_max_ns=int(config.lease_max_s * NS),
        ttl_default_ns=int(config.write_s * NS),
        ttl_max_ns=int(config.write_max_s * NS),
        apart=config.tenant_metrics,
        max_specs=config.max_specs,
        write_share=config.write_share,
        lease_share=config.lease_share,
        pin_share=config.pin_share,
        pin_total_share=config.pin_total_share,
        pin_max_ns=int(config.pin_max_s * NS),
        tiers=tuple(tiers),
        high=config.watermarks[0],
        low=config.watermarks[1],
        transient_share=config.transient_share,
        room_wait_ns=int(config.room_wait_s * NS),
        isolate=config.isolation,
        tenants=tuple((tenant.name, tenant.rules) for tenant in tenants),
    )


def open_core(
    config: Config,
    arena: ArenaOwner,
    namespaces: Sequence[str],
    counters: Counters,
    tiers: Sequence[TierConfig] = (),
    tenants: Sequence[Tenant] = (),
) -> Opened:
    """A core over the arena, with what was adopted in it."""
    begun = time.monotonic()
    core = Core(core_config(config, arena, tiers, tenants), policy_of(config))
    core.ask_room(arena.reserve_records)
    core.grow(arena.reserved)
    registry = SpecRegistry(arena, core, counters)
    known = read_memory(Path(config.policy_file), config.instance)
    if known:
        tiers_known = core.recall(known, time.monotonic_ns())
        _say_known(tiers_known, adopted=arena.adopted)
    del known
    if not arena.adopted:
        return Opened(core, [], registry, [], 0, 0, 0.0)
    stored = arena.registry_load()
    locked = arena.session_locks()
    scan = arena.scan()
    actions = core.adopt(
        arena.slot_sizes(),
        scan.records,
        scan.indices,
        list(dict.fromkeys([*stored.namespaces, *namespaces])),
        _decoded(stored.specs),
        locked,
        arena.lease_horizon,
        time.monotonic_ns(),
        scan.invalid,
    )
    registry.store()
    records, invalid = len(scan.records), len(scan.invalid)
    del scan, stored
    _trim()
    opened = Opened(
        core,
        actions,
        registry,
        locked,
        records,
        invalid,
        time.monotonic() - begun,
    )
    log.info(
        "adopted the arena in %.2f s: %d records hold, %d do not, %d sessions may still write",
        opened.took_s,
        opened.records,
        opened.invalid,
        len(locked),
    )
    return opened


def _say_known(tiers: list[str], *, adopted: bool) -> None:
    """In a new arena only what was learned goes on, and what is known of evicted keys."""
    fresh = not adopted and _DRAM in tiers
    if fresh:
        tiers = [tier for tier in tiers if tier != _DRAM]
        log.info(
            "eviction keeps what it learned, and evicted keys, but has no chunks in: %s", _DRAM
        )
    if tiers or not fresh:
        log.info("eviction goes on where it was in: %s", ", ".join(tiers) or "no tier")


def _trim() -> None:
    """Give back what adoption needed for a moment: glibc keeps some 220 bytes a chunk of it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)


def _decoded(specs: Sequence[bytes]) -> list[KVSpec]:
    found = []
    for encoded in specs:
        try:
            found.append(KVSpec.decode(encoded))
        except SpecError as error:
            log.warning("a spec in the registry does not hold; its chunks go: %s", error)
    return found

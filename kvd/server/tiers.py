"""From the configuration to the tiers beside and below DRAM, in their order: hbm, nvme, redis, s3.

The law of this module: a tier is imported, and what it needs installed, only where it is
configured; what is missing is named with the extra that brings it.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvd.core import TierConfig, WritePolicy
from kvd.errors import ConfigError
from kvd.server.config import Config
from kvd.server.files import check_file
from kvd.tiers.backend import Backend
from kvd.tiers.base import Completions, Key, Tier
from kvd.tiers.breaker import BreakerConfig
from kvd.tiers.pool import PoolConfig, PooledTier

if TYPE_CHECKING:
    from kvd.server.directory import SharedDirectory
    from kvd.tiers.redis import Directory

__all__ = ["TierPlan", "check_plans", "plan_directory", "plan_tiers"]

log = logging.getLogger(__name__)

_QUIET_NS = 50_000_000  # an engine that loads from a disk goes on loading
NS = 1_000_000_000


class TierPlan(NamedTuple):
    """A tier as the core knows it, and how it is made. `make` raises ConfigError; `check` does so
    for all that it can see without asking the medium or taking anything."""

    config: TierConfig
    make: Callable[[Completions], Tier]
    cursor: Path | None = None  # where its scrub notes how far it has got; None: beside the arena
    check: Callable[[], None] = lambda: None
    owns: Callable[[Key], bool] = lambda key: False  # whether it is ours; from any thread


def plan_tiers(config: Config) -> list[TierPlan]:
    """What is configured, the nearest first. ConfigError."""
    plans = []
    if config.hbm_device:
        plans.append(_hbm(config))
    if config.nvme_path is not None:
        plans.append(_nvme(config, config.nvme_path))
    if config.redis_url:
        plans.append(_redis(config))
    if config.s3_bucket:
        plans.append(_s3(config))
    return plans


def plan_directory(config: Config, plans: list[TierPlan]) -> SharedDirectory | None:
    """The directory of the bucket, checked; None if none is configured. ConfigError."""
    directory = _directory(config)
    if directory is None:
        return None
    from kvd.server.directory import SharedDirectory

    try:
        if not directory.check():
            log.warning("directory: away for now: %s", directory.last_error)
    except ConfigError:
        directory.close()
        raise
    tier = next(n for n, plan in enumerate(plans) if plan.config.name == "s3")
    where = f"s3://{config.s3_bucket}/{config.s3_prefix.strip('/')}"
    return SharedDirectory(directory, tier, where, config.directory_wait_s, plans[tier].owns)


def check_plans(config: Config, plans: list[TierPlan]) -> None:
    """ConfigError for whatever of the tiers and their directory can be seen to be wrong without
    asking anybody or taking anything."""
    for plan in plans:
        plan.check()
    directory = _directory(config)
    if directory is not None:
        directory.close()


def _directory(config: Config) -> Directory | None:
    if not config.directory_url:
        return None
    _needs("redis", "directory.url", "redis")
    _check_file("directory.password_file", config.directory_password_file)
    from kvd.tiers.redis import Directory, RedisConfig

    return Directory(
        RedisConfig(
            config.directory_url,
            _installation(config),
            0,
            config.directory_prefix,
            config.directory_password_file,
            config.directory_ttl_s,
            timeout_s=config.directory_wait_s,
            connections=2,
        ),
        longest_pause_s=min(10.0, config.retry_s),
    )


def _check_file(setting: str, path: str | bool | None) -> None:
    """ConfigError if that is a path of what can't be read: whoever opens it may wait for ever."""
    if isinstance(path, str):
        try:
            check_file(path)
        except OSError as error:
            raise ConfigError(f"{setting} {path}: {error.strerror}") from None


def _pooled(
    known: TierConfig,
    backend: Callable[[], Backend],
    pool: PoolConfig,
    *,
    cursor: Path | None = None,
) -> TierPlan:
    name = known.name
    return TierPlan(
        known,
        lambda done: PooledTier(name, backend(), done, pool),
        cursor,
        lambda: backend().check(),
    )


def _installation(config: Config) -> str:
    return config.installation or f"{socket.gethostname()}/{os.getuid()}/{config.instance}"


def _pool(config: Config, workers: int) -> PoolConfig:
    return PoolConfig(
        workers=workers,
        writers=max(1, workers - 1),
        spares=workers,
        breaker=BreakerConfig.up_to(int(config.retry_s * NS)),
    )


def _hbm(config: Config) -> TierPlan:
    _needs("torch", "tiers.hbm.device", "gpu")
    from kvd.tiers.hbm import HbmBackend, HbmConfig

    workers = config.hbm_workers
    settings = HbmConfig(config.hbm_device, config.hbm_limit, reserve_bytes=config.hbm_reserve)
    known = TierConfig(
        "hbm",
        config.hbm_limit,
        WritePolicy(config.hbm_write),
        int(config.hbm_read_s * NS),
        int(config.hbm_write_s * NS),
        reads=workers,
        writes=workers,
        scrub=config.hbm_scrub,
    )
    return _pooled(known, lambda: HbmBackend(settings), _pool(config, workers))


def _nvme(config: Config, path: str) -> TierPlan:
    from kvd.tiers.nvme import NvmeBackend, NvmeConfig

    workers = config.nvme_workers
    settings = NvmeConfig(
        Path(path),
        config.instance,
        config.nvme_limit,
        config.nvme_slab_size,
        config.nvme_engine,
        config.nvme_reserve,
        config.nvme_preallocate,
        workers,
    )
    known = TierConfig(
        "nvme",
        config.nvme_limit,
        WritePolicy(config.nvme_write),
        int(config.nvme_read_s * NS),
        int(config.nvme_write_s * NS),
        reads=workers,
        writes=2 * workers,
        scrub=config.nvme_scrub,
    )
    return _pooled(
        known,
        lambda: NvmeBackend(settings),
        _pool(config, workers).for_disk(workers, _QUIET_NS),
        cursor=Path(path, "kvd-scrub"),
    )


def _needs(module: str, setting: str, extra: str) -> None:
    """ConfigError if what an extra brings is not installed."""
    if importlib.util.find_spec(module) is None:
        raise ConfigError(f"{setting}: needs {module}: pip install 'kvd[{extra}]'")


def _redis(config: Config) -> TierPlan:
    _needs("redis", "tiers.redis.url", "redis")
    _check_file("tiers.redis.password_file", config.redis_password_file)
    from kvd.tiers.redis import RedisBackend, RedisConfig

    workers = config.redis_workers
    settings = RedisConfig(
        config.redis_url,
        _installation(config),
        config.redis_limit,
        config.redis_prefix,
        config.redis_password_file,
        config.redis_ttl_s,
        timeout_s=min(2.0, config.redis_read_s),
        connections=2 * workers,
    )
    known = _remote(
        "redis",
        config.redis_limit,
        config.redis_write,
        (config.redis_read_s, config.redis_write_s),
        workers,
        config.redis_scrub,
    )
    return _pooled(known, lambda: RedisBackend(settings), _pool(config, workers))


def _remote(
    name: str, limit: int, write: str, patience_s: tuple[float, float], workers: int, scrub: int
) -> TierConfig:
    """What the core is told of a tier behind a network, whose requests don't slow each other.
    `patience_s`: for a read, for a write."""
    read_s, write_s = patience_s
    return TierConfig(
        name,
        limit,
        WritePolicy(write),
        int(read_s * NS),
        int(write_s * NS),
        reads=workers,
        writes=workers,
        first_alone=False,
        scrub=scrub,
    )


def _s3(config: Config) -> TierPlan:
    _needs("boto3", "tiers.s3.bucket", "s3")
    _check_file("tiers.s3.credentials_file", config.s3_credentials_file)
    if not os.path.isdir(str(config.s3_verify_tls)):
        _check_file("tiers.s3.verify_tls", config.s3_verify_tls)
    from kvd.tiers.s3 import S3Backend, S3Config

    workers = config.s3_workers
    settings = S3Config(
        bucket=config.s3_bucket,
        installation=_installation(config),
        limit_bytes=config.s3_limit,
        prefix=config.s3_prefix,
        endpoint=config.s3_endpoint or None,
        region=config.s3_region or None,
        addressing=config.s3_addressing,
        verify_tls=config.s3_verify_tls,
        profile=config.s3_profile or None,
        credentials_file=config.s3_credentials_file,
        ttl_s=config.s3_ttl_s,
        concurrency=workers,
    )
    known = _remote(
        "s3",
        config.s3_limit,
        config.s3_write,
        (config.s3_read_s, config.s3_write_s),
        workers,
        config.s3_scrub,
    )
    backend = S3Backend(settings)
    return _pooled(known, lambda: backend, _pool(config, workers))._replace(owns=backend.owns)

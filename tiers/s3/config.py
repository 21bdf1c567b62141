"""What an operator says about a bucket, and the client that follows from it.

The law of this module: credentials come by the chain that AWS' own tools use (environment, files,
web identity, instance role), by a profile of it, or by a file that is named; kvd keeps none and
shows none. Retries are ours (see calls.py), so botocore's are off: each attempt is signed anew.
"""

from __future__ import annotations

import os
import re
from functools import cache
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from kvd.errors import ConfigError

MIB = 1 << 20


class S3Config(NamedTuple):
    """`installation` names whose objects these are: equal for all lives of one daemon, different
    for any two that share a bucket. `ttl_s` 0: objects are kept until they are deleted."""

    bucket: str
    installation: str
    limit_bytes: int
    prefix: str = "kvd"
    endpoint: str | None = None
    region: str | None = None
    addressing: str = "auto"  # path, virtual, auto
    verify_tls: bool | str = True  # False, or a file of certificates
    profile: str | None = None
    credentials_file: str | None = None
    ttl_s: float = 0.0
    concurrency: int = 16  # requests at a time
    connect_timeout_s: float = 3.0
    read_timeout_s: float = 10.0  # without one byte
    attempts: int = 4
    multipart_bytes: int = 16 * MIB  # objects beyond go in parts, and come in ranges
    part_bytes: int = 8 * MIB
    stale_upload_s: float = 24 * 3600.0  # uploads that nobody finished are aborted after this
    most_recovered: int = 1_000_000  # objects that a start looks at


def check(config: S3Config) -> None:
    """ConfigError naming the setting and what would be accepted."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}", config.bucket):
        raise ConfigError(f"tier s3: bucket {config.bucket!r} is no name of a bucket")
    if config.addressing not in ("auto", "path", "virtual"):
        raise ConfigError(f"tier s3: addressing {config.addressing!r}: give auto, path or virtual")
    prefix = config.prefix.encode()
    if len(prefix) > 512 or "//" in config.prefix or config.prefix.startswith("/"):
        raise ConfigError("tier s3: prefix must have at most 512 bytes, and no empty part")
    if not config.installation:
        raise ConfigError("tier s3: installation is empty: it says whose objects these are")
    if config.part_bytes < 5 * MIB or config.part_bytes > config.multipart_bytes:
        raise ConfigError("tier s3: part_bytes must be 5 MiB to multipart_bytes")
    if config.limit_bytes < MIB:
        raise ConfigError(f"tier s3: limit {config.limit_bytes} is too small: at least 1 MiB")
    if config.endpoint is not None and not re.match(r"https?://", config.endpoint):
        raise ConfigError(f"tier s3: endpoint {config.endpoint!r} must begin with http(s)://")
    if config.endpoint is not None and not _has_port(config.endpoint):
        raise ConfigError(f"tier s3: endpoint {config.endpoint!r}: a port is from 1 to 65535")
    if isinstance(config.verify_tls, str) and not os.path.exists(config.verify_tls):
        raise ConfigError(f"tier s3: verify_tls names {config.verify_tls}, which is not there")


def _has_port(url: str) -> bool:
    """Whether the port that it names, if it does, can be one."""
    try:
        return urlsplit(url).port != 0
    except ValueError:
        return False


@cache
def _loader() -> Any:
    """botocore's tables of S3, read once: half a second of each client otherwise."""
    from botocore.loaders import create_loader

    return create_loader()


def make_client(config: S3Config, *, anonymous: bool = False) -> Any:
    """A client that is safe to share between threads; `anonymous`: no credentials are looked for,
    which may ask somebody. ConfigError when boto3 is not installed, or profile or files are not
    there."""
    try:
        import botocore.session
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError
    except ImportError as error:
        raise ConfigError("tier s3 needs boto3: pip install 'kvd[s3]'") from error
    if config.credentials_file and not os.path.exists(config.credentials_file):
        raise ConfigError(f"tier s3: credentials_file {config.credentials_file} is not there")
    try:
        session = botocore.session.Session(profile=config.profile)
        session.register_component("data_loader", _loader())
        if config.credentials_file:
            session.set_config_variable("credentials_file", config.credentials_file)
        # Without an instance role these are what a start would wait for.
        session.set_config_variable("metadata_service_timeout", 1)
        session.set_config_variable("metadata_service_num_attempts", 1)
        return session.create_client(
            "s3",
            region_name=config.region or session.get_config_variable("region") or "us-east-1",
            endpoint_url=config.endpoint,
            verify=config.verify_tls,
            aws_access_key_id="none" if anonymous else None,
            aws_secret_access_key="none" if anonymous else None,
            config=Config(
                connect_timeout=config.connect_timeout_s,
                read_timeout=config.read_timeout_s,
                max_pool_connections=2 * config.concurrency + 4,
                retries={"total_max_attempts": 1, "mode": "standard"},
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
                tcp_keepalive=True,
                s3={"addressing_style": config.addressing, "payload_signing_enabled": False},
            ),
        )
    except (BotoCoreError, ValueError) as error:
        raise ConfigError(f"tier s3: {error}") from error

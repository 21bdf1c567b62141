"""What `kv_connector_extra_config` may say.

The law of this module: a key that is not known, and a value of the wrong type or range, stop the
start with a message that names the key, what it may be, and the nearest that exists. Nothing is
guessed and nothing is taken from the environment but the default socket.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from math import lcm
from typing import Any, NamedTuple

from kvd.errors import ConfigError

__all__ = ["Options", "chunk_size", "read_options"]


class Options(NamedTuple):
    """The connector's settings. Times in seconds."""

    socket: str | None = None  # path of the daemon's socket; None: as the daemon's own default
    namespace: str = ""  # refuse a session in another namespace; "": whatever the daemon gives
    token_file: str = ""  # holds a namespace's token
    instance: str = ""  # refuse another daemon than this instance
    chunk_tokens: int = 0  # 0: the largest multiple of the block size up to 256, or one block
    load_policy: str = "always"  # "always" | "never"
    store_policy: str = "all"  # "all" | "prompt" (no generated tokens) | "never"
    min_load_tokens: int = 0  # a shorter gain is recomputed rather than loaded
    lookup_deadline_s: float = 0.25  # a request waits for its match this long at most
    load_deadline_s: float = 5.0  # plus 1 s for each 512 MiB
    store_deadline_s: float = 5.0
    lease_s: float = 30.0  # how long a match may wait to be scheduled
    lookahead: int = 16  # waiting requests that may hold a match before they are asked for one
    store_queue: int = 512  # chunks that wait to be stored, a worker; more are given up
    verify: bool = False  # compare loaded payloads with their digests
    prefault: bool = True  # workers fault the arena in, in the background
    measure: bool = False  # count the CPU time of the hooks and transfer threads
    model: str = ""  # name in the identity; "": as the engine has it
    revision: str = ""
    weights: str = ""  # digest of the weights; "": found in the checkpoint


_CHOICES = {"load_policy": ("always", "never"), "store_policy": ("all", "prompt", "never")}
_RANGES: dict[str, tuple[float, float]] = {
    "chunk_tokens": (0, 4096),
    "min_load_tokens": (0, 1 << 31),
    "lookup_deadline_s": (0.001, 60.0),
    "load_deadline_s": (0.001, 600.0),
    "store_deadline_s": (0.001, 600.0),
    "lease_s": (1.0, 600.0),
    "lookahead": (0, 100_000),
    "store_queue": (1, 1_000_000),
}


def read_options(extra: Mapping[str, Any], role: str) -> Options:
    """The settings of `kv_connector_extra_config`; `role` is vLLM's kv_role: a producer only
    stores, a consumer only loads. ConfigError names what is wrong."""
    defaults = Options()
    for name in extra:
        if name not in Options._fields:
            near = difflib.get_close_matches(str(name), Options._fields, 1)
            hint = (
                f"; did you mean {near[0]}?" if near else f"; known: {', '.join(Options._fields)}"
            )
            raise ConfigError(f"kv_connector_extra_config: {name!r} is unknown to kvd{hint}")
    read = {n: _value(n, v, getattr(defaults, n)) for n, v in extra.items()}
    options = defaults._replace(**read)
    if role == "kv_producer":
        options = options._replace(load_policy="never")
    elif role == "kv_consumer":
        options = options._replace(store_policy="never")
    return options


def _value(name: str, value: Any, default: Any) -> Any:
    where = f"kv_connector_extra_config: {name}"
    if name == "socket":
        if value is not None and (not isinstance(value, str) or not value):
            raise ConfigError(f"{where} is {value!r}, must be a path")
        return value
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise ConfigError(f"{where} is {value!r}, must be true or false")
        return value
    if isinstance(default, str):
        if not isinstance(value, str):
            raise ConfigError(f"{where} is {value!r}, must be text")
        choices = _CHOICES.get(name)
        if choices and value not in choices:
            raise ConfigError(f"{where} is {value!r}, must be one of {', '.join(choices)}")
        return value
    whole = isinstance(default, int)
    good = isinstance(value, int) if whole else isinstance(value, int | float)
    low, high = _RANGES[name]
    if not good or isinstance(value, bool) or not low <= value <= high:
        kind = "a whole number" if whole else "a number"
        raise ConfigError(f"{where} is {value!r}, must be {kind} from {low:g} to {high:g}")
    return value if whole else float(value)


def chunk_size(wanted: int, block_sizes: list[int], hash_block: int) -> int:
    """Tokens a chunk, for KV groups of these block sizes and block hashes of `hash_block` tokens:
    `wanted`, or what fits best when it is 0. ConfigError naming the legal values."""
    unit = lcm(*block_sizes, hash_block)
    if not wanted:
        wanted = max(unit, 256 // unit * unit)
        while wanted < 16:  # the least that a spec may say
            wanted += unit
    if wanted % unit or not 16 <= wanted <= 4096:
        legal = [n for n in range(unit, 4097, unit) if n >= 16]
        shown = ", ".join(map(str, legal[:8])) + (", ..." if len(legal) > 8 else "")
        raise ConfigError(
            f"kv_connector_extra_config: chunk_tokens is {wanted}, must be a multiple of {unit} "
            f"(block sizes {sorted(set(block_sizes))}, hashes each {hash_block}) from 16 to 4096: "
            f"{shown or 'none fits, so this model cannot be cached'}"
        )
    return wanted

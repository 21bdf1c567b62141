"""What `--hicache-storage-backend-extra-config` may say.

The law of this module: a key that is not known, and a value of the wrong type or range, stop the
start with a message that names the key, what it may be, and the nearest that exists. Nothing is
taken from the environment but the default socket.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, NamedTuple

from kvd.errors import ConfigError

__all__ = ["Options", "read_options"]

_WHERE = "hicache-storage-backend-extra-config"


class Options(NamedTuple):
    """The backend's settings. Times in seconds."""

    socket: str = ""  # path of the daemon's socket; "": as the daemon's own default
    endpoint: str = ""  # "tcp://host:port" instead, or "ipc:///path"
    namespace: str = ""  # use no other namespace than this; "": whatever the daemon gives
    token_file: str = ""  # holds a namespace's token
    instance: str = ""  # use no other daemon than this instance
    model: str = ""  # name in the identity; "": as SGLang has it
    revision: str = ""
    weights: str = ""  # digest of the weights; "": found in the checkpoint
    start_deadline_s: float = 2.0  # the first contact, while the engine starts
    lookup_deadline_s: float = 0.5
    load_deadline_s: float = 5.0  # plus 1 s for each 512 MiB
    store_deadline_s: float = 5.0  # plus 1 s for each 512 MiB
    busy_wait_s: float = 1.0  # a page that another engine is storing now is waited for
    verify: bool = False  # compare loaded pages with their digests
    prefault: bool = True  # fault the arena in, in the background


# Keys of SGLang's own: what it needs to find this class, and what it takes out of the config (or
# leaves in it, when the backend is made by hand).
_SGLANG = frozenset(
    {
        "backend_name", "module_path", "class_name", "interface_v1", "prefetch_threshold",
        "prefetch_timeout_base", "prefetch_timeout_per_ki_token",
        "hicache_storage_pass_prefix_keys", "tp_lcm_size",
    }
)  # fmt: skip

_SECONDS = (0.001, 600.0)


def read_options(extra: Mapping[str, Any]) -> Options:
    """The settings in SGLang's extra config. ConfigError names what is wrong."""
    defaults = Options()
    read: dict[str, Any] = {}
    for name, value in extra.items():
        if name in _SGLANG:
            continue
        if name not in Options._fields:
            near = difflib.get_close_matches(str(name), [*Options._fields, *_SGLANG], 1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(Options._fields)}"
            raise ConfigError(f"{_WHERE}: {name!r} is unknown to kvd; {hint}")
        read[name] = _value(name, value, getattr(defaults, name))
    options = defaults._replace(**read)
    if options.socket and options.endpoint:
        raise ConfigError(f"{_WHERE}: socket and endpoint are both given; leave one out")
    if options.endpoint.startswith("ipc://"):
        options = options._replace(socket=options.endpoint[len("ipc://") :], endpoint="")
    elif options.endpoint and not options.endpoint.startswith("tcp://"):
        raise ConfigError(
            f"{_WHERE}: endpoint is {options.endpoint!r}, must be tcp://host:port or ipc:///path"
        )
    return options


def _value(name: str, value: Any, default: Any) -> Any:
    where = f"{_WHERE}: {name} is {value!r}, must be"
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise ConfigError(f"{where} true or false")
        return value
    if isinstance(default, str):
        if not isinstance(value, str):
            raise ConfigError(f"{where} text")
        return value
    low, high = _SECONDS
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not low <= value <= high:
        raise ConfigError(f"{where} a number of seconds from {low:g} to {high:g}")
    return float(value)

"""Policies by name.

The law of this module: a configuration names a policy, this table says what that means, and
nothing else does. `default` is the name for whatever the measurements recommend; a dotted path
names a policy of one's own. Options follow a colon: `crf:half_life_s=300,ghost_factor=4`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import partial
from types import NoneType
from typing import Any, Final

from kvd.errors import ConfigError
from kvd.eviction.adaptive import Adaptive
from kvd.eviction.arc import Arc
from kvd.eviction.base import Policy
from kvd.eviction.crf import Crf
from kvd.eviction.fifo import Fifo
from kvd.eviction.lfuda import Lfuda
from kvd.eviction.lru import Lru
from kvd.eviction.reuse import Reuse
from kvd.eviction.s3fifo import S3Fifo

DEFAULT: Final = "reuse"
# What Policy leaves open. Said here, because the compiled class does not know it at run time.
_MUST = ("insert", "touch", "victims", "coldness", "forget", "value", "__len__")

POLICIES: Final[dict[str, type[Policy]]] = {
    policy.name: policy for policy in (Adaptive, Arc, Crf, Fifo, Lfuda, Lru, Reuse, S3Fifo)
}

# `importlib.import_module`, handed in by who may import: this folder does no I/O.
Load = Callable[[str], Any]


def factory(spec: str, load: Load | None = None) -> Callable[[], Policy]:
    """A maker of new policies. `spec`: a name of POLICIES, `default`, or a dotted path
    `package.module.Class` (needs `load`), then perhaps `:option=number,...`. ConfigError names
    what is wrong and what would be right."""
    name, _, options = spec.strip().partition(":")
    found = _find(name, load)
    given = _options(name, options)
    made = partial(found, **given)
    try:
        made()
    except SystemExit as error:
        raise ConfigError(f"policy {spec!r} exits when it is made ({error})") from error
    except Exception as error:
        why = _misfit(found, given, error) if isinstance(error, TypeError) else str(error)
        raise ConfigError(f"policy {spec!r}: {why}") from error
    return made


def make(spec: str, load: Load | None = None) -> Policy:
    """A new policy; see `factory`."""
    return factory(spec, load)()


def _find(name: str, load: Load | None) -> type[Policy]:
    if name == "default":
        name = DEFAULT
    if name in POLICIES:
        return POLICIES[name]
    module, _, attribute = name.rpartition(".")
    if not module:
        near = get_close_matches(name, [*POLICIES, "default"], n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        known = ", ".join(["default", *sorted(POLICIES)])
        raise ConfigError(
            f"no eviction policy {name!r}{hint} (known: {known}, or package.module.Class)"
        )
    if load is None:
        raise ConfigError(f"eviction policy {name!r}: dotted paths are not accepted here")
    try:
        found = getattr(load(module), attribute)
    except SystemExit as error:  # a program, not a module
        raise ConfigError(f"eviction policy {name!r} exits when imported ({error})") from error
    except Exception as error:  # the module is not ours
        raise ConfigError(f"eviction policy {name!r} can't be imported: {error}") from error
    # not issubclass: compiled classes share one cache of what is whose subclass
    if not isinstance(found, type) or Policy not in found.__mro__:
        raise ConfigError(f"eviction policy {name!r} is no class that fulfils Policy")
    if lacks := [one for one in _MUST if getattr(found, one) is getattr(Policy, one)]:
        raise ConfigError(
            f"eviction policy {name!r} is no class that fulfils Policy: it lacks {', '.join(lacks)}"
        )
    return found


def _misfit(policy: type[Policy], given: dict[str, float], error: TypeError) -> str:
    """Which of the options is none of the policy's, and which it has."""
    has = _parameters(policy)
    if has is None or all(name in has for name in given):
        return str(error)
    wrong = ", ".join(repr(name) for name in given if name not in has)
    numbers = [n for n, default in has.items() if not isinstance(default, Sequence | NoneType)]
    return f"no option {wrong}; it has {', '.join(numbers) or 'none'} (see docs/eviction.md)"


def _parameters(policy: type[Policy]) -> dict[str, object] | None:
    """Names and defaults; None where it takes any, or does not say."""
    if policy.__text_signature__ is None and not inspect.isfunction(
        inspect.getattr_static(policy, "__init__")
    ):
        return None  # compiled, and what `signature` would find is its base's
    try:
        has = inspect.signature(policy).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in has):
        return None
    return {one.name: one.default for one in has}


def _options(name: str, text: str) -> dict[str, float]:
    options = {}
    for part in filter(None, text.split(",")):
        key, equals, value = part.partition("=")
        try:
            options[key.strip()] = float(value)
        except ValueError:
            equals = ""
        if not equals or not math.isfinite(options[key.strip()]):
            raise ConfigError(f"policy {name!r}: {part!r} is not option=number")
    return options

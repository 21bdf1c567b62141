"""Whether the parts that every request goes through are compiled, and what they say to the
compiler; and what else the source does for the sake of time alone.

The law of this module: the source is Python and runs as it is; a wheel may hold the same modules
compiled by mypyc (`setup.py`). Nothing behaves differently but for the time that it takes.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

T = TypeVar("T")
E = TypeVar("E", bound=type[Enum])

if TYPE_CHECKING:
    from mypy_extensions import i64 as i64
    from mypy_extensions import mypyc_attr as mypyc_attr

    class Nobody(Protocol):
        """What nobody is."""

        def is_nobody(self) -> None: ...

    # What a caller hands in, where a check of our own says what is wrong with it: a T, to whoever
    # calls. A compiled function refuses an argument of another type before its first line, with the
    # compiler's TypeError, unless the parameter may be anything.
    Given: TypeAlias = T | Nobody

    def named(cls: type[T], values: tuple[Any, ...]) -> T:
        """A NamedTuple of these values, all of its fields in order. Its own constructor is a Python
        function that takes three times as long; where a request makes dozens, that counts. Nothing
        is checked."""
else:
    named = tuple.__new__
    i64 = int  # for the compiler, a register

    class Given:
        def __class_getitem__(cls, kind: Any) -> Any:
            return kind

    def mypyc_attr(*marks: str, **more: Any) -> Callable[[type[T]], type[T]]:
        """For the compiler alone; it takes it away."""
        return lambda cls: cls


def compiled() -> bool:
    """Whether the core that runs here is compiled."""
    core = find_spec("kvd.core.core")
    return core is not None and not str(core.origin).endswith(".py")


def plain_members(cls: E) -> E:
    """Members are attributes of their class and nothing else, as from Python 3.12 on: 3.11 finds
    each by a call of a Python function, for which a request that names a dozen of them pays."""
    for name, member in cls.__members__.items():
        type.__setattr__(cls, name, member)
    return cls

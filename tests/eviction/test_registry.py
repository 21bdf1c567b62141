"""Policies by name: what is accepted, and how the rest is refused."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from kvd.errors import ConfigError
from kvd.eviction.base import Policy
from kvd.eviction.crf import Crf
from kvd.eviction.registry import _MUST, DEFAULT, POLICIES, factory, make
from kvd.native import compiled


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_name_makes_its_policy(name: str) -> None:
    policy = make(name)
    assert policy.name == name and len(policy) == 0
    assert make(name) is not policy


def test_default_is_a_name_for_one_of_them() -> None:
    assert type(make("default")) is POLICIES[DEFAULT]


def test_options_follow_a_colon() -> None:
    policy = make("crf:half_life_s=300,ghost_factor=4")
    assert isinstance(policy, Crf) and policy._half_ns == 300e9


def test_a_dotted_path_is_ones_own() -> None:
    made = factory("kvd.eviction.crf.Crf:half_life_s=9", importlib.import_module)
    assert isinstance(made(), Crf)


@pytest.mark.skipif(compiled(), reason="a compiled class does not know what it leaves open")
def test_all_that_the_contract_leaves_open_is_asked_for() -> None:
    assert set(_MUST) == Policy.__abstractmethods__


def test_what_a_policy_of_ones_own_lacks_is_named() -> None:
    class Half(Policy):
        def __len__(self) -> int:
            return 0

        def victims(self, queue: int, now: int) -> Iterator[int]:
            return iter(())

    with pytest.raises(ConfigError, match=r"it lacks insert, touch, coldness, forget, value$"):
        factory("mine.Half", lambda module: SimpleNamespace(Half=Half))


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("lur", "did you mean 'lru'"),
        ("", "known: default"),
        ("crf:half_life_s", "not option=number"),
        ("crf:half_life_s=long", "not option=number"),
        ("crf:half_life_s=nan", "not option=number"),
        ("reuse:horizon=inf", "not option=number"),
        ("crf:half_life_s=0", "above 0"),
        ("crf:size=3", "size"),
        ("no.such.Policy", "can't be imported"),
        ("kvd.eviction.crf.Nothing", "can't be imported"),
        ("kvd.eviction.base.Policy", "no class that fulfils Policy"),
        ("kvd.errors.KvdError", "no class that fulfils Policy"),
    ],
)
def test_what_is_wrong_is_named(spec: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        factory(spec, importlib.import_module)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("crf:foo=3", "no option 'foo'; it has half_life_s, ghost_factor, same_use_s"),
        ("crf:half_life_s=3,foo=3,bar=4", "no option 'foo', 'bar'; it has half_life_s, "),
        ("lru:foo=3", "no option 'foo'; it has none"),
        # a list of numbers can't be said in an option
        ("adaptive:foo=3", "no option 'foo'; it has ghost_factor, period_s, decay, margin, same"),
        ("reuse:horizn=3", "no option 'horizn'; it has ghost_factor, horizon, prior, same_use_s"),
    ],
)
def test_an_option_that_is_none_names_those_that_are(spec: str, says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        factory(spec)
    assert f"policy {spec!r}: {says}" in str(refused.value)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_policy_tells_its_options(name: str) -> None:
    """A compiled one too, which is silent if a default is no literal."""
    with pytest.raises(ConfigError, match="no option 'foo'; it has "):
        factory(f"{name}:foo=3")


def test_what_a_policy_of_ones_own_takes_is_its_own_matter() -> None:
    class Mine(Crf):
        def __init__(self, **options: float) -> None:
            raise TypeError("not on Mondays")

    with pytest.raises(ConfigError, match=r"not on Mondays$"):
        factory("mine.Mine:foo=3", lambda module: SimpleNamespace(Mine=Mine))


def test_a_module_or_class_that_exits_is_refused_like_any_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A start that is refused says why; it does not just end."""

    def program(name: str) -> object:
        sys.exit(3)

    with pytest.raises(ConfigError, match=r"exits when imported \(3\)"):
        factory("some.program.Policy", program)
    monkeypatch.setattr(Crf, "__init__", lambda self: sys.exit(4))
    with pytest.raises(ConfigError, match=r"exits when it is made \(4\)"):
        factory("crf")


def test_without_a_loader_there_are_no_dotted_paths() -> None:
    with pytest.raises(ConfigError, match="not accepted"):
        make("kvd.eviction.crf.Crf")

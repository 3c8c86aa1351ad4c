"""Plugins are found by built-in name, or as module:Class in a user's own package."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Protocol

import pytest

from tiered_kv.errors import ConfigError
from tiered_kv.plugins import load


class Greeter(Protocol):
    @property
    def name(self) -> str: ...

    def greet(self) -> str: ...


class Polite:
    name = "polite"

    def greet(self) -> str:
        return "good morning"


class Mute:
    name = "mute"


class Base(ABC):
    @abstractmethod
    def greet(self) -> str: ...


class Unfinished(Base):
    pass


def polite() -> Polite:
    return Polite()


KNOWN = {"polite": Polite}
HERE = __name__


def test_a_name_of_the_table() -> None:
    assert load("greeter", "polite", KNOWN, Greeter) is Polite


@pytest.mark.parametrize("attribute", ["Polite", "polite"])
def test_a_class_or_a_function_of_another_module(attribute: str) -> None:
    made = load("greeter", f"{HERE}:{attribute}", KNOWN, Greeter)()
    assert made.greet() == "good morning"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("plite", "did you mean polite? Use polite, or your own module:Class"),
        ("", "'' is not a known greeter: Use polite"),
        ("polite:", "is not a known greeter"),
        ("no_such_module:Polite", "cannot be imported (ModuleNotFoundError"),
        (f"{HERE}:Rude", f"{HERE} has no class Rude"),
        (f"{HERE}:HERE", "has no class HERE"),
        (f"{HERE}:Mute", f"lacks greet. Implement every method of {HERE}.Greeter"),
        (f"{HERE}:Unfinished", "lacks greet"),
    ],
)
def test_unusable_input_is_refused_with_a_remedy(name: str, said: str) -> None:
    contract = Base if "Unfinished" in name else Greeter
    with pytest.raises(ConfigError) as raised:
        load("greeter", name, KNOWN, contract)
    assert said in str(raised.value)


def test_a_failing_module_is_reported_with_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_greeter.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        load("greeter", "broken_greeter:Polite", KNOWN)

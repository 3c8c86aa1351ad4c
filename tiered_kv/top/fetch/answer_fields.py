"""Fields of answers, read without trusting their form."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from .safe_text import MOST_CHARS, harmless

Object = Mapping[str, Any]


class AnswerError(Exception):
    """An answer in another form than this version's."""


def parsed(text: str) -> Any:
    """The JSON that a text holds.

    Raises:
        AnswerError: it holds none; as the other functions here, for what is not as expected.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise AnswerError("no JSON") from error


def as_object(found: Any) -> Object:
    """The same, if it is an object."""
    if not isinstance(found, dict):
        raise AnswerError("no object")
    return found


def part(said: Object, name: str) -> Object:
    """An object in another."""
    return as_object(said.get(name))


def list_of(said: Object, name: str) -> list[Any]:
    """A list."""
    found = said.get(name)
    if not isinstance(found, list):
        raise AnswerError(f"{name} is no list")
    return found


def text_of(said: Object, name: str, most: int = MOST_CHARS) -> str:
    """A text, made harmless: so many characters of it."""
    found = said.get(name)
    if not isinstance(found, str):
        raise AnswerError(f"{name} is no text")
    return harmless(found, most)


def whole(said: Object, name: str) -> int:
    """A whole number."""
    found = said.get(name)
    if not isinstance(found, int) or abs(found) >> 63:
        raise AnswerError(f"{name} is no whole number")
    return found


def number(said: Object, name: str) -> float:
    """A number."""
    found = said.get(name)
    if isinstance(found, float) and math.isfinite(found):
        return found
    if isinstance(found, float):
        raise AnswerError(f"{name} is no number")
    return float(whole(said, name))


def numbers(said: Object) -> dict[str, float]:
    """All fields, if they are numbers."""
    return {name: number(said, name) for name in said}


def moment(said: Object, name: str) -> float | None:
    """A number, or None where null stands for none."""
    if name not in said:
        raise AnswerError(f"{name} is missing")
    return None if said[name] is None else number(said, name)

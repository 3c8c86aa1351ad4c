"""Shapes of JSON values: field names and value types, without the values."""

from __future__ import annotations

from typing import Any


def shape(*values: Any) -> Any:
    """Return the shape that all values share. The name of a field that some objects lack ends with
    ``?``."""
    found: list[Any] = []
    objects = [one for one in values if isinstance(one, dict)]
    if objects:
        names = dict.fromkeys(name for one in objects for name in one)
        found.append({_named(name, objects): _field(name, objects) for name in names})
    lists = [one for one in values if isinstance(one, list)]
    if lists:
        items = [item for one in lists for item in one]
        found.append([shape(*items)] if items else [])
    words = {_word(one) for one in values if not isinstance(one, dict | list)}
    if words:
        found.append(" | ".join(sorted(words)))
    return found[0] if len(found) == 1 else {"either": found}


def _named(name: str, objects: list[dict[str, Any]]) -> str:
    return name if all(name in one for one in objects) else f"{name}?"


def _field(name: str, objects: list[dict[str, Any]]) -> Any:
    return shape(*(one[name] for one in objects if name in one))


def _word(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case _:
            return "string"

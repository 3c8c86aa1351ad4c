"""Parts chosen by name, or by ``module:Class`` from a package of the operator's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TypeVar

from .errors import ConfigError

T = TypeVar("T")


def load(kind: str, name: str, known: Mapping[str, Callable[..., T]]) -> Callable[..., T]:
    """Find a part's class, or the function that makes it.

    Args:
        kind: noun for the part, in error messages.
        name: name in ``known``, or ``module:Class`` of any importable module.

    Raises:
        ConfigError: there is none of that name; the sentence says what to write instead.
    """
    if name in known:
        return known[name]
    module, colon, attribute = name.partition(":")
    if not (colon and module and attribute):
        raise ConfigError(
            f"unknown {kind} {name!r}: known are {', '.join(sorted(known))}; write one of them, or "
            "module:Class of your own."
        )
    try:
        found = getattr(import_module(module), attribute, None)
    except Exception as error:
        raise ConfigError(
            f"{kind} {name!r} cannot be imported ({type(error).__name__}: {error}): install its "
            "package where the server runs."
        ) from error
    if not callable(found):
        raise ConfigError(f"{kind} {name!r}: module {module} has no class {attribute}; name one.")
    return found  # type: ignore[no-any-return]

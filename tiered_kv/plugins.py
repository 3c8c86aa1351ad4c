"""Replaceable parts of a server, such as policies and codecs: chosen by name, or as
``module:Class`` from the operator's own package."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, TypeVar

from .errors import ConfigError

T = TypeVar("T")


def load(
    kind: str, name: str, known: Mapping[str, Callable[..., T]], *contracts: Any
) -> Callable[..., T]:
    """Return the class of a part, or the function that creates the part. Imports its module if
    necessary.

    Args:
        kind: noun for the part, for error messages.
        name: name in ``known``, or ``module:Class`` of any importable module.
        contracts: classes or Protocols whose public methods a ``module:Class`` must have.

    Raises:
        ConfigError: there is no such part, its module cannot be imported, or it lacks methods of
            the contracts.
    """
    if name in known:
        return known[name]
    module, colon, attribute = name.partition(":")
    if not (colon and module and attribute):
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ConfigError(
            f"{name!r} is not a known {kind}: {hint}Use {', '.join(known)}, or your own "
            "module:Class."
        )
    try:
        found = getattr(import_module(module), attribute, None)
    except Exception as error:  # third-party modules may raise anything
        raise ConfigError(
            f"{kind} {name!r} cannot be imported ({type(error).__name__}: {error}): install its "
            "package in the server's environment, or fix the import."
        ) from error
    if not callable(found):
        raise ConfigError(
            f"{kind} {name!r} cannot be used: {module} has no class {attribute}. Set another class."
        )
    for contract in contracts if inspect.isclass(found) else ():
        if missing := _missing(found, contract):
            raise ConfigError(
                f"{kind} {name!r} cannot be used: it lacks {', '.join(missing)}. Implement "
                f"every method of {contract.__module__}.{contract.__qualname__}."
            )
    return found  # type: ignore[no-any-return]


def _missing(found: type, contract: Any) -> list[str]:
    """Return the names of the public and abstract methods of ``contract`` that ``found`` does not
    define.

    A contract's properties are not checked, because they may be attributes of instances only.
    """
    methods = (name for name, _ in inspect.getmembers(contract, inspect.isfunction))
    unmet: frozenset[str] = getattr(found, "__abstractmethods__", frozenset())
    special = getattr(contract, "__abstractmethods__", ())  # for example __iter__
    return [
        name
        for name in methods
        if (name in special or not name.startswith("_"))
        and (name in unmet or not callable(getattr(found, name, None)))
    ]

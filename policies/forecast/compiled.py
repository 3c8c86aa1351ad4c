"""Functions compiled when they are defined, so that no decision waits for a compiler.

Compiled code is kept beside the module, so that only the first import takes some seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba  # type: ignore[import-untyped]
from numba import types

Function = TypeVar("Function", bound=Callable[..., Any])


def array(of: Any, dimensions: int, *, written: bool = False) -> Any:
    """The type of an array, which is only read unless it is said to be written."""
    return types.Array(of, dimensions, "C", readonly=not written)


def compiled(returns: Any, *arguments: Any) -> Callable[[Function], Function]:
    """Compile a function of these types. It releases the interpreter while it runs."""

    def made(function: Function) -> Function:
        signature = returns(*arguments)
        try:
            kept: Function = numba.njit(signature, nogil=True, cache=True)(function)
        except RuntimeError:  # nowhere to keep it: compile in each process
            kept = numba.njit(signature, nogil=True)(function)
        return kept

    return made

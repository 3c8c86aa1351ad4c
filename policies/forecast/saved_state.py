"""Readers of a policy's saved state, which may be malformed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def entry(saved: object, key: str) -> object:
    """Return the value under ``key``.

    Raises:
        ValueError: ``saved`` has no such key.
    """
    if not isinstance(saved, Mapping) or key not in saved:
        raise ValueError(f"no {key!r} in it")
    return saved[key]


def entries(saved: object) -> Sequence[object]:
    """Return a list.

    Raises:
        ValueError: ``saved`` is no list.
    """
    if not isinstance(saved, list):
        raise ValueError("not a list")
    return saved


def words(saved: object) -> tuple[str, ...]:
    """Return a list of strings.

    Raises:
        ValueError: ``saved`` is no list of strings.
    """
    found = tuple(word for word in entries(saved) if isinstance(word, str))
    if len(found) != len(entries(saved)):
        raise ValueError("not a list of strings")
    return found


def numbers(saved: object, *shape: int, least: float = -np.inf) -> Array:
    """Return finite numbers of the given shape; -1 stands for any length.

    Raises:
        ValueError: ``saved`` has another shape or type, or a number below ``least``.
    """
    try:
        found = np.array(saved, dtype=np.float64)
    except (TypeError, OverflowError) as error:
        raise ValueError("not numbers") from error
    fits = len(found.shape) == len(shape) and all(
        want in (-1, have) for want, have in zip(shape, found.shape, strict=True)
    )
    if not fits:
        raise ValueError(f"numbers of shape {found.shape}, not {shape}")
    if not np.isfinite(found).all() or (found < least).any():
        raise ValueError("numbers out of range")
    return found


def check_version(saved: object, version: int) -> None:
    """Refuse another version.

    Raises:
        ValueError: the state was saved by another version.
    """
    if entry(saved, "version") != version:
        raise ValueError("saved by another version")

"""Reader of the numbers in a policy's saved state, which may be malformed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def numbers(saved: object, *shape: int, least: float = -np.inf) -> Array:
    """Return ``saved`` as an array of finite numbers. Its shape must be ``shape``, in which -1
    stands for any length.

    Raises:
        ValueError: ``saved`` has another shape or type, or contains NaN, an infinite number or a
            number below ``least``.
    """
    try:
        found = np.array(saved, dtype=np.float64)
    except (TypeError, OverflowError) as error:
        raise ValueError("it does not consist of numbers") from error
    fits = len(found.shape) == len(shape) and all(
        want in (-1, have) for want, have in zip(shape, found.shape, strict=True)
    )
    if not fits:
        raise ValueError(f"it has the shape {found.shape} instead of {shape}")
    if not np.isfinite(found).all() or (found < least).any():
        raise ValueError("it contains numbers outside the allowed range")
    return found

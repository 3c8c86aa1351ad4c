"""Reader of the numbers in a policy's saved state, which may be malformed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


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
        raise ValueError(f"numbers have shape {found.shape}, not {shape}")
    if not np.isfinite(found).all() or (found < least).any():
        raise ValueError("numbers out of range")
    return found

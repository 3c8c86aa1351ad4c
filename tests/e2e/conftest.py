from __future__ import annotations

from pathlib import Path

import pytest

from bench.model import small_model as prepare


@pytest.fixture(scope="session")
def small_model() -> Path:
    """The small real model, prepared once for the machine."""
    return prepare()

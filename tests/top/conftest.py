from __future__ import annotations

from tests.runtime.conftest import make_rig

__all__ = ["make_rig"]

"""Snapshots on disk, for the tests of the command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.snapshot.made_snapshots import PLAIN, make, outline
from tiered_kv.snapshot.manifest import Manifest


def make_snapshot(
    root: Path, name: str, token_ids: Sequence[int] = range(40), ranks: int = 1, **changes: Any
) -> Manifest:
    """Create a snapshot in which every token has KV.

    Args:
        changes: fields of the manifest that differ from the defaults.
    """
    manifest = replace(
        outline(PLAIN, ranks),
        token_ids=tuple(token_ids),
        kv_tokens=len(token_ids),
        prompt_tokens=len(token_ids) - 1,
        job="j",
        parents=(),
        cache_salt=None,
        sampling={"temperature": 0.7},
    )
    return make(root, name, replace(manifest, **changes))

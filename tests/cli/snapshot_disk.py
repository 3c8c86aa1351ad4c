"""Snapshots on disk, for the tests of the command line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tiered_kv.codecs.base import Bytes, ElementType, PageFormat, Section
from tiered_kv.snapshot.draft import SnapshotDraft
from tiered_kv.snapshot.manifest import Manifest, SnapshotGroup
from tiered_kv.snapshot.rank_writer import PageWriter

TOKENS = 16
"""Tokens of a page."""
FORMAT = PageFormat.of([Section(ElementType.OPAQUE, 512)], TOKENS)


def page(block: int, rank: int = 0) -> Bytes:
    """The page of a block."""
    random = np.random.default_rng([block, rank])
    return random.integers(0, 256, FORMAT.page_bytes, np.uint8)


def make_snapshot(
    root: Path, name: str, token_ids: Sequence[int] = range(40), ranks: int = 1, **changes: Any
) -> Manifest:
    """Make a snapshot, of which all tokens have KV.

    Args:
        changes: fields of its manifest.
    """
    fields: dict[str, Any] = {
        "created": 1_700_000_000.0,
        "tiered_kv": "0.1.0",
        "vllm": "0.33.0",
        "model": "m/model",
        "ranks": ranks,
        "hash_tokens": TOKENS,
        "groups": (SnapshotGroup(0, TOKENS, FORMAT, {"dtype": "bfloat16", "layers": 2}),),
        "token_ids": tuple(token_ids),
        "kv_tokens": len(token_ids),
        "prompt_tokens": len(token_ids) - 1,
        "job": "j",
        "turns": 3,
        "parents": (),
        "cache_salt": None,
        "exact": False,
        "sampling": {"temperature": 0.7},
        "pages": (),
        "stored_bytes": 0,
        "shared_bytes": 0,
        **changes,
    }
    with SnapshotDraft.begin(root, name) as draft:
        for rank in range(ranks):
            writer = PageWriter(draft.folder, rank)
            for block in range(-(-len(token_ids) // TOKENS)):
                writer.add(0, block, bytes([block]), FORMAT, page(block, rank))
            writer.finish()
        return draft.seal(Manifest(**fields))

"""Mismatches between a snapshot and an engine: each is reported, with the required value."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.snapshot.made_snapshots import BF16, GROUPS, MIXED, outline, with_pages
from tiered_kv.codecs.base import ElementType, PageFormat
from tiered_kv.snapshot.manifest import dump, load
from tiered_kv.snapshot.mismatch import EngineIdentity, mismatches

MANIFEST = load(dump(with_pages(outline())))
ENGINE = EngineIdentity(2, 16, "0.33.0", GROUPS)


def with_fingerprint(**changes: object) -> EngineIdentity:
    groups = tuple(replace(group, fingerprint={**group.fingerprint, **changes}) for group in GROUPS)
    return replace(ENGINE, groups=groups)


def with_config(**changes: object) -> EngineIdentity:
    config: Any = GROUPS[0].fingerprint["config"]
    return with_fingerprint(config={**config, **changes})


def with_group(**changes: Any) -> EngineIdentity:
    return replace(ENGINE, groups=(replace(GROUPS[0], **changes), GROUPS[1]))


def test_the_engine_of_a_snapshot_can_use_the_snapshot() -> None:
    assert mismatches(MANIFEST, ENGINE) == []


def test_a_later_patch_release_of_vllm_can_use_a_snapshot() -> None:
    assert mismatches(MANIFEST, replace(ENGINE, vllm="0.33.7rc1")) == []


def test_settings_are_compared_in_their_json_form() -> None:
    """A snapshot whose settings have lists and string keys matches an engine whose configuration
    has tuples and numbers as keys."""
    engine = with_config(shape=(1, 2), id2label={0: "a"})
    text = json.loads(json.dumps({"shape": [1, 2], "id2label": {"0": "a"}}))
    manifest = replace(MANIFEST, groups=with_config(**text).groups)
    assert mismatches(manifest, engine) == []


DIFFERENCES: dict[str, tuple[EngineIdentity, str, str]] = {
    "weights": (with_fingerprint(model="b" * 32), "weights", "org/model"),
    "adapter": (with_fingerprint(adapter="c"), "LoRA adapter is none", "the same adapter"),
    "dtype": (with_fingerprint(dtype="torch.float16"), "torch.float16", "--dtype bfloat16"),
    "cache dtype": (with_fingerprint(cache_dtype="fp8"), "fp8", "--kv-cache-dtype auto"),
    "scales": (with_fingerprint(kv_scales="dynamic"), "dynamic", "one source"),
    "configuration": (with_config(rope_theta=5.0), "rope_theta", "overrides"),
    "configuration below": (
        with_config(rope_scaling={"factor": 4.0}),
        "rope_scaling.factor",
        "overrides",
    ),
    "configuration more": (with_config(new=1), "in new:", "overrides"),
    "no configuration": (with_fingerprint(config=None), "all of it", "overrides"),
    "another field": (with_fingerprint(later="x"), "its later", "must be the same"),
    "layout": (
        replace(
            ENGINE,
            groups=tuple(
                replace(g, fingerprint={**g.fingerprint, "layout": "1x9 HND FLASHINFER"})
                for g in GROUPS
            ),
        ),
        "FLASHINFER",
        "attention backend",
    ),
    "ranks": (replace(ENGINE, ranks=1), "1 rank", "--tensor-parallel-size 2"),
    "hashes": (replace(ENGINE, hash_tokens=32), "32", "block sizes"),
    "vllm": (replace(ENGINE, vllm="0.32.1"), "0.32.1", "0.33.0"),
    "unknown vllm": (replace(ENGINE, vllm="dev"), "dev", "0.33.0"),
    "groups": (replace(ENGINE, groups=GROUPS[:1]), "1 group", "same model"),
    "number of a group": (with_group(index=7), "group 7", "same model"),
    "block size": (with_group(block_size=32), "32", "--block-size 16"),
    "size of a page": (with_group(page_format=MIXED), "4 sections", "cache dtype"),
    "type of a page": (
        with_group(page_format=PageFormat(ElementType.FP16, 2048, 16)),
        "2048 bytes of fp16",
        "same dtype",
    ),
}


@pytest.mark.parametrize("what", DIFFERENCES)
def test_a_difference_is_reported_with_the_required_value(what: str) -> None:
    engine, told, needed = DIFFERENCES[what]
    found = mismatches(MANIFEST, engine)
    assert found
    assert any(told in one and needed in one for one in found), found
    assert all(one.islower() or ": " in one for one in found)


def test_mismatches_shared_by_all_groups_are_listed_once() -> None:
    assert len(mismatches(MANIFEST, with_fingerprint(model="b" * 32))) == 1


def test_many_settings_are_counted() -> None:
    engine = with_config(**{f"setting_{n:02}": n for n in range(30)})
    (found,) = mismatches(MANIFEST, engine)
    assert "and 18 more" in found


def test_all_differences_are_reported_together() -> None:
    engine = EngineIdentity(1, 32, "0.30.0", (replace(GROUPS[0], index=3, block_size=8),))
    assert len(mismatches(MANIFEST, engine)) == 4
    engine = replace(engine, groups=(replace(GROUPS[0], index=3, block_size=8), GROUPS[1]))
    assert len(mismatches(MANIFEST, engine)) == 5


def test_the_tokens_of_a_page_format_are_not_a_difference() -> None:
    """An engine whose page format has another number of tokens can use the snapshot, because only
    codecs use that number."""
    change: Callable[[int], PageFormat] = lambda tokens: replace(BF16, tokens=tokens)  # noqa: E731
    assert mismatches(MANIFEST, with_group(page_format=change(0))) == []

"""Mismatches between a snapshot and an engine that would make the snapshot's pages invalid.

The module also computes the difference between two snapshots: what they share, and what only one of
them has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from tiered_kv.codecs.base import PageFormat
from tiered_kv.formatting import count
from tiered_kv.json_fields import plain
from tiered_kv.vllm_versions import parse_version

from .manifest import Manifest, SnapshotGroup, group_fields

MOST_NAMES = 12
"""Maximum number of settings that a message names."""


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """The properties of an engine that decide whether it can use a snapshot's pages.

    Attributes:
        ranks: number of tensor-parallel ranks.
        hash_tokens: tokens per block hash.
        vllm: version of vLLM.
        groups: the engine's page groups.
    """

    ranks: int
    hash_tokens: int
    vllm: str
    groups: tuple[SnapshotGroup, ...]


def mismatches(manifest: Manifest, engine: EngineIdentity) -> list[str]:
    """List each mismatch between a snapshot and an engine, with what the engine would need. The
    list is empty if the engine can use the pages."""
    found = [*_engine_wide(manifest, engine)]
    if len(manifest.groups) == len(engine.groups):
        for number, (theirs, ours) in enumerate(zip(manifest.groups, engine.groups, strict=True)):
            found += _of_fingerprints(manifest, theirs.fingerprint, ours.fingerprint)
            found += _of_groups(number, theirs, ours)
    return list(dict.fromkeys(found))  # mismatches shared by all groups are listed once


def _engine_wide(manifest: Manifest, engine: EngineIdentity) -> Iterator[str]:
    if parse_version(manifest.vllm) != parse_version(engine.vllm):
        yield (
            f"it was taken from vLLM {manifest.vllm}, and this is vLLM {engine.vllm}: restore it "
            f"with a vLLM of the same first two version numbers as {manifest.vllm}"
        )
    if manifest.ranks != engine.ranks:
        yield (
            f"its pages are divided among {count(manifest.ranks, 'rank')}, and this engine has "
            f"{count(engine.ranks, 'rank')}: start it with --tensor-parallel-size {manifest.ranks}"
        )
    if manifest.hash_tokens != engine.hash_tokens:
        yield (
            f"its block hashes cover {manifest.hash_tokens} tokens each, and this engine's "
            f"{engine.hash_tokens}: the same block sizes are needed"
        )
    if len(manifest.groups) != len(engine.groups):
        yield (
            f"it has {count(len(manifest.groups), 'group')} of pages, and this engine "
            f"{count(len(engine.groups), 'group')}: the same model is needed, with the same "
            "settings of its KV cache"
        )


def _of_fingerprints(
    manifest: Manifest, theirs: Mapping[str, object], ours: Mapping[str, object]
) -> Iterator[str]:
    """Yield the mismatches in fields that all groups share."""
    dtype, cache_dtype = (_word(theirs.get(name)) for name in ("dtype", "cache_dtype"))
    known = {
        "model": ("its model weights are", f"load the weights of {manifest.model}"),
        "adapter": ("its LoRA adapter is", "load the same adapter, or none for both"),
        "dtype": (
            "its dtype is",
            f"start the engine with --dtype {dtype.removeprefix('torch.')}",
        ),
        "cache_dtype": (
            "its cache dtype is",
            f"start the engine with --kv-cache-dtype {cache_dtype}",
        ),
        "kv_scales": ("the scales of its KV are from", "they must have one source"),
    }

    def differences(names: Iterable[str]) -> Iterator[str]:
        for name in names:
            one, other = theirs.get(name), ours.get(name)
            if plain(one) != plain(other):
                what, needed = known.get(name, (f"its {name} is", "they must be the same"))
                yield f"{what} {_word(one)}, and this engine's {_word(other)}: {needed}"

    yield from differences(known)
    configs = (plain(each.get("config")) for each in (theirs, ours))
    names = [name or "all of it" for name, _ in _differences(*configs)]
    if names:
        more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
        yield (
            f"the configuration of its model differs in {', '.join(names[:MOST_NAMES])}{more}: "
            "start the engine with the same model and overrides"
        )
    others = {"config", "group", "block_size", "layout", "ranks", "hash_algorithm", "generation"}
    rest = (theirs.keys() | ours.keys()) - known.keys() - others
    yield from differences(sorted(rest))


def _of_groups(number: int, theirs: SnapshotGroup, ours: SnapshotGroup) -> Iterator[str]:
    of = f"group {number} of its pages"
    if theirs.index != ours.index:
        yield (
            f"{of} is the engine's group {theirs.index}, and here group {ours.index}: the same "
            "model is needed"
        )
    if theirs.block_size != ours.block_size:
        yield (
            f"{of} has blocks of {theirs.block_size} tokens, and this engine's of "
            f"{ours.block_size}: start it with --block-size {theirs.block_size}"
        )
    layouts = [_word(group.fingerprint.get("layout")) for group in (theirs, ours)]
    if layouts[0] != layouts[1]:
        yield (
            f"{of} has the layout {layouts[0]}, and this engine's {layouts[1]}: the same attention "
            "backend and KV cache layout are needed"
        )
    elif _told(theirs.page_format) != _told(ours.page_format):
        yield (
            f"{of} has pages of {_told(theirs.page_format)}, and this engine's of "
            f"{_told(ours.page_format)}: the same dtype and cache dtype are needed"
        )


def _differences(
    theirs: Any, ours: Any, name: str = ""
) -> Iterator[tuple[str, tuple[object, object]]]:
    """Yield the values that differ, each with its dotted name."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for key in sorted(theirs.keys() | ours.keys()):
            inner = f"{name}.{key}" if name else key
            if key in theirs and key in ours:
                yield from _differences(theirs[key], ours[key], inner)
            else:
                yield inner, (theirs.get(key), ours.get(key))
    elif isinstance(theirs, list) and isinstance(ours, list) and len(theirs) == len(ours):
        for at, (one, other) in enumerate(zip(theirs, ours, strict=True)):
            yield from _differences(one, other, f"{name}.{at}")
    elif theirs != ours:
        yield name, (theirs, ours)


def _told(page_format: PageFormat) -> str:
    sections = [f"{one.nbytes} bytes of {one.element.value}" for one in page_format.sections]
    told = " and ".join(sections) if len(sections) < 4 else f"{page_format.page_bytes} bytes"
    return told + f" in {len(sections)} sections" if len(sections) > 3 else told


def _word(value: object) -> str:
    text = str(value) if value not in (None, "") else "none"
    return text if len(text) <= 200 else f"{text[:200]}..."


_TOLD_APART = frozenset({"token_ids", "pages", "groups", "cache_salt"})


@dataclass(frozen=True, slots=True)
class Difference:
    """Difference between snapshots ``a`` and ``b``.

    Attributes:
        common_tokens: number of tokens in the common prefix.
        a_tokens: number of tokens of ``a`` after the prefix.
        b_tokens: number of tokens of ``b`` after the prefix.
        common_pages: number of pages that both have, compared by content.
        a_pages: number of pages that only ``a`` has.
        b_pages: number of pages that only ``b`` has.
        fields: values of ``a`` and ``b`` for each field of the manifest that differs; settings have
            dotted names. Salts are secret, so they are only reported as different.
    """

    common_tokens: int
    a_tokens: int
    b_tokens: int
    common_pages: int
    a_pages: int
    b_pages: int
    fields: Mapping[str, tuple[object, object]]


def difference(a: Manifest, b: Manifest) -> Difference:
    """Compare two snapshots."""
    common = _common(a.token_ids, b.token_ids)
    a_pages, b_pages = ({page.sha256 for page in one.pages} for one in (a, b))
    return Difference(
        common_tokens=common,
        a_tokens=len(a.token_ids) - common,
        b_tokens=len(b.token_ids) - common,
        common_pages=len(a_pages & b_pages),
        a_pages=len(a_pages - b_pages),
        b_pages=len(b_pages - a_pages),
        fields=dict(_fields(a, b)),
    )


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the common prefix of two contexts, tokens."""
    for at, (one, other) in enumerate(zip(a, b, strict=False)):
        if one != other:
            return at
    return min(len(a), len(b))


def _fields(a: Manifest, b: Manifest) -> Iterator[tuple[str, tuple[object, object]]]:
    for name in (field.name for field in fields(Manifest)):
        if name not in _TOLD_APART:
            yield from _differences(plain(getattr(a, name)), plain(getattr(b, name)), name)
    if a.cache_salt != b.cache_salt:
        yield "cache_salt", (_salt(a.cache_salt, "a salt"), _salt(b.cache_salt, "another salt"))
    yield from _differences(
        list(map(group_fields, a.groups)), list(map(group_fields, b.groups)), "groups"
    )


def _salt(salt: str | None, word: str) -> str | None:
    return None if salt is None else word

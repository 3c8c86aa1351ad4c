"""Difference between two snapshots: what they have in common, and what each has alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from .manifest import Manifest, SnapshotGroup
from .strict_json import plain

_TOLD_APART = frozenset({"token_ids", "pages", "groups", "cache_salt"})


@dataclass(frozen=True, slots=True)
class Difference:
    """Difference between snapshots ``a`` and ``b``.

    Attributes:
        common_tokens: tokens that both begin with.
        a_tokens: tokens of ``a`` after those.
        b_tokens: tokens of ``b`` after those.
        common_pages: pages, by their bytes, that both have.
        a_pages: pages that ``a`` alone has.
        b_pages: pages that ``b`` alone has.
        fields: values of ``a`` and ``b`` of each field of the manifest that differs, settings by
            their dotted names. Salts are secret, and only told apart.
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
    """Number of tokens that both begin with."""
    for at, (one, other) in enumerate(zip(a, b, strict=False)):
        if one != other:
            return at
    return min(len(a), len(b))


def _fields(a: Manifest, b: Manifest) -> Iterator[tuple[str, tuple[object, object]]]:
    for field in fields(Manifest):
        if field.name not in _TOLD_APART:
            yield from _differing(
                field.name, plain(getattr(a, field.name)), plain(getattr(b, field.name))
            )
    if a.cache_salt != b.cache_salt:
        yield "cache_salt", (_salt(a.cache_salt, "a salt"), _salt(b.cache_salt, "another salt"))
    yield from _differing("groups", *([_group(one) for one in each.groups] for each in (a, b)))


def _differing(name: str, a: Any, b: Any) -> Iterator[tuple[str, tuple[object, object]]]:
    if isinstance(a, dict) and isinstance(b, dict):
        for key in sorted(a.keys() | b.keys()):
            yield from _differing(f"{name}.{key}", a.get(key), b.get(key))
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for at, (one, other) in enumerate(zip(a, b, strict=True)):
            yield from _differing(f"{name}.{at}", one, other)
    elif a != b:
        yield name, (a, b)


def _salt(salt: str | None, word: str) -> str | None:
    return None if salt is None else word


def _group(group: SnapshotGroup) -> dict[str, Any]:
    return {
        "index": group.index,
        "block_size": group.block_size,
        "page_bytes": group.page_format.page_bytes,
        "sections": [[one.element.value, one.nbytes] for one in group.page_format.sections],
        "fingerprint": plain(group.fingerprint),
    }

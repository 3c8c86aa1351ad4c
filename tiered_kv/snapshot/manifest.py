"""Manifest of a snapshot: everything but the bytes of its pages.

It is one object of JSON in ASCII. ``sha256`` is of all its other fields, written with sorted
names and without spaces, so that damage is noticed and no program need keep the text as it was.
A page's row has its digests on all ranks: ``[group, block, key, [sha256, ...]]``, in the order of
groups and blocks.

Reading trusts nothing: any bytes give a manifest that agrees with itself or ``SnapshotError``.
Groups of which only the last tokens count have few pages; which pages an engine needs it must ask
its own groups.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from tiered_kv.codecs.base import ElementType, PageFormat, Section
from tiered_kv.errors import TieredKVError

from .strict_json import (
    Fields,
    canonical,
    checked_text,
    checked_whole,
    parse,
    plain,
    plain_text,
)

FORMAT = "tiered-kv snapshot"
VERSION = 1
MOST_PAGE_BYTES = 1 << 30
MOST_RANKS = 4096
MOST_GROUPS = 256
MOST_PARENTS = 1000
MOST_SECONDS = 1e12
MOST_TOKEN = (1 << 31) - 1
MOST_KEY_BYTES = 255

_SHA256 = re.compile(r"[0-9a-f]{64}")
_KEY = re.compile(rf"(?:[0-9a-f]{{2}}){{0,{MOST_KEY_BYTES}}}")
_ELEMENTS = {element.value: element for element in ElementType}


class SnapshotError(TieredKVError):
    """A snapshot that cannot be used or made; one sentence says why and what would be needed."""


@dataclass(frozen=True, slots=True)
class SnapshotGroup:
    """A group of pages.

    Attributes:
        index: the engine's number for the group.
        block_size: length of a page, tokens.
        page_format: format of a page on one rank.
        fingerprint: fields of ``tiered_kv.keys.Fingerprint`` in words, without ``generation`` and
            ``hash_algorithm``: whoever restores computes keys anew.
    """

    index: int
    block_size: int
    page_format: PageFormat
    fingerprint: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class SnapshotPage:
    """A page on one rank.

    Attributes:
        group: position in ``Manifest.groups``.
        block: number in the job's block table.
        rank: rank that had it.
        sha256: digest of its bytes, hexadecimal.
        key: its key in the server that it was taken from, hexadecimal.
    """

    group: int
    block: int
    rank: int
    sha256: str
    key: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """Contents of a manifest.

    Attributes:
        created: seconds since 1970.
        tiered_kv: version of this package that made it.
        vllm: version of vLLM that it was taken from.
        model: name of the model there.
        ranks: tensor-parallel ranks.
        hash_tokens: tokens of a block hash.
        groups: groups of pages.
        token_ids: tokens of the context.
        kv_tokens: number of tokens, from the first on, that have KV in the pages.
        prompt_tokens: number of tokens that are the last turn's prompt; the rest is its answer so
            far.
        job: name of the job.
        turns: turns that the job has had.
        parents: names of the jobs that it was forked or restored from, oldest first.
        cache_salt: salt of its last turn.
        exact: True if it holds everything that the next token depends on.
        sampling: parameters of the last turn.
        pages: pages of all ranks.
        stored_bytes: size of the files of its pages.
        shared_bytes: number of these bytes that other snapshots of the same root had already.
    """

    created: float
    tiered_kv: str
    vllm: str
    model: str
    ranks: int
    hash_tokens: int
    groups: tuple[SnapshotGroup, ...]
    token_ids: tuple[int, ...]
    kv_tokens: int
    prompt_tokens: int
    job: str
    turns: int
    parents: tuple[str, ...]
    cache_salt: str | None
    exact: bool
    sampling: Mapping[str, object]
    pages: tuple[SnapshotPage, ...]
    stored_bytes: int
    shared_bytes: int


def dump(manifest: Manifest) -> bytes:
    """Write a manifest.

    Raises:
        SnapshotError: it does not agree with itself, or is too large to be read again.
    """
    try:
        fields = _fields(manifest)
        digest = sha256(canonical(fields)).hexdigest()
        data = canonical({"sha256": digest, **fields}) + b"\n"
        _read(data)  # what could not be read again must not be written
    except ValueError as error:
        raise SnapshotError(
            f"a snapshot of job {manifest.job!r:.80} has no place: {error}"
        ) from None
    return data


def load(data: bytes) -> Manifest:
    """Read a manifest.

    Raises:
        SnapshotError: damaged, of another version, or not in agreement with itself.
    """
    try:
        return _read(data)
    except ValueError as error:
        raise SnapshotError(
            f"the manifest cannot be used: {error}; a whole copy of the snapshot is needed"
        ) from None


def is_sha256(text: object) -> bool:
    """True if a text can be the digest of a page."""
    return isinstance(text, str) and _SHA256.fullmatch(text) is not None


# -- writing ------------------------------------------------------------------------------


def _fields(manifest: Manifest) -> dict[str, object]:
    return {
        "format": FORMAT,
        "version": VERSION,
        "created": manifest.created,
        "tiered_kv": plain_text(manifest.tiered_kv),
        "vllm": plain_text(manifest.vllm),
        "model": plain_text(manifest.model),
        "ranks": manifest.ranks,
        "hash_tokens": manifest.hash_tokens,
        "groups": [_group_fields(group) for group in manifest.groups],
        "token_ids": list(map(int, manifest.token_ids)),
        "kv_tokens": manifest.kv_tokens,
        "prompt_tokens": manifest.prompt_tokens,
        "job": manifest.job,
        "turns": manifest.turns,
        "parents": list(manifest.parents),
        "cache_salt": manifest.cache_salt,
        "exact": manifest.exact,
        "sampling": plain(manifest.sampling),
        "pages": list(_rows(manifest.pages, manifest.ranks)),
        "stored_bytes": manifest.stored_bytes,
        "shared_bytes": manifest.shared_bytes,
    }


def _group_fields(group: SnapshotGroup) -> dict[str, object]:
    of = group.page_format
    return {
        "index": group.index,
        "block_size": group.block_size,
        "element": of.element.value,
        "page_bytes": of.page_bytes,
        "tokens": of.tokens,
        "sections": [[section.element.value, section.nbytes] for section in of.sections],
        "fingerprint": plain(group.fingerprint),
    }


def _rows(pages: Iterable[SnapshotPage], ranks: int) -> Iterator[list[object]]:
    """Rows of pages.

    Raises:
        ValueError: a rank lacks a page, has it twice, or has another key for it.
    """
    rows: dict[tuple[int, int], tuple[str, dict[int, str]]] = {}
    for page in pages:
        key, digests = rows.setdefault((page.group, page.block), (page.key, {}))
        where = f"block {page.block} of group {page.group}"
        if page.rank in digests:
            raise ValueError(f"rank {page.rank} has {where} twice")
        if page.key != key:
            raise ValueError(f"ranks have unlike keys for {where}")
        digests[page.rank] = page.sha256
    for (group, block), (key, digests) in sorted(rows.items()):
        if sorted(digests) != list(range(ranks)):
            raise ValueError(
                f"ranks {sorted(digests)} have block {block} of group {group}, where all "
                f"{ranks} must"
            )
        yield [group, block, key, [digests[rank] for rank in range(ranks)]]


# -- reading ------------------------------------------------------------------------------


def _read(data: bytes) -> Manifest:
    found = parse(data)
    if not isinstance(found, dict):
        raise ValueError("it is no object")
    fields = Fields(found)
    if fields.take("format") != FORMAT:
        raise ValueError("it is no manifest of a snapshot")
    version = fields.take("version")
    if version != VERSION or type(version) is not int:
        raise SnapshotError(
            f"the snapshot is of version {version!r:.40}, and version {VERSION} is known here: a "
            "version of tiered-kv is needed that knows the other"
        )
    digest = fields.text("sha256")
    rest = {name: value for name, value in found.items() if name != "sha256"}
    if sha256(canonical(rest)).hexdigest() != digest:
        raise ValueError("it is damaged")
    ranks = fields.whole("ranks", 1, MOST_RANKS)
    groups = _groups(fields.items("groups"))
    token_ids = _token_ids(fields.items("token_ids"))
    kv_tokens = fields.whole("kv_tokens", 0, len(token_ids))
    stored_bytes = fields.whole("stored_bytes")
    salt = fields.take("cache_salt")
    parents = fields.items("parents")
    if len(parents) > MOST_PARENTS:
        raise ValueError(f"it has more than {MOST_PARENTS} parents")
    manifest = Manifest(
        created=fields.real("created", 0, MOST_SECONDS),
        tiered_kv=fields.text("tiered_kv"),
        vllm=fields.text("vllm"),
        model=fields.text("model"),
        ranks=ranks,
        hash_tokens=fields.whole("hash_tokens", 1),
        groups=groups,
        token_ids=token_ids,
        kv_tokens=kv_tokens,
        prompt_tokens=fields.whole("prompt_tokens", 0, len(token_ids)),
        job=fields.text("job"),
        turns=fields.whole("turns"),
        parents=tuple(checked_text(one, "parents") for one in parents),
        cache_salt=None if salt is None else checked_text(salt, "cache_salt"),
        exact=fields.flag("exact"),
        sampling=fields.settings("sampling"),
        pages=tuple(_pages(fields.items("pages"), groups, ranks, kv_tokens)),
        stored_bytes=stored_bytes,
        shared_bytes=fields.whole("shared_bytes", 0, stored_bytes),
    )
    fields.done()
    return manifest


def _groups(found: list[object]) -> tuple[SnapshotGroup, ...]:
    if not 1 <= len(found) <= MOST_GROUPS:
        raise ValueError(f"it has {len(found)} groups, and 1 to {MOST_GROUPS} can be")
    groups = tuple(map(_group, found))
    if len({group.index for group in groups}) != len(groups):
        raise ValueError("two groups have one number")
    return groups


def _group(found: object) -> SnapshotGroup:
    fields = Fields(found)
    index, block_size = fields.whole("index"), fields.whole("block_size", 1)
    told = (fields.text("element"), fields.whole("page_bytes", 1, MOST_PAGE_BYTES))
    tokens = fields.whole("tokens", 0, (1 << 32) - 1)
    sections = tuple(map(_section, fields.items("sections")))
    page_format = PageFormat.of(sections, tokens) if sections else None
    if (
        page_format is None
        or page_format.sections != sections
        or (page_format.element.value, page_format.page_bytes) != told
    ):
        raise ValueError("the sections of a page are not those of the page")
    fingerprint = fields.settings("fingerprint")
    fields.done()
    return SnapshotGroup(index, block_size, page_format, fingerprint)


def _section(found: object) -> Section:
    if not isinstance(found, list) or len(found) != 2:
        raise ValueError("a section is no pair")
    element = _ELEMENTS.get(checked_text(found[0], "sections"))
    if element is None:
        raise ValueError(f"a section of type {found[0]!r:.40}, not known here")
    return Section(element, checked_whole(found[1], "sections", 1, MOST_PAGE_BYTES))


def _token_ids(found: list[Any]) -> tuple[int, ...]:
    if found:
        if set(map(type, found)) != {int}:
            raise ValueError("a token is no whole number")
        if min(found) < 0 or max(found) > MOST_TOKEN:
            raise ValueError(f"a token is not between 0 and {MOST_TOKEN}")
    return tuple(found)


def _pages(
    rows: list[object], groups: tuple[SnapshotGroup, ...], ranks: int, kv_tokens: int
) -> Iterator[SnapshotPage]:
    blocks = [-(-kv_tokens // group.block_size) for group in groups]
    before = (-1, -1)
    for row in rows:
        if not isinstance(row, list) or len(row) != 4:
            raise ValueError("a page has no row of four")
        group = checked_whole(row[0], "group of a page", 0, len(groups) - 1)
        block = checked_whole(row[1], "block of a page", 0, blocks[group] - 1)
        key, digests = row[2:]
        if not isinstance(key, str) or _KEY.fullmatch(key) is None:
            raise ValueError("the key of a page is not hexadecimal")
        if not isinstance(digests, list) or len(digests) != ranks:
            raise ValueError(f"a page is not on each of {ranks} ranks")
        if not all(map(is_sha256, digests)):
            raise ValueError("a digest is none of SHA-256")
        if (group, block) <= before:
            raise ValueError("pages are twice there or out of order")
        before = (group, block)
        for rank, digest in enumerate(digests):
            yield SnapshotPage(group, block, rank, digest, key)

"""Manifest of a snapshot: everything except the bytes of its pages.

It is one JSON object in ASCII. ``sha256`` is the digest of all its other fields, written with
sorted names and without spaces, so that damage is detected and programs need not preserve the exact
text. A page's row has its digests on all ranks: ``[group, block, key, [sha256, ...]]``, in the
order of groups and blocks.

The reader trusts nothing: any bytes either give a consistent manifest or raise ``SnapshotError``.
Groups that need only the last tokens have few pages. The pages that an engine needs are determined
by its own groups.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from hashlib import sha256

from tiered_kv.codecs.base import ElementType, PageFormat, Section
from tiered_kv.errors import TieredKVError
from tiered_kv.json_fields import (
    Fields,
    canonical,
    exactly,
    flag,
    items,
    mapping,
    parse,
    plain,
    plain_text,
    real,
    settings,
    text,
    whole,
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
    """A snapshot that cannot be used or created. The message says why, and what is needed."""


@dataclass(frozen=True, slots=True)
class SnapshotGroup:
    """A page group of the engine, whose pages all have the same format.

    Attributes:
        index: the engine's number for the group.
        block_size: length of a page, tokens.
        page_format: format of a page on one rank.
        fingerprint: fields of ``tiered_kv.keys.Fingerprint``, without ``generation`` and
            ``hash_algorithm``, because a restore recomputes all keys.
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
        block: index in the job's block table.
        rank: rank to which the page belongs.
        sha256: digest of the page's bytes, hexadecimal.
        key: the page's key in the server from which the snapshot was taken, hexadecimal.
    """

    group: int
    block: int
    rank: int
    sha256: str
    key: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """Contents of a snapshot's manifest.

    Attributes:
        created: time of creation, seconds since 1970.
        tiered_kv: version of this package that created the snapshot.
        vllm: version of vLLM from which the snapshot was taken.
        model: name of the model that vLLM served.
        ranks: number of tensor-parallel ranks.
        hash_tokens: tokens per block hash.
        groups: the engine's page groups.
        token_ids: tokens of the context.
        kv_tokens: number of leading tokens that have KV in the pages.
        prompt_tokens: number of tokens of the last turn's prompt; the other tokens are the turn's
            output so far.
        job: name of the job.
        turns: number of turns that the job has had.
        parents: names of the jobs that the job was forked or restored from, oldest first.
        cache_salt: cache salt of the job's last turn; None if the turn had no salt.
        exact: True if the snapshot contains everything that the next token depends on.
        sampling: sampling parameters of the last turn.
        pages: pages of all ranks.
        stored_bytes: size of the files of the pages, bytes.
        shared_bytes: size of the files of pages that other snapshots of the same root already had,
            bytes.
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
    """Serialize a manifest.

    Raises:
        SnapshotError: the manifest is inconsistent, or too large to be read again.
    """
    try:
        values = _fields(manifest)
        digest = sha256(canonical(values)).hexdigest()
        data = canonical({"sha256": digest, **values}) + b"\n"
        _read(data)  # a manifest that cannot be read must not be written
    except ValueError as error:
        raise SnapshotError(
            f"the snapshot of job {manifest.job!r:.80} cannot be written: {error}"
        ) from None
    return data


def load(data: bytes) -> Manifest:
    """Parse a manifest.

    Raises:
        SnapshotError: the manifest is damaged, inconsistent, or has another version.
    """
    try:
        return _read(data)
    except ValueError as error:
        raise SnapshotError(
            f"the manifest is unusable ({error}): copy the snapshot again"
        ) from None


def is_sha256(digest: object) -> bool:
    """True if the value has the form of a page's digest."""
    return isinstance(digest, str) and _SHA256.fullmatch(digest) is not None


# -- writing ------------------------------------------------------------------------------


def _fields(manifest: Manifest) -> dict[str, object]:
    return {
        **{field.name: getattr(manifest, field.name) for field in fields(manifest)},
        "format": FORMAT,
        "version": VERSION,
        "tiered_kv": plain_text(manifest.tiered_kv),
        "vllm": plain_text(manifest.vllm),
        "model": plain_text(manifest.model),
        "groups": [group_fields(group) for group in manifest.groups],
        "token_ids": list(map(int, manifest.token_ids)),
        "sampling": plain(manifest.sampling),
        "pages": list(_rows(manifest.pages, manifest.ranks)),
    }


def group_fields(group: SnapshotGroup) -> dict[str, object]:
    """Return the fields of a group as they are written in JSON."""
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
    """Yield one row for each page, with its digests on all ranks.

    Raises:
        ValueError: a page is missing on a rank, occurs twice, or has different keys.
    """
    rows: dict[tuple[int, int], tuple[str, dict[int, str]]] = {}
    for page in pages:
        key, digests = rows.setdefault((page.group, page.block), (page.key, {}))
        where = f"block {page.block} of group {page.group}"
        if page.rank in digests:
            raise ValueError(f"rank {page.rank} lists {where} twice")
        if page.key != key:
            raise ValueError(f"the ranks have different keys for {where}")
        digests[page.rank] = page.sha256
    for (group, block), (key, digests) in sorted(rows.items()):
        if sorted(digests) != list(range(ranks)):
            raise ValueError(
                f"only ranks {sorted(digests)} of {ranks} have block {block} of group {group}"
            )
        yield [group, block, key, [digests[rank] for rank in range(ranks)]]


# -- reading ------------------------------------------------------------------------------


def _read(data: bytes) -> Manifest:
    if not data.isascii():
        raise ValueError("some bytes are not ASCII")
    found = mapping(parse(data))
    given = Fields(found)
    given.take("format", exactly, FORMAT)
    version = given.take("version", whole)
    if version != VERSION:
        raise SnapshotError(
            f"the snapshot has version {version!r:.40}, but this tiered-kv reads only "
            f"version {VERSION}: use a tiered-kv release that reads version {version!r:.40}"
        )
    digest = given.take("sha256", text)
    rest = {name: value for name, value in found.items() if name != "sha256"}
    if sha256(canonical(rest)).hexdigest() != digest:
        raise ValueError("the data does not match its digest, so it is damaged")
    ranks = given.take("ranks", whole, 1, MOST_RANKS)
    groups = given.take("groups", _groups)
    token_ids = given.take("token_ids", _token_ids)
    kv_tokens = given.take("kv_tokens", whole, 0, len(token_ids))
    stored_bytes = given.take("stored_bytes", whole)
    manifest = Manifest(
        created=given.take("created", real, 0, MOST_SECONDS),
        tiered_kv=given.take("tiered_kv", text),
        vllm=given.take("vllm", text),
        model=given.take("model", text),
        ranks=ranks,
        hash_tokens=given.take("hash_tokens", whole, 1),
        groups=groups,
        token_ids=token_ids,
        kv_tokens=kv_tokens,
        prompt_tokens=given.take("prompt_tokens", whole, 0, len(token_ids)),
        job=given.take("job", text),
        turns=given.take("turns", whole),
        parents=given.take("parents", _parents),
        cache_salt=given.take("cache_salt", _text_or_none),
        exact=given.take("exact", flag),
        sampling=given.take("sampling", settings),
        pages=given.take("pages", _pages, groups, ranks, kv_tokens),
        stored_bytes=stored_bytes,
        shared_bytes=given.take("shared_bytes", whole, 0, stored_bytes),
    )
    given.done()
    return manifest


def _parents(found: object) -> tuple[str, ...]:
    return tuple(map(text, items(found, 0, MOST_PARENTS)))


def _text_or_none(found: object) -> str | None:
    return None if found is None else text(found)


def _groups(found: object) -> tuple[SnapshotGroup, ...]:
    groups = tuple(map(_group, items(found, 1, MOST_GROUPS)))
    if len({group.index for group in groups}) != len(groups):
        raise ValueError("two groups have the same number")
    return groups


def _group(found: object) -> SnapshotGroup:
    given = Fields(found)
    index, block_size = given.take("index", whole), given.take("block_size", whole, 1)
    told = (given.take("element", text), given.take("page_bytes", whole, 1, MOST_PAGE_BYTES))
    tokens = given.take("tokens", whole, 0, (1 << 32) - 1)
    sections = given.take("sections", _sections)
    page_format = PageFormat.of(sections, tokens) if sections else None
    if (
        page_format is None
        or page_format.sections != sections
        or (page_format.element.value, page_format.page_bytes) != told
    ):
        raise ValueError("the sections do not match the page's element type and size")
    fingerprint = given.take("fingerprint", settings)
    given.done()
    return SnapshotGroup(index, block_size, page_format, fingerprint)


def _sections(found: object) -> tuple[Section, ...]:
    return tuple(map(_section, items(found)))


def _section(found: object) -> Section:
    name, nbytes = items(found, 2, 2)
    element = _ELEMENTS.get(text(name))
    if element is None:
        raise ValueError(f"unknown element type {name!r:.40}")
    return Section(element, whole(nbytes, 1, MOST_PAGE_BYTES))


def _token_ids(found: object) -> tuple[int, ...]:
    tokens = items(found)
    if tokens:
        if set(map(type, tokens)) != {int}:
            raise ValueError("a token id is not a whole number")
        if min(tokens) < 0 or max(tokens) > MOST_TOKEN:
            raise ValueError(f"a token id is not between 0 and {MOST_TOKEN}")
    return tuple(tokens)


def _pages(
    found: object, groups: tuple[SnapshotGroup, ...], ranks: int, kv_tokens: int
) -> tuple[SnapshotPage, ...]:
    blocks = [-(-kv_tokens // group.block_size) for group in groups]
    pages, before = list[SnapshotPage](), (-1, -1)
    for row in items(found):
        group, block, key, digests = items(row, 4, 4)
        if not whole(group) < len(groups):
            raise ValueError(f"a page belongs to group {group}, which does not exist")
        if not whole(block) < blocks[group]:
            raise ValueError(f"block {block} of group {group} is listed, but has no KV")
        if not isinstance(key, str) or _KEY.fullmatch(key) is None:
            raise ValueError("the key of a page is not a valid hexadecimal string")
        if not all(map(is_sha256, items(digests, ranks, ranks))):
            raise ValueError("the digest of a page is not a SHA-256 digest")
        if (group, block) <= before:
            raise ValueError("the list of pages has duplicates or is out of order")
        before = (group, block)
        pages += (
            SnapshotPage(group, block, rank, digest, key) for rank, digest in enumerate(digests)
        )
    return tuple(pages)

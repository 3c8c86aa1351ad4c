"""Reports of operations on jobs and of the contents of snapshots, as JSON and as table rows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from tiered_kv.formatting import moment, size
from tiered_kv.snapshot.manifest import Manifest, SnapshotGroup
from tiered_kv.snapshot.mismatch import Difference
from tiered_kv.status import JobForked, JobRestored, JobsRestored, SnapshotMade
from tiered_kv.top.route_client import other_version, read_answer
from tiered_kv.top.safe_text import harmless

Object = Mapping[str, Any]
Rows = list[list[str]]

MOST_NAMES = 20
"""Maximum number of names shown from a long list."""
_ID_CHARS = 1_000
"""Maximum length of a job id or a salt in a report, characters. Real ones are shorter."""


def made_rows(said: Object, place: str) -> Rows:
    """Return the rows of the server's answer to a snapshot request.

    Args:
        said: the answer.
        place: name or path of the snapshot.

    Raises:
        RouteError: the answer has an unexpected form. ``restored_rows`` and ``forked_rows`` raise
            it too.
    """
    made = read_answer(SnapshotMade, said, _ID_CHARS)
    return [
        ["snapshot", harmless(place, _ID_CHARS)],
        ["job", made.job],
        *_of_engine(made),
        ["pages", f"{made.pages:,}"],
        ["stored", _stored(made.stored_bytes, made.shared_bytes)],
        ["exact", _yes_or_no(made.exact)],
        ["captured in", f"{made.capture_ms:,.1f} ms"],
        ["durable after", f"{made.durable_ms:,.1f} ms"],
    ]


def restored_rows(said: Object) -> Rows:
    """Return the rows of the server's answer to a restore request, for each engine."""
    first = read_answer(JobsRestored, said, _ID_CHARS)
    rows = [["job", first.job]]
    for one, theirs in zip((first, *first.others), (said, *said.get("others", ())), strict=True):
        rows += [
            *_of_engine(one),
            ["pages", f"{one.pages:,} in {one.ms:,.1f} ms"],
            *_salt(one, theirs),
        ]
    return rows


def forked_rows(said: Object) -> Rows:
    """Return the rows of the server's answer to a fork request."""
    forked = read_answer(JobForked, said, _ID_CHARS)
    return [
        *(["job", job] for job in forked.jobs),
        *_of_engine(forked),
        ["extra pages", f"{forked.extra_pages:,}"],
        *_salt(forked, said),
    ]


def _of_engine(done: SnapshotMade | JobRestored | JobForked) -> Rows:
    return [["engine", str(done.engine)], ["tokens", _tokens(done.tokens, done.kv_tokens)]]


def _salt(done: JobRestored | JobForked, said: Object) -> Rows:
    """Return the row of the cache salt that turns must send; no row if turns need no salt. Raises
    RouteError if the salt contains characters that cannot be shown."""
    if done.cache_salt is None:
        return []
    if done.cache_salt != said["cache_salt"]:
        raise other_version("cache_salt contains invalid characters")
    return [["send cache_salt", done.cache_salt]]


def describe_snapshot(manifest: Manifest) -> dict[str, object]:
    """Return the description of a snapshot for ``inspect --json``, without the token ids and the
    salt.
    """
    return {
        "created": manifest.created,
        "tiered_kv": manifest.tiered_kv,
        "vllm": manifest.vllm,
        "model": manifest.model,
        "job": manifest.job,
        "turns": manifest.turns,
        "parents": list(manifest.parents),
        "tokens": len(manifest.token_ids),
        "kv_tokens": manifest.kv_tokens,
        "prompt_tokens": manifest.prompt_tokens,
        "exact": manifest.exact,
        "salted": manifest.cache_salt is not None,
        "sampling": dict(manifest.sampling),
        "ranks": manifest.ranks,
        "hash_tokens": manifest.hash_tokens,
        "groups": [_describe_group(group) for group in manifest.groups],
        "pages": len(manifest.pages),
        "raw_bytes": raw_bytes(manifest),
        "stored_bytes": manifest.stored_bytes,
        "shared_bytes": manifest.shared_bytes,
    }


def _describe_group(group: SnapshotGroup) -> dict[str, object]:
    return {
        "index": group.index,
        "block_size": group.block_size,
        "page_bytes": group.page_format.page_bytes,
        "fingerprint": dict(group.fingerprint),
    }


def raw_bytes(manifest: Manifest) -> int:
    """Return the size of all decoded pages, bytes."""
    sizes = [group.page_format.page_bytes for group in manifest.groups]
    return sum(sizes[page.group] for page in manifest.pages)


def snapshot_rows(manifest: Manifest, nbytes: int) -> Rows:
    """Return the rows of ``inspect``.

    Args:
        nbytes: size of the snapshot on disk, bytes.
    """
    answer = len(manifest.token_ids) - manifest.prompt_tokens
    return [
        ["job", harmless(manifest.job, _ID_CHARS)],
        ["from", ", ".join(_some(manifest.parents)) or "-"],
        ["made", moment(manifest.created, "seconds")],
        ["by", f"tiered-kv {harmless(manifest.tiered_kv)}, vLLM {harmless(manifest.vllm)}"],
        ["model", harmless(manifest.model)],
        ["turns", f"{manifest.turns:,}"],
        ["tokens", _tokens(len(manifest.token_ids), manifest.kv_tokens)],
        ["last turn", f"{manifest.prompt_tokens:,} of prompt, {answer:,} of answer"],
        ["sampling", ", ".join(_settings(manifest.sampling)) or "-"],
        ["exact", _yes_or_no(manifest.exact)],
        ["salted", _yes_or_no(manifest.cache_salt is not None)],
        ["ranks", str(manifest.ranks)],
        *(["group", _group_line(group)] for group in manifest.groups),
        ["pages", f"{len(manifest.pages):,}, {size(raw_bytes(manifest))} decoded"],
        ["stored", _stored(manifest.stored_bytes, manifest.shared_bytes)],
        ["on disk", size(nbytes)],
    ]


def _group_line(group: SnapshotGroup) -> str:
    page = f"pages of {group.block_size:,} tokens and {size(group.page_format.page_bytes)}"
    return f"{group.index}: {page}; {', '.join(_settings(group.fingerprint))}"


def difference_rows(found: Difference) -> Rows:
    """Return the rows of ``diff``: a name, and the value in each snapshot."""
    common, common_pages = f"{found.common_tokens:,}", f"{found.common_pages:,}"
    return [
        ["tokens in common", common, common],
        ["tokens after those", f"{found.a_tokens:,}", f"{found.b_tokens:,}"],
        ["pages in common", common_pages, common_pages],
        ["pages alone", f"{found.a_pages:,}", f"{found.b_pages:,}"],
        *([harmless(name), *map(_value, pair)] for name, pair in found.fields.items()),
    ]


def _settings(settings: Object) -> Iterator[str]:
    for name, value in list(settings.items())[:MOST_NAMES]:
        nested = isinstance(value, dict | list)
        yield f"{harmless(name)} {f'of {len(value)}' if nested else _value(value)}"
    if len(settings) > MOST_NAMES:
        yield "…"


def _value(value: object) -> str:
    return harmless(value if isinstance(value, str) else json.dumps(value))


def _some(names: tuple[str, ...]) -> Iterator[str]:
    """Yield the last names: the closest ancestors of the job."""
    if len(names) > MOST_NAMES:
        yield "…"
    yield from map(harmless, names[-MOST_NAMES:])


def _tokens(tokens: int, kv_tokens: int) -> str:
    return f"{tokens:,}, {kv_tokens:,} of them with KV"


def _stored(stored: int, shared: int) -> str:
    return f"{size(stored)}, {size(shared)} of it shared" if shared else size(stored)


def _yes_or_no(value: bool) -> str:
    return "yes" if value else "no"

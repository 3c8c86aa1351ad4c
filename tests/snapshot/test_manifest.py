"""Manifests: a written manifest is read back, and an invalid one is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.snapshot.made_snapshots import GROUPS, outline, with_pages
from tiered_kv.codecs.base import ElementType, PageFormat, Section
from tiered_kv.json_fields import canonical
from tiered_kv.snapshot.manifest import (
    Manifest,
    SnapshotError,
    SnapshotGroup,
    SnapshotPage,
    dump,
    load,
)

WHOLE = with_pages(outline())
"""A manifest in which every field is set."""

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
NUMBERS = st.integers(-(2**63) + 1, 2**63 - 1)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
SETTINGS = st.dictionaries(TEXTS, JSON, max_size=4)


@st.composite
def page_formats(draw: st.DrawFn) -> PageFormat:
    sections = draw(
        st.lists(
            st.builds(Section, st.sampled_from(ElementType), st.integers(1, 10**6)),
            min_size=1,
            max_size=4,
        )
    )
    return PageFormat.of(sections, draw(st.integers(0, 2**32 - 1)))


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    indices = draw(st.lists(st.integers(0, 99), min_size=1, max_size=3, unique=True))
    groups = tuple(
        SnapshotGroup(index, draw(st.integers(1, 64)), draw(page_formats()), draw(SETTINGS))
        for index in indices
    )
    token_ids = tuple(draw(st.lists(st.integers(0, 2**31 - 1), max_size=40)))
    kv_tokens = draw(st.integers(0, len(token_ids)))
    ranks = draw(st.integers(1, 3))
    pages = []
    for number, group in enumerate(groups):
        blocks = -(-kv_tokens // group.block_size)
        some = draw(st.sets(st.integers(0, blocks - 1), max_size=4)) if blocks else set()
        for block in sorted(some):
            key = draw(st.binary(max_size=48)).hex()
            for rank in range(ranks):
                digest = draw(st.binary(min_size=32, max_size=32)).hex()
                pages.append(SnapshotPage(number, block, rank, digest, key))
    stored_bytes = draw(st.integers(0, 2**63 - 1))
    return Manifest(
        created=draw(st.floats(0, 1e12)),
        tiered_kv=draw(TEXTS),
        vllm=draw(TEXTS),
        model=draw(TEXTS),
        ranks=ranks,
        hash_tokens=draw(st.integers(1, 10**6)),
        groups=groups,
        token_ids=token_ids,
        kv_tokens=kv_tokens,
        prompt_tokens=draw(st.integers(0, len(token_ids))),
        job=draw(TEXTS),
        turns=draw(st.integers(0, 10**6)),
        parents=tuple(draw(st.lists(TEXTS, max_size=3))),
        cache_salt=draw(st.none() | TEXTS),
        exact=draw(st.booleans()),
        sampling=draw(SETTINGS),
        pages=tuple(pages),
        stored_bytes=stored_bytes,
        shared_bytes=draw(st.integers(0, stored_bytes)),
    )


@given(manifests())
def test_a_written_manifest_is_read_back(manifest: Manifest) -> None:
    data = dump(manifest)
    assert load(data) == manifest
    assert dump(load(data)) == data


@given(manifests(), st.randoms(use_true_random=False))
def test_the_order_of_pages_does_not_matter(manifest: Manifest, order: Any) -> None:
    pages = list(manifest.pages)
    order.shuffle(pages)
    assert load(dump(replace(manifest, pages=tuple(pages)))) == manifest


def test_a_manifest_may_be_reformatted_by_another_program() -> None:
    laid_out = json.dumps(json.loads(dump(WHOLE)), indent=3).encode()
    assert load(laid_out) == WHOLE


def test_settings_are_read_back_as_json_values() -> None:
    odd = {
        "id2label": {0: "a", 1: "b"},
        "t": (1, 2),
        "far": float("-inf"),
        "kind": ElementType.BF16,
    }
    group = replace(GROUPS[0], fingerprint={**GROUPS[0].fingerprint, "config": odd})
    found = load(dump(replace(outline(), groups=(group,)))).groups[0].fingerprint["config"]
    assert found == {
        "id2label": {"0": "a", "1": "b"},
        "t": [1, 2],
        "far": "-inf",
        "kind": "ElementType.BF16",
    }


# -- refused manifests --------------------------------------------------------------------


def said(manifest: Manifest = WHOLE) -> dict[str, Any]:
    """Return a manifest as parsed JSON."""
    found: dict[str, Any] = json.loads(dump(manifest))
    return found


def sealed(found: dict[str, Any]) -> bytes:
    """Serialise a manifest with the correct digest for its content."""
    rest = {name: value for name, value in found.items() if name != "sha256"}
    digest = sha256(canonical(rest)).hexdigest()
    return json.dumps({**rest, "sha256": digest}).encode()


def refusal(data: bytes) -> str:
    with pytest.raises(SnapshotError) as caught:
        load(data)
    return str(caught.value)


def test_a_manifest_that_is_sealed_again_is_read() -> None:
    assert load(sealed(said())) == WHOLE


Change = Callable[[dict[str, Any]], object]
WRONG: dict[str, tuple[Change, str]] = {
    "format": (lambda m: m.update(format="zip"), "'zip' is not 'tiered-kv snapshot'"),
    "later version": (lambda m: m.update(version=2), "version 2"),
    "version of another type": (lambda m: m.update(version=True), "version"),
    "field too many": (lambda m: m.update(salt=1), "unknown field 'salt'"),
    "field too few": (lambda m: m.pop("job"), "missing field: job"),
    "no ranks": (lambda m: m.update(ranks=0), "ranks: "),
    "ranks that are true": (lambda m: m.update(ranks=True), "ranks: "),
    "more ranks than pages": (lambda m: m.update(ranks=3), "3 are allowed"),
    "fewer ranks than pages": (lambda m: m.update(ranks=1), "1 are allowed"),
    "no groups": (lambda m: m.update(groups=[]), "groups: the value has 0 items"),
    "two groups of one number": (lambda m: m["groups"][1].update(index=0), "the same number"),
    "block size": (lambda m: m["groups"][0].update(block_size=0), "block_size"),
    "page of nothing": (lambda m: m["groups"][0].update(page_bytes=0), "page_bytes"),
    "huge page": (lambda m: m["groups"][0].update(page_bytes=1 << 40), "page_bytes"),
    "page unlike its sections": (lambda m: m["groups"][0].update(page_bytes=2047), "sections"),
    "unknown element": (lambda m: m["groups"][0].update(sections=[["int3", 2048]]), "int3"),
    "uncut sections": (
        lambda m: m["groups"][0].update(sections=[["bf16", 1024], ["bf16", 1024]]),
        "sections",
    ),
    "negative section": (
        lambda m: m["groups"][0].update(sections=[["bf16", 4096], ["fp16", -2048]]),
        "sections",
    ),
    "token that is negative": (lambda m: m["token_ids"].__setitem__(3, -1), "token"),
    "token that is too large": (lambda m: m["token_ids"].__setitem__(3, 1 << 31), "token"),
    "token that is true": (lambda m: m["token_ids"].__setitem__(3, True), "token"),
    "token that is a float": (lambda m: m["token_ids"].__setitem__(3, 1.0), "token"),
    "more kv than tokens": (lambda m: m.update(kv_tokens=41), "kv_tokens: "),
    "less kv than pages": (lambda m: m.update(kv_tokens=32), "has no KV"),
    "prompt longer than tokens": (lambda m: m.update(prompt_tokens=41), "prompt_tokens: "),
    "parents": (lambda m: m.update(parents=["a", 3]), "parents: "),
    "salt": (lambda m: m.update(cache_salt=3), "cache_salt: "),
    "half a character": (lambda m: m.update(job="\ud800"), "a surrogate"),
    "long name": (lambda m: m.update(job="x" * 70000), "characters"),
    "sampling": (lambda m: m.update(sampling=[]), "sampling: "),
    "deep sampling": (
        lambda m: m.update(sampling=json.loads('{"a":' * 80 + "1" + "}" * 80)),
        "deeper",
    ),
    "huge number in sampling": (lambda m: m.update(sampling={"n": 10**400}), "sampling: "),
    "more shared than stored": (lambda m: m.update(shared_bytes=1001), "shared_bytes: "),
    "huge count": (lambda m: m.update(stored_bytes=10**100), "stored_bytes: "),
    "time": (lambda m: m.update(created=-1), "created: "),
    "page twice": (lambda m: m["pages"].insert(0, m["pages"][0]), "duplicates"),
    "pages out of order": (lambda m: m["pages"].reverse(), "order"),
    "page of no group": (lambda m: m["pages"][0].__setitem__(0, 2), "group 2"),
    "page of a negative group": (lambda m: m["pages"][0].__setitem__(0, -1), "-1 is below 0"),
    "block behind the kv": (lambda m: m["pages"][2].__setitem__(1, 3), "has no KV"),
    "row too short": (lambda m: m["pages"][0].pop(), "4 are allowed"),
    "row that is none": (lambda m: m["pages"].__setitem__(0, 7), "7 is not a list"),
    "digest that is short": (lambda m: m["pages"][0][3].__setitem__(0, "ab"), "SHA-256"),
    "digest with a slash": (lambda m: m["pages"][0][3].__setitem__(0, "../" + 61 * "a"), "SHA-256"),
    "digest in capitals": (lambda m: m["pages"][0][3].__setitem__(0, 64 * "A"), "SHA-256"),
    "digest with a line's end": (
        lambda m: m["pages"][0][3].__setitem__(0, 64 * "a" + "\n"),
        "SHA-256",
    ),
    "odd key": (lambda m: m["pages"][0].__setitem__(2, "abc"), "key"),
    "long key": (lambda m: m["pages"][0].__setitem__(2, "ab" * 300), "key"),
    "digests that are none": (lambda m: m["pages"][0].__setitem__(3, 5), "5 is not a list"),
}


@pytest.mark.parametrize("change", WRONG)
def test_an_invalid_manifest_with_the_right_digest_is_refused(change: str) -> None:
    found = said()
    WRONG[change][0](found)
    assert WRONG[change][1] in refusal(sealed(found))


def test_a_change_without_a_new_digest_is_damage() -> None:
    found = said()
    found["token_ids"][0] += 1
    assert "damaged" in refusal(json.dumps(found).encode())


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "Expecting value"),
        (b"[]", "not an object"),
        (b"null", "not an object"),
        (b'{"a": 1, "a": 1}', "duplicate name"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": -Infinity}', "-Infinity"),
        (b'{"a": 1e999}', "outside the range of a float"),
        (b'{"a": ' + b"9" * 5000 + b"}", "4300 digits"),
        (b"[" * 100_000 + b"]" * 100_000, "deeply"),
        (b'{"a":' * 50_000, "deeply"),
        ('{"a": "ä"}'.encode(), "ASCII"),
        (b"\xff\xfe", "ASCII"),
        (b'{"format": "tiered-kv snapshot", "version": 1}', "sha256"),
        (b'{"format": "tiered-kv snapshot", "version": 1, "sha256": ["x"]}', "not a string"),
    ],
)
def test_bytes_that_are_not_a_manifest_are_refused(data: bytes, why: str) -> None:
    assert why in refusal(data)


def test_a_manifest_of_more_than_64_mib_is_refused_before_it_is_parsed() -> None:
    assert "more than the maximum" in refusal(b" " * ((64 << 20) + 1))


BAD: dict[str, Callable[[Manifest], Manifest]] = {
    "a rank that lacks a page": lambda m: replace(m, pages=m.pages[1:]),
    "a page twice": lambda m: replace(m, pages=(*m.pages, m.pages[0])),
    "a key that is another on another rank": lambda m: replace(
        m, pages=(replace(m.pages[0], key="00"), *m.pages[1:])
    ),
    "a rank that there is not": lambda m: replace(m, ranks=1),
    "more kv than tokens": lambda m: replace(m, kv_tokens=99),
    "a number that is none": lambda m: replace(m, created=float("nan")),
}


@pytest.mark.parametrize("what", BAD)
def test_an_unreadable_manifest_is_not_written(what: str) -> None:
    with pytest.raises(SnapshotError):
        dump(BAD[what](WHOLE))

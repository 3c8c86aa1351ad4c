"""Keys are equal for equal bytes, and differ if anything that determines the bytes differs."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_kv.keys import UNIDENTIFIED, Fingerprint, page_keys, tail_key

BASE = Fingerprint(
    model="a" * 32,
    adapter="",
    dtype="bfloat16",
    cache_dtype="auto",
    kv_scales="checkpoint",
    config={"rope_theta": 10000.0, "rope_scaling": {"factor": 2.0, "rope_type": "yarn"}},
    group=0,
    block_size=16,
    layout="3x4096",
    ranks=1,
    hash_algorithm="sha256/",
    generation="",
)
CHANGES: dict[str, object] = {
    "model": "b" * 32,
    "adapter": "c" * 32,
    "dtype": "float16",
    "cache_dtype": "fp8",
    "kv_scales": "dynamic",
    "config": {"rope_theta": 10000.0, "rope_scaling": {"factor": 4.0, "rope_type": "yarn"}},
    "group": 1,
    "block_size": 32,
    "layout": "3x8192",
    "ranks": 2,
    "hash_algorithm": "sha256_cbor/",
    "generation": "5f",
}
TOKENS = st.lists(st.integers(0, 2**31), max_size=5)
EXTRAS = st.none() | st.tuples(st.text(max_size=3))


@pytest.mark.parametrize("field", [field.name for field in fields(Fingerprint)])
def test_every_field_changes_the_fingerprint(field: str) -> None:
    changed = replace(BASE, **{field: CHANGES[field]})  # type: ignore[arg-type]
    assert changed.digest() != BASE.digest()


def test_a_value_in_another_field_is_another_fingerprint() -> None:
    """Swapping the values of two fields changes the digest."""
    swapped = replace(BASE, model=BASE.dtype, dtype=BASE.model)
    assert swapped.digest() != BASE.digest()


def test_the_order_of_settings_does_not_matter() -> None:
    turned = replace(BASE, config=dict(reversed(list(BASE.config.items()))))
    assert turned.digest() == BASE.digest()


def test_a_fingerprint_is_the_same_in_every_process_and_version() -> None:
    """Pages on disk are found by their fingerprint. If this test fails, raise FORMAT_VERSION and
    update the expected values."""
    assert BASE.digest().hex() == "05f001fbfbef3df9158fb492e06ecdb6"
    assert tail_key(b"parent", [1, 2, 70000], ("salt",)).hex() == (
        "706172656e746d368e054393b8ebcb096deeba19852555cc89884b6af19b522599c46d531d0f"
    )


def test_a_page_is_named_by_its_fingerprint_and_its_block() -> None:
    fingerprint = BASE.digest()
    assert len(fingerprint) == 16
    key = page_keys(fingerprint, [b"hash"])[0]
    assert key == fingerprint + b"hash"


def test_a_tail_starts_with_the_fingerprint_of_the_previous_page() -> None:
    """A tail's key starts with the fingerprint in the previous page's key. Code that groups keys by
    fingerprint therefore groups tails with full pages."""
    parent = page_keys(BASE.digest(), [b"h" * 32])[0]
    assert tail_key(parent, [1], None)[:16] == BASE.digest()


@given(st.binary(min_size=16, max_size=52), TOKENS, EXTRAS)
def test_a_tail_has_the_same_key_for_the_same_context(
    parent: bytes, tokens: list[int], extra: object
) -> None:
    assert tail_key(parent, tokens, extra) == tail_key(parent, tuple(tokens), extra)


@given(
    st.sampled_from([b"p" * 16, b"q" * 16, b"p" * 15 + b"q"]), TOKENS, EXTRAS,
    st.sampled_from([b"p" * 16, b"q" * 16, b"p" * 15 + b"q"]), TOKENS, EXTRAS,
)  # fmt: skip
def test_tails_of_different_contexts_have_different_keys(
    parent: bytes, tokens: list[int], extra: object,
    other_parent: bytes, other_tokens: list[int], other_extra: object,
) -> None:  # fmt: skip
    same = (parent, tokens, extra) == (other_parent, other_tokens, other_extra)
    ours = tail_key(parent, tokens, extra)
    assert (ours == tail_key(other_parent, other_tokens, other_extra)) is same


def test_the_keys_of_a_tail_and_a_full_page_differ() -> None:
    fingerprint = BASE.digest()
    assert tail_key(fingerprint, [], None) != page_keys(fingerprint, [b""])[0]


def test_a_fingerprint_lasts_unless_it_is_of_a_generation_or_of_a_model_without_files() -> None:
    assert BASE.lasting
    assert not replace(BASE, generation="5f").lasting
    assert not replace(BASE, model=f"{UNIDENTIFIED}5f").lasting
    assert not replace(BASE, model=f"{UNIDENTIFIED}5f", generation="5f").lasting

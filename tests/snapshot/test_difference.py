"""The difference of two snapshots: tokens, pages and fields."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.snapshot.made_snapshots import GROUPS, outline, with_pages
from tiered_kv.snapshot.mismatch import difference

WHOLE = with_pages(outline(tokens=70))


def test_a_snapshot_does_not_differ_from_itself() -> None:
    found = difference(WHOLE, WHOLE)
    assert found.common_tokens == 70
    assert (found.a_tokens, found.b_tokens, found.a_pages, found.b_pages) == (0, 0, 0, 0)
    assert found.common_pages == len({page.sha256 for page in WHOLE.pages})
    assert found.fields == {}


def test_a_job_that_continued_has_more_tokens_and_pages() -> None:
    found = difference(with_pages(outline(tokens=33)), WHOLE)
    assert (found.common_tokens, found.a_tokens, found.b_tokens) == (33, 0, 37)
    assert found.a_pages == 0
    assert found.b_pages == len(WHOLE.pages) - found.common_pages
    assert set(found.fields) == {"kv_tokens", "prompt_tokens"}
    assert found.fields["kv_tokens"] == (32, 69)


def test_errors_name_the_fields() -> None:
    config: Any = GROUPS[0].fingerprint["config"]
    other = replace(GROUPS[0], fingerprint={**GROUPS[0].fingerprint, "config": {**config, "x": 1}})
    found = difference(
        WHOLE,
        replace(
            WHOLE,
            job="job-2",
            parents=("job-0", "job-1"),
            sampling={**WHOLE.sampling, "temperature": 1.0},
            groups=(other, GROUPS[1]),
        ),
    )
    assert dict(found.fields) == {
        "job": ("job-1", "job-2"),
        "parents": (["job-0"], ["job-0", "job-1"]),
        "sampling.temperature": (0.5, 1.0),
        "groups.0.fingerprint.config.x": (None, 1),
    }


def test_a_salt_is_not_revealed() -> None:
    found = difference(WHOLE, replace(WHOLE, cache_salt="secret"))
    assert found.fields == {"cache_salt": ("a salt", "another salt")}
    found = difference(WHOLE, replace(WHOLE, cache_salt=None))
    assert found.fields == {"cache_salt": ("a salt", None)}


@given(st.lists(st.integers(0, 2), max_size=30), st.lists(st.integers(0, 2), max_size=30))
def test_common_tokens_are_the_longest_common_beginning(a: list[int], b: list[int]) -> None:
    one, other = (replace(WHOLE, token_ids=tuple(tokens)) for tokens in (a, b))
    found = difference(one, other)
    n = found.common_tokens
    assert a[:n] == b[:n]
    assert a[n : n + 1] != b[n : n + 1] or not (a[n:] or b[n:])
    assert (found.a_tokens, found.b_tokens) == (len(a) - n, len(b) - n)

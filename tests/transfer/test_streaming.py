"""Runs are copied unchanged, wherever they start and end."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tiered_kv.transfer.streaming import STRIP, VECTOR, copy_runs

lengths = st.one_of(
    st.integers(0, 3 * VECTOR),
    st.integers(STRIP - VECTOR, 2 * STRIP + VECTOR),
    st.integers(0, 40 * STRIP),
)
gaps = st.integers(0, 2 * VECTOR)


@given(st.lists(st.tuples(lengths, gaps, gaps), max_size=6), st.integers(0, 99))
def test_every_run_is_copied_and_no_other_byte_changes(
    runs: list[tuple[int, int, int]], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    nbytes, before_to, before_source = np.array(runs, dtype=np.int64).reshape(-1, 3).T.copy()
    to_at = np.cumsum(before_to + nbytes) - nbytes
    source_at = np.cumsum(before_source + nbytes) - nbytes
    to, source = (
        rng.integers(0, 256, int((before + nbytes).sum()) + VECTOR, dtype=np.uint8)
        for before in (before_to, before_source)
    )
    expected, untouched = to.copy(), source.copy()
    for a, b, n in zip(to_at, source_at, nbytes, strict=True):
        expected[a : a + n] = source[b : b + n]
    order = rng.permutation(len(runs))

    copy_runs(to, to_at[order], source, source_at[order], nbytes[order])

    assert np.array_equal(to, expected)
    assert np.array_equal(source, untouched)


def test_a_source_may_be_read_only() -> None:
    source = np.arange(200, dtype=np.uint8)
    source.flags.writeable = False
    to = np.zeros(200, dtype=np.uint8)
    at, nbytes = np.array([3]), np.array([150])

    copy_runs(to, at, source, at, nbytes)

    assert np.array_equal(to[3:153], source[3:153])
    assert not to[:3].any()
    assert not to[153:].any()

"""How far a prompt agrees with what its job waited with."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tiered_kv.connectors.vllm.waits import MARK_EVERY, Marks


def hashes(context: str) -> list[bytes]:
    """As vLLM's: each covers all blocks before it."""
    return [context[: n + 1].encode() for n in range(len(context))]


@given(st.text("ab", max_size=60), st.text("ab", max_size=30), st.text("ab", max_size=30))
def test_contexts_agree_as_far_as_they_do_in_whole_steps(head: str, one: str, other: str) -> None:
    first, second = head + one, head + other
    pairs = zip(first, second, strict=False)
    agree = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
    common = Marks.of(hashes(first)).common_blocks(Marks.of(hashes(second)))
    assert common == agree // MARK_EVERY * MARK_EVERY


def test_nothing_is_known_of_a_context_that_was_forgotten() -> None:
    assert Marks().common_blocks(Marks.of(hashes("a" * 40))) == 0

"""Ends of contexts: how much KV of a finished request may be kept, and the boundaries of its
prompt."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.runtime.pages.test_hits import facts_of, group
from tiered_kv.connectors.runtime.base import EngineFacts
from tiered_kv.connectors.runtime.pages.saves import (
    kept_tokens,
    last_boundary,
    prompt_boundaries,
    state_tokens,
)
from tiered_kv.page_group import KvKind, KvReach

FULL, STATE, WINDOW = KvReach(), KvReach(KvKind.STATE), KvReach(KvKind.WINDOW, 20)


def model(*reaches: KvReach, **changes: Any) -> EngineFacts:
    return replace(facts_of([group(i, 4, one) for i, one in enumerate(reaches)]), **changes)


def over(computed: int, under_way: int = 0, *, cut: bool = False, tokens: int = 50) -> Any:
    return SimpleNamespace(
        num_tokens=tokens,
        num_computed_tokens=computed,
        num_in_flight_tokens=under_way,
        text_cut=cut,
    )


@pytest.mark.parametrize(
    ("request_", "state", "why"),
    [
        (over(49), 49, "the last token was sampled and never computed"),
        (over(50, 1), 50, "the step under way takes it in"),
        (over(49, 1), None, "that step takes another one in"),
        (over(51, 2), None, "two steps are under way"),
        (over(50, 1, cut=True), None, "the client may have less than all tokens"),
        (over(0), 0, "it was preempted, and has nothing"),
    ],
)
def test_a_state_is_kept_only_if_its_tokens_are_known(
    request_: Any, state: int | None, why: str
) -> None:
    assert state_tokens(request_, model(FULL, STATE)) == state, why


def test_with_speculation_no_running_state_is_kept() -> None:
    assert state_tokens(over(49), model(FULL, STATE, speculates=True)) is None


@pytest.mark.parametrize(
    ("request_", "kept"), [(over(49), 49), (over(50, 1), 49), (over(53, 1), 49)]
)
def test_kv_of_the_last_token_is_never_assumed(request_: Any, kept: int) -> None:
    assert kept_tokens(request_) == kept


def prompt(tokens: int, shared: int = 0) -> Any:
    return SimpleNamespace(num_prompt_tokens=tokens, shared_tokens=shared)


def test_boundaries_of_a_prompt_are_hit_positions_fork_points_and_its_end() -> None:
    assert prompt_boundaries(prompt(50, shared=22), model(FULL, WINDOW)) == [50, 48, 20]
    assert prompt_boundaries(prompt(50, shared=22), model(FULL, STATE)) == [48, 20]
    assert prompt_boundaries(prompt(48), model(FULL, WINDOW)) == [48, 44]
    assert prompt_boundaries(prompt(3), model(FULL, STATE)) == []


def test_with_full_attention_alone_every_block_is_a_boundary() -> None:
    assert prompt_boundaries(prompt(50, shared=22), model(FULL)) == []


def test_the_last_block_is_left_out_if_drafts_depend_on_the_next_token() -> None:
    drafts = facts_of([group(0, 4, FULL, draft_tokens=1), group(1, 4, STATE)])
    assert last_boundary(prompt(50), model(FULL, STATE)) == 48
    assert last_boundary(prompt(50), drafts) == 44
    assert last_boundary(prompt(5), drafts) == 0

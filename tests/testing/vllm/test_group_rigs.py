"""The rig models vLLM's handling of several KV groups, and detects errors in each."""

from __future__ import annotations

from typing import Any

import pytest

from tests.runtime.conftest import MakeRig
from tests.testing.vllm.models import CHUNK, FULL, LARGE_WINDOW, MODELS, STATE, WINDOW
from tiered_kv.connectors.vllm.kv_groups import planning
from tiered_kv.page_group import KvKind
from tiered_kv.testing.checked_kv import WrongKV, expected, text
from tiered_kv.testing.vllm.groups import GroupSpec, group_pages
from tiered_kv.testing.vllm.rig import Rig

PROMPT = text(200, seed=1)


def hits(rig: Rig) -> dict[str, int]:
    """Return a dict that receives, when each request starts, the number of its tokens found in the
    cache."""
    found: dict[str, int] = {}
    update = rig.runner.update

    def watched(output: Any) -> None:
        for new in output.scheduled_new_reqs:
            found[new.req_id] = new.num_computed_tokens
        update(output)

    rig.runner.update = watched  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "ahead"])
def test_a_prompt_is_found_again(make_rig: MakeRig, model: str, ahead: bool) -> None:
    rig = make_rig(extra=None, groups=MODELS[model], ahead=ahead)
    found = hits(rig)
    for name in "first", "again":
        assert rig.ask(name, PROMPT, max_tokens=30) == expected(PROMPT, 30)
    assert found == {"first": 0, "again": 192}
    rig.check_clean()


@pytest.mark.parametrize("model", MODELS)
def test_answers_are_found_again_if_every_block_is_kept(make_rig: MakeRig, model: str) -> None:
    """A turn that continues an answer finds 224 tokens if every block is kept. With vLLM's default
    retention, which does not keep windows and states of answers, it finds 192."""
    for retention in 0, None:
        rig = make_rig(extra=None, groups=MODELS[model], retention=retention)
        found = hits(rig)
        longer = PROMPT + rig.ask("first", PROMPT, max_tokens=30) + text(20, seed=2)
        assert rig.ask("next", longer) == expected(longer, 4)
        kinds = {group.kind for group in MODELS[model]}
        is_sparse = retention == 0 and bool(kinds & {KvKind.WINDOW, KvKind.STATE})
        assert found["next"] == (192 if is_sparse else 224)
        rig.check_clean()


@pytest.mark.parametrize("model", MODELS)
def test_fill_leaves_nothing_to_find(make_rig: MakeRig, model: str) -> None:
    rig = make_rig(extra=None, groups=MODELS[model])
    found = hits(rig)
    rig.ask("first", PROMPT)
    rig.fill()
    rig.ask("again", PROMPT)
    assert found["again"] == 0


GROUPS = [(model, i) for model, groups in MODELS.items() for i in range(len(groups))]


@pytest.mark.parametrize(("model", "group"), GROUPS, ids=[f"{m}-{i}" for m, i in GROUPS])
def test_wrong_bytes_are_detected_in_the_group_that_needs_them(
    make_rig: MakeRig, model: str, group: int
) -> None:
    """One byte changes in the last block that a hit needs of a group. The rig reports wrong KV in
    that group."""
    rig = make_rig(extra=None, groups=MODELS[model])
    rig.add("first", PROMPT, max_tokens=2)
    rig.step()
    spec = MODELS[model][group]
    tables = [rig.table("first", i) for i in range(len(MODELS[model]))]
    block = tables[group][191 // spec.block_size]
    assert block
    rig.run()
    rig.page(block, group)[-1] ^= 1
    rig.add("again", PROMPT)
    with pytest.raises(WrongKV, match=rf"again: group {group} \({spec.kind.value}\)"):
        rig.run()


def test_blocks_outside_the_window_are_not_checked(make_rig: MakeRig) -> None:
    rig = make_rig(extra=None, groups=(FULL, WINDOW))
    rig.add("one", PROMPT, max_tokens=40)
    rig.step()
    old = set(rig.table("one", 1))
    for _ in range(30):
        rig.step()
    left = old - set(rig.table("one", 1)) - set(rig.table("one"))  # some blocks were reused
    assert left
    for block in left:
        rig.page(block, 1)[:] = 0
    rig.run()
    assert rig.outputs["one"] == expected(PROMPT, 40)


def test_states_of_different_lengths_are_distinct(make_rig: MakeRig) -> None:
    """The state after 200 tokens is put in place of the state after 201 tokens, and the rig detects
    it."""
    rig = make_rig(extra=None, groups=(FULL, STATE))
    rig.add("one", PROMPT, max_tokens=9)
    rig.step()  # up to the last full block
    rig.step()
    before = rig.page(rig.table("one", 1)[-1], 1).copy()
    rig.step()
    rig.page(rig.table("one", 1)[-1], 1)[:] = before
    with pytest.raises(
        WrongKV,
        match="the state after 201 tokens, but the block contains the state after 200 tokens",
    ):
        rig.step()


def test_a_hit_may_end_within_a_block(make_rig: MakeRig) -> None:
    """With a ``match_unit`` of 4, a prompt of 190 tokens is found again up to token 188, within a
    block. vLLM copies that block before it is filled further."""
    rig = make_rig(extra=None, groups=(FULL, STATE), match_unit=4)
    found = hits(rig)
    for name in "first", "again":
        assert rig.ask(name, PROMPT[:190]) == expected(PROMPT[:190], 4)
    assert found["again"] == 188
    rig.check_clean()


def test_hits_within_a_block_that_is_being_computed(make_rig: MakeRig) -> None:
    """vLLM 0.32 has a bug in this case.

    Two requests start in one step. The first one fills a block. The second one finds that block
    immediately, but no state at its end, so it continues from a state within the block. vLLM then
    copies the block for it before the step has computed any of it.
    """
    rig = make_rig(extra=None, groups=(FULL, STATE), match_unit=4)
    rig.ask("before", PROMPT[:29])
    rig.add("one", PROMPT)
    rig.add("other", PROMPT)
    with pytest.raises(WrongKV, match=r"other: group 0 .* first at token 16"):
        rig.run()


def test_a_single_group_keeps_its_kv_layout() -> None:
    (pages,) = group_pages([FULL], 8)
    assert (pages.page_bytes, pages.used_bytes, pages.token_bytes) == (128, 128, 8)


@pytest.mark.parametrize("sizes", [(16, 32), (16, 24), (32, 16)])
def test_pages_have_vllms_sizes(sizes: tuple[int, int]) -> None:
    """vLLM keeps the specs of all layers unchanged, and computes the same page sizes and used bytes
    as ``group_pages``."""
    specs = GroupSpec(block_size=sizes[0]), GroupSpec(KvKind.WINDOW, sizes[1], 40)
    groups = group_pages([*specs, GroupSpec(KvKind.STATE, min(sizes))], 8)
    layers = {pages.layer: pages.vllm_spec() for pages in groups}
    assert planning().unify_kv_cache_spec_page_size(layers) == layers
    for pages in groups:
        assert layers[pages.layer].page_size_bytes == pages.page_bytes
        assert layers[pages.layer].real_page_size_bytes == pages.used_bytes


def test_views_of_layers_share_one_allocation(make_rig: MakeRig) -> None:
    rig = make_rig(extra=None, groups=(FULL, LARGE_WINDOW, CHUNK, STATE))
    for pages in rig.groups:
        view = pages.view(rig.memory)
        assert view.untyped_storage().data_ptr() == rig.memory.untyped_storage().data_ptr()
        assert view.shape[0] == rig.options.blocks
        assert view[0].numel() * view.element_size() == pages.used_bytes


def test_states_need_the_smallest_blocks() -> None:
    with pytest.raises(ValueError, match="blocks of a state must have 16 tokens"):
        group_pages([FULL, GroupSpec(KvKind.STATE, 32)], 8)

"""Decoding requests are examined for full blocks only when there may be some, and several blocks
are saved by one order."""

from __future__ import annotations

import pytest

from tests.runtime.conftest import MakeRig
from tiered_kv.connectors.runtime.pages.saves import TOGETHER
from tiered_kv.testing.checked_kv import text


@pytest.mark.parametrize(
    ("block_size", "stride"),
    [(16, 256), (48, 240), (512, 512)],
    ids=["of short blocks", "that do not divide it", "of long blocks"],
)
def test_a_few_blocks_are_saved_together(make_rig: MakeRig, block_size: int, stride: int) -> None:
    """While a request decodes, the full blocks of up to 256 tokens are saved together, or one block
    if it is longer than that. The request is not examined before these blocks may be full."""
    rig = make_rig(blocks=40 * 16 // block_size + 8, block_size=block_size, max_model_len=2048)
    prompt = 3 * block_size // 2
    rig.add("long", text(prompt, seed=1), max_tokens=2 * stride + 100)
    orders, computed = dict[int, int](), 0
    while computed < prompt + 2 * stride + 50:
        output = rig.step()
        computed += output.num_scheduled_tokens["long"]
        if computed <= prompt:
            continue
        if pages := sum(len(order.blocks) for order in output.kv_connector_metadata.orders.saves):
            orders[computed] = pages
            assert rig.half.step % TOGETHER == 0
    full = block_size + stride  # the prompt filled one block
    assert min(orders) in range(full, full + TOGETHER)
    assert set(orders.values()) == {stride // block_size}
    due = rig.turn("long").save.due
    assert due is not None
    filled = block_size + stride * len(orders)
    assert computed + due - rig.half.step in range(filled + stride, filled + stride + TOGETHER)
    rig.abort("long")
    rig.run()
    rig.check_clean()


def test_turns_that_end_in_one_step_share_an_order(make_rig: MakeRig) -> None:
    rig = make_rig(blocks=64)
    for name in "abc":
        rig.add(name, text(20, seed=ord(name)), max_tokens=3, params={"job_id": name})
    ends = list[int]()
    while rig.scheduler.has_requests() or rig.orders_under_way:
        running = len(rig.turns)
        saves = rig.step().kv_connector_metadata.orders.saves
        if not running:
            ends += [len(order.blocks) for order in saves]
    assert ends == [3], "the partial block of each"
    assert rig.count("pages_saved") == 6
    rig.half.release_all()
    rig.pool.evict_blocks(set(range(64)))
    for name in "abc":
        rig.ask(f"{name}2", [*text(20, seed=ord(name)), *text(9, seed=9)], params={"job_id": name})
    assert rig.count("prompt_tokens_cpu") >= 3 * 20
    rig.half.release_all()
    rig.check_clean()

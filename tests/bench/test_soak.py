"""Verdicts of a soak test, and the servers that it compares."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tiered_kv.bench.replay.kinds import SCHEDULER
from tiered_kv.bench.servers.vllm_server import ServerOptions
from tiered_kv.bench.soak.__main__ import (
    NEGATED,
    OTHER_WEIGHTS,
    SLACK,
    leaks,
    prepare,
    with_every_tier,
)
from tiered_kv.bench.soak.tally import (
    SURE_NATS,
    Tally,
    Turn,
    compare,
    medians,
    overtaken,
    ratio_of_medians,
    slope,
    tenths,
)

MIB = 1 << 20


def turn(
    sent_at: float = 0.0,
    wait_s: float = 1.0,
    tokens: str = "abc",
    margin: float = 2 * SURE_NATS,
    prompt: int = 0,
    weights: str | None = "first",
    newcomer: bool = False,
) -> Turn:
    margins = (margin,) * len(tokens)
    return Turn(sent_at, wait_s, prompt, weights, tuple(map(ord, tokens)), margins, newcomer)


def test_memory_that_grew_at_first_and_stays_has_no_slope() -> None:
    grew = [(float(s), min(s, 300) * MIB) for s in range(0, 601, 2)]
    assert slope(grew) == pytest.approx(0.0, abs=1e-6)
    assert tenths(grew) == [0, 60, 120, 180, 240, 300, 300, 300, 300, 300, 300]


def test_memory_that_keeps_growing_is_detected() -> None:
    assert slope([(float(s), s * MIB) for s in range(0, 600, 2)]) == pytest.approx(60.0)


def test_growing_counts_are_leaks_except_kept_connections() -> None:
    before = {"pinned_blocks": 0, "threads": 80}
    assert leaks(before, {"pinned_blocks": 0, "threads": 80 + SLACK["threads"]}) == {}
    after = {"pinned_blocks": 3, "threads": 81 + SLACK["threads"]}
    assert leaks(before, after) == {"pinned_blocks": 3, "threads": 1}


def test_the_connector_is_all_that_is_added_to_stock(tmp_path: Path) -> None:
    stock = ServerOptions(model="m", env={"A": "1"}, extra_args=("--enable-prefix-caching",))
    ours = with_every_tier(stock, tmp_path)
    assert ours.extra_args == (*stock.extra_args, "--scheduler-cls", SCHEDULER)
    assert ours.env["A"] == "1"
    for name in ("TIERED_KV_SSD_PATH", "TIERED_KV_SNAPSHOT_PATH"):
        assert Path(ours.env[name]).parent == tmp_path
    assert ours.kv_transfer_config is not None


def test_the_medians_of_tenths_show_what_became_slower() -> None:
    assert medians([1.0] * 50 + [2.0] * 50) == [1.0] * 5 + [2.0] * 5
    assert medians([3.0, 1.0]) == [3.0, 1.0]
    assert medians([]) == []


def test_the_end_of_the_run_is_compared_by_itself() -> None:
    ours, stock = [1.0] * 7 + [3.0] * 3, [1.0] * 7 + [2.0] * 3
    assert ratio_of_medians(ours, stock) == 1.0
    assert ratio_of_medians(ours, stock, last=0.3) == 1.5
    assert ratio_of_medians([], stock) is None
    assert ratio_of_medians([1.0], [1.0], last=0.3) is None, "no third of one newcomer"


def test_newcomers_are_listed_by_their_arrival_and_not_by_their_answer() -> None:
    waited = turn(sent_at=1.0, wait_s=9.0, newcomer=True)
    prompt = turn(sent_at=2.0, wait_s=0.5, newcomer=True)
    tally = Tally(turns=[prompt, turn(sent_at=0.0), waited])
    assert tally.newcomer_waits() == [9.0, 0.5]


def test_a_turn_that_waits_beyond_the_limit_while_later_ones_are_served_was_overtaken() -> None:
    starved = turn(sent_at=0.0, wait_s=30.0)
    later = turn(sent_at=15.0, wait_s=5.0)
    assert overtaken([later, starved], limit_s=10.0) == 1


@pytest.mark.parametrize(
    "other",
    [
        turn(sent_at=1.0, wait_s=5.0),  # overtook, but the wait is within the limit
        turn(sent_at=-1.0, wait_s=20.0),  # was sent first
        turn(sent_at=1.0, wait_s=40.0),  # waits even longer
    ],
    ids=["within the limit", "sent before", "served after"],
)
def test_a_turn_that_waits_beyond_the_limit_on_a_slow_server_was_not_overtaken(other: Turn) -> None:
    assert overtaken([turn(sent_at=0.0, wait_s=30.0), other], limit_s=10.0) == 0


def test_answers_differ_if_stock_was_sure_of_the_first_token_that_differs() -> None:
    assert compare([turn(tokens="abx")], [turn(tokens="abc")]) == (1, 1)
    assert compare([turn(tokens="abx")], [turn(tokens="abc", margin=SURE_NATS / 2)]) == (1, 0)
    assert compare([turn(tokens="ab")], [turn(tokens="abc")]) == (1, 1), "one ended early"
    assert compare([turn()], [turn()]) == (1, 0)


def test_answers_are_compared_of_equal_prompts_and_weights_alone() -> None:
    stock = [turn(prompt=1, weights="first"), turn(prompt=2, weights=None)]
    others = [
        turn(prompt=1, weights="second", tokens="x"),
        turn(prompt=2, weights=None, tokens="x"),
        turn(prompt=3, tokens="x"),
    ]
    assert compare(others, stock) == (0, 0)


def test_other_weights_are_the_same_but_for_the_signs_of_one_tensor(tmp_path: Path) -> None:
    model, folder = tmp_path / "model", tmp_path / "scratch"
    model.mkdir()
    folder.mkdir()
    bf16 = np.array([1.0, -2.0, 0.5], np.float32).view(np.uint32) >> 16
    raw = bf16.astype("<u2").tobytes()
    header = {
        "first": {"dtype": "BF16", "shape": [3], "data_offsets": [0, 6]},
        NEGATED: {"dtype": "BF16", "shape": [3], "data_offsets": [6, 12]},
    }
    head = json.dumps(header).encode()
    whole = len(head).to_bytes(8, "little") + head + raw + raw
    (model / "model.safetensors").write_bytes(whole)
    (model / "config.json").write_text("{}")

    prepare(folder, model)

    found = (folder / OTHER_WEIGHTS / "model.safetensors").read_bytes()
    assert found[: 8 + len(head) + 6] == whole[: 8 + len(head) + 6]
    last = np.frombuffer(found[-6:], "<u2").astype(np.uint32) << 16
    assert last.view(np.float32).tolist() == [-1.0, 2.0, -0.5]
    assert (folder / OTHER_WEIGHTS / "config.json").read_text() == "{}"
    assert (model / "model.safetensors").read_bytes() == whole, "the original stays"

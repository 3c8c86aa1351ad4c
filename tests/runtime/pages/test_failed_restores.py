"""After a failed sync restore: which blocks can no longer be found, and which requests' KV is
saved."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.runtime.conftest import MakeRig
from tiered_kv.connectors.runtime.pages.restores import Restores
from tiered_kv.connectors.runtime.turn import Source
from tiered_kv.orders import RestoreMode
from tiered_kv.policies.cache.restore_mode import AlwaysRestore
from tiered_kv.testing.checked_kv import expected, text
from tiered_kv.testing.faults import FaultyTransfer
from tiered_kv.testing.vllm.rig import Rig
from tiered_kv.transfer.base import Direction

PROMPT = text(300, seed=1)
"""The prompt has eighteen blocks and a few tokens."""


@pytest.fixture
def rig(make_rig: MakeRig) -> Rig:
    """A rig on which the prompt's KV is only in CPU memory, and restoring its fourth page fails
    once."""
    rig = make_rig(blocks=128)
    rig.pages.restores.policy = AlwaysRestore(RestoreMode.SYNC)
    faulty = rig.inject(FaultyTransfer)
    rig.ask("first", PROMPT)
    rig.fill()
    faulty.fail_next(Direction.LOAD, {3})
    return rig


def test_a_request_that_joined_a_failed_restore_leaves_no_bad_block(rig: Rig) -> None:
    """Two requests of one step share restored blocks, one of which is bad, and are aborted before
    they recompute it. The next request finds only the blocks before the bad one."""
    longer = PROMPT + text(100, seed=2)
    rig.add("restores", PROMPT)
    rig.add("joins", longer)
    rig.step()
    assert rig.count("restore_failures") == 1
    for name in ("restores", "joins"):
        rig.abort(name)
    before = rig.count("prompt_tokens_vram")
    assert rig.ask("next", longer) == expected(longer, 4)
    assert rig.count("prompt_tokens_vram") - before == 3 * 16, "what came before the bad block"
    rig.check_clean()


def test_a_request_with_a_bad_block_is_not_saved(rig: Rig) -> None:
    longer = PROMPT + text(100, seed=2)
    rig.add("restores", PROMPT)
    rig.add("joins", longer)
    saved = rig.count("pages_saved")
    rig.run()
    assert rig.outputs["joins"] == expected(longer, 4)
    assert rig.count("pages_saved") == saved
    rig.check_clean()


def test_requests_that_only_ran_alongside_are_saved_in_the_next_step(rig: Rig) -> None:
    """In the step of a failed restore, the workers refuse to save blocks of any request. The blocks
    of a request that shares no bad block are offered again in the next step."""
    rig.add("restores", PROMPT)
    rig.add("beside", text(200, seed=2), max_tokens=40)
    refused = rig.step().kv_connector_metadata.orders.saves
    assert [len(order.blocks) for order in refused] == [12]
    assert rig.count("save_failures") == 12
    offered = rig.step().kv_connector_metadata.orders.saves
    assert [order.keys for order in offered] == [order.keys for order in refused]
    rig.run()
    rig.check_clean()


class Touched(Restores):
    """A ``Restores`` object that also stands in for the block pool and the saves, and records calls
    to them."""

    def __init__(self, tables: dict[str, list[Any]]) -> None:
        self._pool: Any = self
        self.tables = [tables]
        self.evicted: set[int] = set()
        self.watched: list[tuple[Any, int]] = []
        self.started_over: list[Any] = []
        self.withdrawn: list[Any] = []

    def forget(self, blocks: list[int]) -> None:
        self.evicted.update(blocks)

    def start_over(self, turn: Any) -> None:
        self.started_over.append(turn)

    def withdraw(self, turn: Any) -> None:
        self.withdrawn.append(turn)

    def watch(self, turn: Any, step: int) -> None:
        self.watched.append((turn, step))


def test_requests_without_blocks_or_being_loaded_are_ignored() -> None:
    """Block 7 is bad. The request that holds it is no longer saved, and a request without bad
    blocks is saved again from the start. Requests that have no blocks yet, or are being restored,
    are ignored."""
    forgot = []

    def turn(name: str, *, admitted: bool = True, loading: bool = False) -> Any:
        return SimpleNamespace(
            request_id=name,
            source=Source(admitted=admitted),
            loading=loading,
            forget_pages=lambda: forgot.append(name),
        )

    turns = [
        turn("queues", admitted=False),
        turn("loads", loading=True),
        turn("loads bad", loading=True),
        turn("holds"),
        turn("beside"),
    ]
    ids = {"loads": [1, 2], "loads bad": [7, 8], "holds": [3, 7, 4], "beside": [5, 6]}
    blocks = {name: [SimpleNamespace(block_id=one) for one in own] for name, own in ids.items()}
    touched: Any = Touched(blocks)
    touched.forget_bad_blocks({7}, [3, 7, 9], turns, touched, step=11)
    assert touched.evicted == {7, 9, 4}
    assert forgot == ["holds"]
    assert touched.watched == [(turns[-1], 12)]
    assert touched.started_over == [turns[-1]]
    assert touched.withdrawn == [turns[3]]

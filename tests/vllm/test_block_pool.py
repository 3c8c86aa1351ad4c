"""The connector neither holds nor releases vLLM's null block, which has no owner. Before vLLM 0.33,
the block pool counts references to it as to any other block."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from tests.runtime.conftest import MakeRig
from tests.runtime.groups.kinds import ANSWER, JOB, MODELS, PROMPT, forget_vram
from tiered_kv.connectors.vllm import connector
from tiered_kv.connectors.vllm.block_pool import VllmBlockPool
from tiered_kv.testing.checked_kv import expected, text
from tiered_kv.testing.vllm.groups import GroupSpec


class Counted(VllmBlockPool):
    """A block pool that counts the blocks held and released, and refuses the null block."""

    counts = (0, 0)

    def __init__(self, manager: Any, groups: Sequence[int]) -> None:
        super().__init__(manager, groups)
        hold, release = self.hold, self.release

        def checked_hold(blocks: Sequence[Any]) -> None:
            assert not any(block.is_null for block in blocks)
            Counted.counts = (Counted.counts[0] + len(blocks), Counted.counts[1])
            hold(blocks)

        def checked_release(blocks: Iterable[Any]) -> None:
            given = list(blocks)
            assert not any(block.is_null for block in given)
            Counted.counts = (Counted.counts[0], Counted.counts[1] + len(given))
            release(given)

        self.hold, self.release = checked_hold, checked_release


@pytest.mark.parametrize("groups", MODELS.values(), ids=MODELS)
def test_the_null_block_is_neither_held_nor_released(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, groups: Sequence[GroupSpec]
) -> None:
    monkeypatch.setattr(connector, "VllmBlockPool", Counted)
    monkeypatch.setattr(Counted, "counts", (0, 0))
    rig = make_rig(groups=groups, blocks=200, extra={"cpu_gib": 0.01})
    answer = rig.ask("t1", PROMPT, max_tokens=ANSWER, params=JOB)
    second = PROMPT + answer + text(30, seed=2)
    answer = rig.ask("t2", second, max_tokens=ANSWER, params=JOB)
    forget_vram(rig)
    third = second + answer + text(30, seed=3)
    assert rig.ask("t3", third, params=JOB) == expected(third, 4)
    rig.pins.release_all()
    rig.run()
    rig.check_clean()
    held, released = Counted.counts
    assert held == released > 0

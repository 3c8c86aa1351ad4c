"""vLLM 0.33 may drop a restore that the connector offers. If vLLM returns the experts of each token
(``--enable-return-routed-experts``), a hit must end at a block boundary and must not go beyond the
blocks whose experts are known."""

from __future__ import annotations

from typing import Any

import pytest
import vllm

from tests.runtime.conftest import MakeRig
from tests.runtime.groups.kinds import FULL, STATE, WINDOW
from tiered_kv.orders import RestoreMode
from tiered_kv.policies.cache.restore_mode import AlwaysRestore
from tiered_kv.testing.checked_kv import expected, text
from tiered_kv.testing.vllm.groups import GroupSpec
from tiered_kv.testing.vllm.rig import Rig
from tiered_kv.vllm_versions import parse_version

pytestmark = pytest.mark.skipif(
    (parse_version(vllm.__version__) or (0, 33)) < (0, 33), reason="since vLLM 0.33"
)
PROMPT = text(200, seed=1)
modes = pytest.mark.parametrize("mode", RestoreMode)


def return_experts(config: Any) -> None:
    config.aux_output_config.enable_return_routed_experts = True


def start(make_rig: MakeRig, mode: RestoreMode, **options: Any) -> Rig:
    rig = make_rig(blocks=200, configure=return_experts, extra={"cpu_gib": 0.01}, **options)
    rig.pages.restores.policy = AlwaysRestore(mode)
    # The rig's model has no experts, so the method that would return them is replaced.
    rig.scheduler.aux_output_connector.take_output = lambda request, output: None
    return rig


def forget_vram(rig: Rig) -> None:
    rig.run()
    rig.wait_for_worker()
    rig.run()
    rig.pins.release_all()
    rig.pool.evict_blocks(set(range(len(rig.pool.blocks))))


@modes
@pytest.mark.parametrize(
    ("groups", "restored"),
    [((), 224), ((FULL, WINDOW), 224), ((FULL, STATE), 192)],
    ids=["full", "full and window", "full and state"],
)
def test_a_restore_ends_with_a_block_so_that_it_is_used(
    make_rig: MakeRig, mode: RestoreMode, groups: tuple[GroupSpec, ...], restored: int
) -> None:
    """229 tokens of the first turn have KV, so the last block is not full and is not restored.
    States are kept only at the end of the prompt's last full block."""
    rig = start(make_rig, mode, groups=groups, retention=None)
    answer = rig.ask("t1", PROMPT, max_tokens=30)
    forget_vram(rig)
    prompt = PROMPT + answer + text(20, seed=2)
    assert rig.ask("t2", prompt) == expected(prompt, 4)
    assert rig.count("prompt_tokens_cpu") == restored
    rig.check_clean()


@modes
def test_a_restore_that_vllm_drops_costs_nothing_but_itself(
    make_rig: MakeRig, mode: RestoreMode
) -> None:
    """vLLM drops the restore because the experts of its blocks are not known. The prompt is
    computed, and its pages can be restored later."""
    rig = start(make_rig, mode)
    answer = rig.ask("t1", PROMPT, max_tokens=30)
    forget_vram(rig)
    rig.scheduler.aux_output_connector.reset()
    prompt = PROMPT + answer + text(20, seed=2)
    assert rig.ask("t2", prompt) == expected(prompt, 4)
    assert rig.count("prompt_tokens_cpu") == 0
    assert rig.count("restores_async") + rig.count("restores_sync") == 0
    rig.check_clean()
    forget_vram(rig)
    assert rig.ask("t3", prompt) == expected(prompt, 4)
    assert rig.count("prompt_tokens_cpu") > 0, "they are known again"
    rig.check_clean()

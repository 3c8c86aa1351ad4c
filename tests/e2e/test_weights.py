"""A trainer updates the weights of a real engine. No tier restores KV of other weights, neither
before nor after a restart.

The trainer resets no cache, and sends the version of the trained policy as cache salt.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo

from tiered_kv.bench.servers.engines import Engine, engine, real_texts

pytestmark = pytest.mark.e2e

CONTEXTS = 3
GREEDY = SamplingParams(temperature=0, max_tokens=8)


def scale_norms(model: Any, factor: float) -> None:
    """Scale the norms, which are parameters that no CPU kernel has packed."""
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if "layernorm" in name:
                weights.mul_(factor)


@dataclass
class NoInit(WeightTransferInitInfo):
    """Init information of a transfer that needs none."""


@dataclass
class Factor(WeightTransferUpdateInfo):
    """Factor by which the norms are scaled."""

    factor: float = 1.0


class Scaling(WeightTransferEngine[NoInit, Factor]):
    """A weight transfer through vLLM's API that sends a single number."""

    init_info_cls = NoInit
    update_info_cls = Factor

    def init_transfer_engine(self, init_info: NoInit) -> None: ...

    def start_weight_update(self) -> None: ...

    def receive_weights(self, update_info: Factor) -> None:
        scale_norms(self.model, update_info.factor)

    def finish_weight_update(self) -> None: ...

    def shutdown(self) -> None: ...


if "scaling" not in WeightTransferEngineFactory._registry:  # noqa: SLF001 - it raises for known names
    WeightTransferEngineFactory.register_engine("scaling", Scaling)


def update_by_function(made: Engine) -> None:
    made.llm.collective_rpc(lambda worker: scale_norms(worker.model_runner.get_model(), 1.2))


def update_by_transfer(made: Engine) -> None:
    made.llm.init_weight_transfer_engine({"init_info": {}})
    made.llm.start_weight_update()
    made.llm.update_weights({"update_info": {"factor": 1.2}})
    made.llm.finish_weight_update()


UPDATES = (update_by_function, update_by_transfer)


@contextmanager
def trained(model: Path, **options: Any) -> Iterator[Engine]:
    with engine(
        model,
        dtype="float32",
        max_model_len=1024,
        num_gpu_blocks_override=60,
        weight_transfer_config={"backend": "scaling"},
        **options,
    ) as made:
        yield made


def answers(made: Engine, texts: list[list[int]], salt: str) -> list[list[int]]:
    found = []
    for text in texts:
        prompt: Any = {"prompt_token_ids": text, "cache_salt": salt}
        output = made.llm.generate([prompt], GREEDY, use_tqdm=False)[0].outputs[0]
        found.append(list(output.token_ids))
    return found


def from_tiers(made: Engine) -> int:
    totals = made.half.counters.totals
    return int(totals["prompt_tokens_cpu"] + totals["prompt_tokens_ssd"])


def test_answers_after_updates_and_a_restart_are_those_of_stock(
    small_model: Path, tmp_path: Path
) -> None:
    texts = real_texts(small_model, [400] * CONTEXTS)
    stock = []
    with trained(small_model, connector=False) as made:
        stock.append(answers(made, texts, "policy-7"))
        for update in UPDATES:
            update(made)
            assert made.llm.reset_prefix_cache()
            stock.append(answers(made, texts, "policy-7"))
    assert stock[0] != stock[1] != stock[2], "the updates change what the model says"
    extra = {"cpu_gib": 0.1, "ssd_path": str(tmp_path / "ssd"), "ssd_gib": 1, "policy": "lru"}
    options: dict[str, Any] = {"connector": True, "extra": extra, "shutdown_timeout": 10}
    with trained(small_model, **options) as made:
        for policy, right in enumerate(stock):
            if policy:
                UPDATES[policy - 1](made)
            found = from_tiers(made)
            # The salt is the same each time, so that stale KV would be found.
            assert answers(made, texts, "policy-7") == right
            assert from_tiers(made) == found, "nothing of other weights"
            made.evict_vram(60 * 32)
            found = from_tiers(made)
            assert answers(made, texts, "policy-7") == right
            assert from_tiers(made) > found, "what these weights computed comes back"
        assert made.half.counters.totals["weight_updates"] >= 3
        assert made.half.counters.totals["hook_errors"] == 0
        made.settle()
    with trained(small_model, **options) as made:
        assert answers(made, texts, "policy-7") == stock[0]

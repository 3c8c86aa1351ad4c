"""Real vLLM engines that run in this process, and texts for them."""

from __future__ import annotations

import gc
import os
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .vllm_server import CONNECTOR, machine_dtype

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # so that tests can reach the scheduler
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
SETTLE_S = 300.0
MODULE = "tiered_kv.connectors.vllm.connector"


@dataclass(frozen=True)
class Answer:
    """Answer to a prompt.

    Attributes:
        tokens, logprobs: token ids and their logprobs.
        margin: smallest lead of the best over the second best token at any position, nats.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    margin: float


class Engine:
    """An engine in this process and, if the engine has the connector, both halves of the
    connector.
    """

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.core = llm.llm_engine.engine_core.engine_core

    @property
    def half(self) -> Any:
        """The connector's scheduler half."""
        return self.core.scheduler.connector.scheduler_half

    @property
    def worker(self) -> Any:
        """The connector's worker half. Requires a worker that runs in this process."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group().worker_half

    @property
    def free_blocks(self) -> int:
        """Number of free blocks in the VRAM pool."""
        return int(self.core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int = 8) -> list[Answer]:
        """Generate greedy answers to all prompts, sent together."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=2)
        asked: list[Any] = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        answers = []
        for output in self.llm.generate(asked, params, use_tqdm=False):
            tokens = tuple(output.outputs[0].token_ids)
            steps = output.outputs[0].logprobs
            chosen = [step[token].logprob for token, step in zip(tokens, steps, strict=True)]
            best = [sorted(entry.logprob for entry in step.values())[-2:] for step in steps]
            answers.append(Answer(tokens, tuple(chosen), min(high - low for low, high in best)))
        return answers

    def alone(self, prompts: Sequence[Sequence[int]], max_tokens: int = 8) -> list[Answer]:
        """Generate greedy answers to the prompts, sent one by one."""
        return [self.generate([prompt], max_tokens)[0] for prompt in prompts]

    @contextmanager
    def without_connector(self) -> Iterator[None]:
        """Remove the connector from scheduler and worker until the block ends. The engine must be
        idle. Blocks stay cached, and KV computed in the block is not saved.
        """
        from vllm.distributed.kv_transfer import kv_transfer_state as state

        scheduler = self.core.scheduler
        connector, agent = scheduler.connector, state._KV_CONNECTOR_AGENT  # noqa: SLF001 - no setter
        scheduler.connector = state._KV_CONNECTOR_AGENT = None  # noqa: SLF001
        try:
            yield
        finally:
            scheduler.connector, state._KV_CONNECTOR_AGENT = connector, agent  # noqa: SLF001

    def settle(self) -> None:
        """Step until all running copies have been reported, because an in-process engine does not
        step on its own.

        Raises:
            AssertionError: copies did not finish in time.
        """
        deadline, scheduler = time.monotonic() + SETTLE_S, self.core.scheduler
        half = getattr(scheduler.connector, "scheduler_half", None)
        while True:
            if scheduler.has_requests() or self.core.batch_queue:
                self.core.step_fn()  # a pipeline has several batches in flight
            elif half is not None and half.orders_under_way:
                self.generate([[100]], max_tokens=1)  # an idle engine receives no reports
            else:
                return
            time.sleep(0.0005)  # the workers' threads also need the interpreter
            if time.monotonic() > deadline:
                raise AssertionError(f"copies did not finish within {SETTLE_S:g} s")

    def evict_vram(self, tokens: int) -> None:
        """Run unrelated texts of ``tokens`` tokens in total, to evict other KV from VRAM."""
        for start in range(0, tokens, 1000):
            self.generate([[(start + i) % 40_000 + 100 for i in range(1000)]], max_tokens=1)
        self.settle()


@contextmanager
def engine(model: Path, connector: bool, **options: Any) -> Iterator[Engine]:
    """Run an in-process engine until the block ends.

    Args:
        options: engine arguments. ``extra`` has the connector's settings; ``dtype`` defaults to the
            machine's.
    """
    extra = options.pop("extra", {})
    if connector:
        module = {"kv_connector_module_path": MODULE, "kv_connector_extra_config": extra}
        options["kv_transfer_config"] = {**CONNECTOR, **module}
    settings: dict[str, Any] = {
        "enforce_eager": True,
        "block_size": 32,
        "max_model_len": 2048,
        "num_gpu_blocks_override": 130,
        "disable_log_stats": False,
        "dtype": machine_dtype().name,
        **options,
    }
    with _changed(os.environ, ENVIRONMENT):
        from vllm import LLM
        from vllm.distributed import cleanup_dist_env_and_memory

        # When an engine starts, vLLM's CPU build (0.32) reads attributes of every module, and fails
        # at llvmlite's library, which claims to have every attribute. After a use of numba, no
        # other engine would start in the process.
        with _changed(sys.modules, {"llvmlite.binding.ffi": None}):
            llm = LLM(str(model), **settings)
        try:
            yield Engine(llm)
        finally:
            llm.llm_engine.engine_core.shutdown()
            del llm
            gc.collect()
            cleanup_dist_env_and_memory()


@contextmanager
def _changed(known: MutableMapping[str, Any], values: Mapping[str, Any]) -> Iterator[None]:
    """Set values until the block ends. None removes a key."""
    before = {name: known.get(name) for name in values}

    def change(to: Mapping[str, Any]) -> None:
        for name, value in to.items():
            if value is None:
                known.pop(name, None)
            else:
                known[name] = value

    change(values)
    try:
        yield
    finally:
        change(before)


def real_texts(model: Path, lengths: Sequence[int]) -> list[list[int]]:
    """Return token ids of real source text, from a different file of the standard library for each
    length.

    A text of at least 60 tokens repeats its start after two thirds of its length. A shorter text
    repeats its first quarter. A model that can copy then predicts the continuation with certainty.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(model))
    files = [
        path
        for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
        if path.stat().st_size > 12_000
        and "test" not in str(path)
        and "site-packages" not in str(path)
    ]
    found: list[list[int]] = []
    for length, path in zip(lengths, files, strict=False):
        ids = list(tokenizer(path.read_text(errors="replace")[: length * 8])["input_ids"])
        assert len(ids) >= length, f"{path} is too short for {length} tokens"
        repeated = ids[: length * 2 // 3 if length >= 60 else length // 4]
        found.append((repeated * 4 + ids)[:length])
    return found

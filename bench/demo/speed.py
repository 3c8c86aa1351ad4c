"""Speed of a model on this machine, measured by running vLLM's own engine for twenty seconds.

The demo sizes its jobs by this speed. The measurement runs in a separate process, which ends before
a server starts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import count, pairwise
from pathlib import Path

from tiered_kv.bench.output import only_result_on_stdout

PROMPT_TOKENS = 384
DECODING, DECODE_STEPS = 8, 16
MEASURE_S = 20.0
"""Duration of the measurement, seconds. Only the fastest time of each call counts, so this must be
long enough to outlast a burst of other load."""


class SpeedError(RuntimeError):
    """The engine did not start or run. The message ends with the tail of its output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Rates of an engine on this machine, and sizes of the model.

    Attributes:
        prefill_tokens_s: prompt tokens per second, for a single prompt of ``PROMPT_TOKENS``.
        decode_tokens_s: tokens per second of ``DECODING`` concurrent requests in total.
        max_context_tokens: maximum context length of the model.
        kv_token_bytes: KV bytes per token.
    """

    prefill_tokens_s: float
    decode_tokens_s: float
    max_context_tokens: int
    kv_token_bytes: int


def measure_speed(model: str | Path, dtype: str) -> Speed:
    """Measure the speed in a separate process. Takes 35 seconds on two cores, 15 of them to start
    the engine.

    Raises:
        SpeedError: the engine did not start or run.
    """
    command = [sys.executable, "-m", "tiered_kv.bench.demo.speed", str(model), dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        return Speed(**json.loads(done.stdout.splitlines()[-1]))
    except (IndexError, TypeError, ValueError):
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        raise SpeedError(f"vLLM's engine did not run {model}:\n{tail}") from None


def run_engine(model: str, dtype: str) -> Speed:
    """Measure the speed in this process."""
    from tiered_kv.bench.servers.engines import engine

    with engine(Path(model), connector=False, dtype=dtype, max_model_len=1024) as running:
        fresh = ([(997 * n + i) % 40_000 for i in range(PROMPT_TOKENS)] for n in count(1))
        short = [[20 * n + i for i in range(16)] for n in range(1, DECODING + 1)]
        prefill_s, first_s, all_s = fastest(
            (
                lambda: running.generate([next(fresh)], max_tokens=1),
                lambda: running.generate(short, max_tokens=1),
                lambda: running.generate(short, max_tokens=1 + DECODE_STEPS),
            ),
            MEASURE_S,
        )
        config = running.llm.llm_engine.model_config.hf_text_config
        scheduler = running.core.scheduler
        cache = scheduler.kv_cache_config
        kv_bytes = sum(tensor.size for tensor in cache.kv_cache_tensors)
        return Speed(
            prefill_tokens_s=PROMPT_TOKENS / prefill_s,
            decode_tokens_s=DECODING * DECODE_STEPS / max(all_s - first_s, 1e-6),
            max_context_tokens=int(getattr(config, "max_position_embeddings", 4096)),
            kv_token_bytes=kv_bytes // (cache.num_blocks * scheduler.block_size),
        )


def fastest(calls: Sequence[Callable[[], object]], seconds: float) -> list[float]:
    """Time calls in rounds for ``seconds``: one round to warm up, then at least two that count.

    Returns:
        The shortest time of each call, seconds. Other load can only make a call slower.
    """
    rounds = list[list[float]]()
    began = time.perf_counter()
    while len(rounds) < 3 or time.perf_counter() - began < seconds:
        marks = [time.perf_counter()]
        for call in calls:
            call()
            marks.append(time.perf_counter())
        rounds.append([end - start for start, end in pairwise(marks)])
    return [min(times) for times in zip(*rounds[1:], strict=True)]


def main() -> None:
    from tiered_kv.bench.servers.vllm_server import all_cores, runs_on_cpu

    if runs_on_cpu():
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = all_cores()  # the same cores as the servers
    with only_result_on_stdout():
        speed = run_engine(sys.argv[1], sys.argv[2])
    print(json.dumps(asdict(speed)))


if __name__ == "__main__":
    main()

"""A CPU worker for pipeline parallelism, which vLLM 0.32 lacks.

vLLM's CPU worker does not warm up, so ranks after the first have no tensors to receive into.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker


class PipelineWorker(CPUWorker):
    """vLLM's CPU worker, with tensors to receive the previous rank's output."""

    def compile_or_warm_up_model(self) -> Any:
        done = super().compile_or_warm_up_model()
        runner = self.model_runner
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )
        return done

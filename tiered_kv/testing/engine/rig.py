"""The small engine with or without the connector, driven by tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tiered_kv.config import load_config
from tiered_kv.testing.fairness import FairnessWatch
from tiered_kv.testing.rig import EngineRig

from .engine import Engine, EngineSize
from .halves import Halves
from .offload import Offload
from .requests import Outcome, Request, State


@dataclass(frozen=True, slots=True)
class RigOptions(EngineSize):
    """Size of the engine, and settings of its connector.

    Attributes:
        max_model_len: number of tokens from which ``EngineRig.fill`` derives the length of
            competing prompts. The small engine itself has no such limit.
        extra: the connector's settings; None for the engine alone.
    """

    max_model_len: int = 512
    extra: dict[str, Any] | None = field(default_factory=lambda: {"cpu_gib": 0.001})


class SecondRig(EngineRig):
    """The small engine, driven step by step."""

    options: RigOptions

    def __init__(self, options: RigOptions | None = None) -> None:
        opts = self.options = options or RigOptions()
        super().__init__()
        self.engine = Engine(opts, lambda: self.now)
        self.halves: Halves | None = None
        if opts.extra is not None:
            config = load_config({}, opts.extra)
            self.halves = Halves(self.engine, config, lambda: self.now, self._change)
            self.engine.offload = self.halves
            if not config.observes:
                FairnessWatch(self.halves.scheduler, lambda: self.now)
        self.requests: dict[str, Request] = {}
        self.free_at_start = self.free_blocks

    @property
    def half(self) -> Any:
        return self.halves.scheduler if self.halves is not None else None

    @property
    def worker_half(self) -> Any:
        return self.halves.worker if self.halves is not None else None

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        max_tokens: int = 4,
        **fields: Any,
    ) -> Request:
        self.prompts[request_id], self.outputs[request_id] = list(prompt), []
        request = self.requests[request_id] = self.engine.submit(
            request_id, list(prompt), max_tokens, **fields
        )
        return request

    def abort(self, request_id: str, *, late: bool = False) -> None:
        self.engine.cancel(
            self.requests[request_id]
        )  # late makes no difference: no step continues after step() returns
        self._hear()

    def aborted(self, request_id: str) -> bool:
        return self.finished[request_id] is Outcome.CANCELLED

    def step(self) -> dict[str, int]:
        self.steps += 1
        scheduled = self.engine.step()
        self._hear()
        return scheduled

    def _hear(self) -> None:
        for name, request in self.requests.items():
            if name not in self.finished:
                self.outputs[name][:] = request.output
                if request.state is State.ENDED:
                    self.finished[name] = request.outcome

    def run(self, limit: int = 2000) -> None:
        for _ in range(limit):
            if not (self.engine.busy or self.orders_under_way):
                return
            if not self.step() and self.halves is not None:
                self.wait_for_worker()  # only copies are pending
        raise AssertionError(f"still in progress after {limit} steps: {self.unfinished()}")

    def reset_cache(self, *, running: bool = True) -> bool:
        self.engine.reset_cache()  # this engine always preempts running requests
        return True

    @property
    def free_blocks(self) -> int:
        return self.engine.pool.num_free()

    def running(self) -> list[str]:
        return [request.request_id for request in self.engine.running]

    def preemptions(self, request_id: str) -> int:
        return self.requests[request_id].preemptions

    def held(self) -> list[str]:
        return sorted(self.admission.queue.held)

    def close(self) -> None:
        self.engine.offload.close()
        self.engine.offload = Offload()

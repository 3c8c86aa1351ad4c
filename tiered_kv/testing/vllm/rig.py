"""vLLM's real scheduler and the real connector around a model that checks its KV.

The rig needs no weights and no GPU: a step takes microseconds. For each token, its "model" writes 8
bytes that depend on every token before it, and reads them back whenever the token is attended to
(``runner``). A page with wrong bytes is therefore detected in the step that uses it. The sampled
tokens depend only on the context, so outputs with and without the connector can be compared.

vLLM and torch are imported when a rig is created.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from tiered_kv.connectors.runtime.dependencies import Dependencies
from tiered_kv.connectors.runtime.tool_reader import ToolCalls
from tiered_kv.testing.checked_kv import Cells
from tiered_kv.testing.fairness import FairnessWatch
from tiered_kv.testing.rig import EngineRig

from .changes import given
from .engine import EngineSize, engine_config, kv_config, make_scheduler, resolve_block_sizes
from .groups import kept_blocks
from .runner import CheckingRunner


@dataclass(frozen=True, slots=True)
class RigOptions(EngineSize):
    """Size and settings of the engine.

    Attributes:
        extra: the connector's settings; None for stock vLLM.
        check_kv: True to write and check KV, and to check fairness. False makes large engines fast:
            the model then generates the same tokens for every prompt.
        in_job_order: True to use ``ContinuumScheduler``.
        configure: changes vLLM's configuration before it is used.
        tools: reads tool calls; None uses the connector's own reader.
        around: builds the engine's transfer configuration from the connector's, if the engine has
            other connectors too or another connector replaces this one.
    """

    extra: dict[str, Any] | None = field(default_factory=lambda: {"cpu_gib": 0.001})
    check_kv: bool = True
    in_job_order: bool = False
    configure: Callable[[Any], None] = lambda _: None
    tools: ToolCalls | None = None
    around: Callable[[dict[str, Any]], dict[str, Any]] | None = None


class Rig(EngineRig):
    """A vLLM engine that is driven step by step.

    Args:
        folder: folder to which the model's config.json is written.
        options: size and settings of the engine.
    """

    options: RigOptions

    def __init__(self, folder: Path, options: RigOptions | None = None) -> None:
        import torch
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

        opts = self.options = options or RigOptions()
        super().__init__()
        self.config = engine_config(folder, opts, opts.extra, opts.around)
        opts.configure(self.config)
        layout = kv_config(opts)
        hash_fn = get_hash_fn_by_name("sha256")
        init_none_hash(hash_fn)
        _, hash_block_size = resolve_block_sizes(self.config, layout)
        self._hasher = get_request_block_hasher(hash_block_size, hash_fn)
        self.groups = opts.pages()
        """Page geometry of each group."""
        page = self.groups[0].page_bytes
        self.memory = torch.zeros(page * opts.blocks, dtype=torch.int8)
        pages = self.memory.numpy().view(np.uint8).reshape(opts.blocks, page)
        self.runner = CheckingRunner(self.groups, pages)
        self._unheard: deque[tuple[Any, Any]] = deque()  # steps with their results
        self._late_aborts: list[str] = []
        self.worker: Any = None
        self.worker_ahead_s = 0.0
        """Seconds by which the worker's clock is ahead of the scheduler's."""
        if opts.extra is not None:
            with given(lambda: self.now + self.worker_ahead_s, self._change):
                self._make_worker(layout)
        with given(lambda: self.now, self._change):  # tests advance the clock
            self.scheduler = make_scheduler(
                self.config, layout, log_stats=True, in_job_order=opts.in_job_order
            )
        if self.half is not None:
            self._introduce()
            if self.options.check_kv and not self.half.deps.config.observes:
                FairnessWatch(self.half, lambda: self.now)
        self._requests: dict[str, Any] = {}
        self.scheduler_s = 0.0
        """CPU seconds of the scheduler itself in the last step."""
        self.last_stats: Any = None
        """vLLM's SchedulerStats of the last step."""
        self.free_at_start = self.free_blocks

    def _change(self, found: Dependencies) -> Dependencies:
        if self.options.tools is not None:
            found.tools.close()
            found = replace(found, tools=self.options.tools)
        return super()._change(found)

    def _make_worker(self, layout: Any) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

        with set_current_vllm_config(self.config):
            self.worker = KVConnectorFactory.create_connector(
                self.config, KVConnectorRole.WORKER, layout
            )
        self.worker.register_kv_caches({one.layer: one.view(self.memory) for one in self.groups})

    def _introduce(self) -> None:
        from tiered_kv.connectors.vllm.envelopes import TieredHandshake

        said = self.worker_half.handshake()
        # The model performs no matrix products, so an estimate of prefill time would be wrong.
        said = replace(said, speeds=replace(said.speeds, flops=0.0))
        self.connector.set_xfer_handshake_metadata({0: TieredHandshake(said)})

    # -- driving --------------------------------------------------------------------

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        max_tokens: int = 4,
        **fields: Any,
    ) -> Any:
        """Send a request, with the fields of ``make_request``. Returns vLLM's request."""
        request = self.make_request(request_id, prompt, max_tokens, **fields)
        self.scheduler.add_request(request)
        return request

    def make_request(
        self,
        request_id: str,
        prompt: Sequence[int],
        max_tokens: int = 4,
        *,
        params: object = None,
        salt: str | None = None,
        priority: int = 0,
        stop: Sequence[str] = (),
        stop_ids: Sequence[int] = (),
        resumable: bool = False,
        lora: object | None = None,
    ) -> Any:
        """Create vLLM's request without sending it.

        Args:
            params: the request's kv_transfer_params.
            salt: the request's cache_salt.
            lora: vLLM's ``LoRARequest`` of the request's adapter.
        """
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        extra = None if params is None else {"kv_transfer_params": params}
        request = Request(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            sampling_params=SamplingParams(
                max_tokens=max_tokens,
                ignore_eos=True,
                temperature=0.0,
                extra_args=extra,
                stop=list(stop),
                stop_token_ids=list(stop_ids),
            ),
            pooling_params=None,
            block_hasher=self._hasher,
            cache_salt=salt,
            lora_request=lora,
            priority=priority,
            resumable=resumable,
            arrival_time=float(len(self.prompts)),
        )
        self.prompts[request_id] = list(prompt)
        self.outputs[request_id] = []
        self._requests[request_id] = request
        return request

    def abort(self, request_id: str, *, late: bool = False) -> None:
        from vllm.v1.request import RequestStatus

        if late:
            self._late_aborts.append(request_id)
            return
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
        self.finished.setdefault(request_id, "abort")

    def aborted(self, request_id: str) -> bool:
        return bool(self.finished[request_id] == "abort")

    def step(self) -> Any:
        """Run one engine step. Returns vLLM's SchedulerOutput. With ``ahead``, the scheduler
        receives the results of the previous step, if there was one.
        """
        self.steps += 1
        began = time.thread_time()
        output = self.scheduler.schedule()
        scheduled = time.thread_time()
        result = self._execute(output)
        half = self.worker_half
        backend = None if half is None else half.backend
        if backend is not None and not self.options.check_kv:
            backend.drain()  # a real worker's copies do not block the scheduler's interpreter
        executed = time.thread_time()
        self._unheard.append((output, result))
        if not self.options.ahead or len(self._unheard) > 1 or not self.scheduler.has_requests():
            self._hear()
        self.scheduler_s = time.thread_time() - executed + scheduled - began
        return output

    def _hear(self) -> None:
        """Pass the scheduler the results of the oldest step that it has not received."""
        late, self._late_aborts = self._late_aborts, []
        for request_id in late:
            if request_id not in self.finished:
                self.abort(request_id)
        answers = self.scheduler.update_from_output(*self._unheard.popleft())
        for outputs in answers.values():
            self.last_stats = outputs.scheduler_stats
            for one in outputs.outputs:
                self.outputs[one.request_id].extend(one.new_token_ids)
                if one.finish_reason is not None:
                    self.finished[one.request_id] = one

    def run(self, limit: int = 2000) -> None:
        for _ in range(limit):
            if not (self.scheduler.has_requests() or self.orders_under_way):
                if not self._unheard:
                    return
                self._hear()
                continue
            output = self.step()
            if self.worker is not None and not output.total_num_scheduled_tokens:
                self.wait_for_worker()  # only copies are pending
        raise AssertionError(f"still in progress after {limit} steps: {self.unfinished()}")

    def reset_cache(self, *, running: bool = True) -> bool:
        return bool(self.scheduler.reset_prefix_cache(reset_running_requests=running))

    def close(self) -> None:
        self.scheduler.shutdown()
        if self.worker is not None:
            self.worker.shutdown()

    # -- state that tests examine -------------------------------------------------

    @property
    def connector(self) -> Any:
        """The connector of the scheduler side; None for stock vLLM."""
        return self.scheduler.connector

    @property
    def half(self) -> Any:
        return getattr(_ours(self.connector), "scheduler_half", None)

    @property
    def worker_half(self) -> Any:
        return getattr(_ours(self.worker), "worker_half", None)

    @property
    def pool(self) -> Any:
        """vLLM's block pool."""
        return self.scheduler.kv_cache_manager.block_pool

    @property
    def tables(self) -> Mapping[str, Sequence[Any]]:
        """vLLM's blocks of each request, in the first group."""
        return self.tables_of(0)

    def tables_of(self, group: int) -> Mapping[str, Sequence[Any]]:
        """Return vLLM's blocks of each request, in one group."""
        manager = self.scheduler.kv_cache_manager.coordinator.single_type_managers[group]
        tables: Mapping[str, Sequence[Any]] = manager.req_to_blocks
        return tables

    def table(self, request_id: str, group: int = 0) -> list[int]:
        """Return the ids of a request's blocks in a group, in vLLM's order; 0 for missing
        blocks.
        """
        return [block.block_id for block in self.tables_of(group).get(request_id, ())]

    def page(self, block_id: int, group: int = 0) -> Cells:
        """Return the bytes of a block that contain a group's KV, for reading or writing."""
        return self.runner.groups[group][block_id]

    def kept_blocks(self, tokens: int) -> int:
        return kept_blocks(self.groups, tokens, sparse=self.options.retention is not None)

    @property
    def free_blocks(self) -> int:
        return int(self.pool.get_num_free_blocks())

    def running(self) -> list[str]:
        return [request.request_id for request in self.scheduler.running]

    def preemptions(self, request_id: str) -> int:
        return int(self._requests[request_id].num_preemptions)

    def held(self) -> list[str]:
        """Return the ids of requests that are held back, either parked or in vLLM's own queue."""
        parked = list(getattr(self.scheduler, "parked", ()))
        return parked or sorted(self.admission.queue.held)

    # -- the worker and its model -----------------------------------------------------

    def _execute(self, output: Any) -> Any:
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        connector_output = None
        if self.worker is None:
            self._update(output)
            sampled = self._forward(output)
        else:
            worker = self.worker
            worker.handle_preemptions(output.kv_connector_metadata)
            worker.bind_connector_metadata(output.kv_connector_metadata)
            # As in vLLM's model runners, loads for this forward pass run before it, and after
            # blocks were zeroed and states carried over.
            self._update(output)
            if output.has_sync_kv_loads:
                worker.start_load_kv(None)
            half = self.worker_half
            sampled = self._forward(output, () if half is None else half.bad_blocks)
            if not output.has_sync_kv_loads:
                worker.start_load_kv(None)
            worker.wait_for_save()
            results = worker.get_transfer_results(output.finished_req_ids)
            connector_output = KVConnectorOutput(
                finished_sending=results.finished_sending,
                finished_recving=results.finished_recving,
                failed_recving=results.failed_recving,
                invalid_block_ids=worker.get_block_ids_with_load_errors(),
                kv_connector_worker_meta=worker.build_connector_worker_meta(),
            )
            worker.clear_connector_metadata()
        ids = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
            sampled_token_ids=[sampled[request_id] for request_id in ids],
            kv_connector_output=connector_output,
        )

    def _update(self, output: Any) -> None:
        if self.options.check_kv:
            self.runner.update(output)

    def _forward(self, output: Any, bad: Collection[int] = ()) -> dict[str, list[int]]:
        if self.options.check_kv:
            return self.runner.forward(output.num_scheduled_tokens, bad)
        sampled: dict[str, list[int]] = {}
        for request_id in output.num_scheduled_tokens:
            request = self.scheduler.requests[request_id]
            done = request.num_computed_tokens >= request.num_tokens
            sampled[request_id] = [1] if done else []
        return sampled


def _ours(connector: Any) -> Any:
    """Return the connector of this package, which may be one of several; None if the engine does
    not have it."""
    parts = getattr(connector, "sub_connectors", (connector,))
    return next((one for one in parts if hasattr(one, "scheduler_half")), None)

"""``TieredContinuumConnector``: adapts vLLM's hooks to the scheduler half and the worker half.

The connector is a façade: it checks the configuration, builds the half that its role needs, and
catches every exception of the scheduler half, which would otherwise stop the server.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import vllm
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.kv_events import AllBlocksCleared
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from tiered_kv.config import TierConfig, load_config
from tiered_kv.connectors.runtime.base import EngineFacts
from tiered_kv.connectors.runtime.dependencies import Clock, Dependencies
from tiered_kv.connectors.runtime.hook_guard import never_raises
from tiered_kv.connectors.runtime.observe.observation import make_worker_half
from tiered_kv.connectors.runtime.policy_state import PolicyState
from tiered_kv.connectors.runtime.scheduler import SchedulerHalf
from tiered_kv.connectors.runtime.step_timer import StepTimer
from tiered_kv.connectors.runtime.steps.step_trace import StepTrace
from tiered_kv.connectors.runtime.tool_reader import NoTools, ToolCalls, ToolReader
from tiered_kv.connectors.runtime.worker.speed_probe import prefill_work
from tiered_kv.connectors.runtime.worker.worker import WorkerHalf
from tiered_kv.connectors.vllm.requests.vllm_request import (
    UnreadIds,
    VllmRequest,
    hints_of,
    request_maker,
)
from tiered_kv.messages import Orders
from tiered_kv.page_group import CONTEXT
from tiered_kv.policies import registry
from tiered_kv.policies.admission.working_set import JobForecast
from tiered_kv.policies.cache.restore_mode import FasterRestore
from tiered_kv.storage.notebook import folder_for_notes, open_notebook
from tiered_kv.vllm_versions import parse_version

from .block_pool import Resets, VllmBlockPool, kept_states, scheduled_step, watch_resets
from .engine_config import (
    check_version,
    read_engine,
    refuse_unsupported,
    report_block_size,
    report_speculation,
    with_hash_units,
)
from .envelopes import TieredHandshake, TieredMetadata, TieredWorkerMetadata
from .fingerprints import Fingerprints, base_fingerprints
from .kv_groups import why_not_offloadable
from .other_connectors import connector_class, refuse_company
from .plugin import share_logging
from .published_events import EventConverter, watch_cleared
from .stats import TieredPromMetrics, TieredStats
from .weights import WeightCalls, install

logger = logging.getLogger(__name__)

REPORTS_EVERY_S = 0.005
"""Pause between the steps of an idle engine that waits only for demotions to be reported, seconds.
A request that arrives meanwhile waits for the rest of the pause."""


class TieredContinuumConnector(KVConnectorBase_V1, SupportsHMA):
    """KV connector that keeps KV in VRAM, in CPU memory, on SSD or nowhere between an agent's
    turns.

    Raises:
        ConfigError, UnsupportedError: at startup; the message says what to change.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        share_logging()
        check_version(vllm.__version__)
        refuse_unsupported(vllm_config)
        transfer = vllm_config.kv_transfer_config
        # Other connectors are known only in the workers. Workers are created first, so an error
        # there stops the startup.
        engine = get_current_vllm_config_or_none()
        if engine is not None and engine.kv_transfer_config is not None:
            refuse_company(transfer, engine.kv_transfer_config, connector_class)
        config = load_config(os.environ, transfer.kv_connector_extra_config)
        super().__init__(vllm_config, role, kv_cache_config)
        facts = replace(read_engine(vllm_config, kv_cache_config), version=vllm.__version__)
        self._deps: Dependencies | None = None
        self.scheduler_half: SchedulerHalf | None = None  # set once blocks are allocated
        self.worker_half: WorkerHalf | None = None
        self.weight_calls: WeightCalls | None = None  # set once blocks are allocated
        self._has_states = facts.has_states
        self._positions: dict[int, int] = {}
        self._step_trace: StepTrace | None = None
        self._convert_events: EventConverter | None = None
        self._paused_at = 0
        self._unread_ids = UnreadIds(os.environ)
        self._introduced = False
        if role is KVConnectorRole.SCHEDULER:
            install()  # needed if the plugin was not loaded
            report_speculation(vllm_config)
            report_block_size(facts)
            if reason := why_not_offloadable(vllm_config, kv_cache_config):
                logger.warning("the KV of this model is kept in VRAM only: %s", reason)
            if config.ssd_path is not None and not getattr(vllm_config, "shutdown_timeout", 0):
                logger.warning(
                    "without --shutdown-timeout, vLLM kills its workers when the server "
                    "stops, and pages that only CPU memory holds are lost. Add "
                    "--shutdown-timeout 30 to write them to SSD"
                )
            self._deps = self.make_dependencies(vllm_config, facts, config)
        else:
            self.worker_half = make_worker_half(
                facts,
                config,
                vllm_config.parallel_config.rank,
                lambda: base_fingerprints(vllm_config, facts),
                self.clock(),
            )

    @classmethod
    def clock(cls) -> Clock:
        """Return the clock of both halves: monotonic seconds."""
        return time.monotonic

    @classmethod
    def make_dependencies(
        cls, vllm_config: Any, facts: EngineFacts, config: TierConfig
    ) -> Dependencies:
        """Create everything that the scheduler half depends on. Tests and simulations override it.

        Raises:
            ConfigError: the policy does not exist.
        """
        policy = registry.policy(config.policy)
        notes = folder_for_notes(config.notes_path)
        saved = PolicyState(policy, notes, config.policy)
        saved.load()
        return Dependencies(
            facts=facts,
            config=config,
            fingerprints=Fingerprints(
                base_fingerprints(vllm_config, facts),
                hashes_paths=parse_version(vllm.__version__) != (0, 30),
            ),
            prefill_work=prefill_work(vllm_config.model_config),
            policy=policy,
            policy_state=saved,
            notebook=open_notebook(notes, facts.replica, keep=config.keeps_notes),
            eviction=registry.eviction(config.eviction),
            restore_policy=FasterRestore(),
            job_forecast=JobForecast(),
            tools=_tool_reader(vllm_config) if policy.reads_tools else NoTools(),
            make_request=request_maker(vllm_config),
            step_timer=StepTimer(),
            clock=cls.clock(),
            wall=time.time,
        )

    @property
    def requires_kv_delivery(self) -> bool:
        """Return False, because the connector is a cache, and a lost save only causes a miss."""
        return False

    @property
    def _scheduler(self) -> SchedulerHalf:
        assert self.scheduler_half is not None, "a scheduler hook on a worker, or before the blocks"
        return self.scheduler_half

    @property
    def _worker(self) -> WorkerHalf:
        assert self.worker_half is not None, "a worker hook on the scheduler"
        return self.worker_half

    def _hook_failed(self, name: str) -> None:
        half = self.scheduler_half
        if half is None:
            logger.exception("%s failed; the engine continues without it", name)
            return
        half.errors.add(name, "the engine continues without it")
        try:
            half.release_all()  # a half-finished hook must not keep blocks from the engine
        except Exception:
            logger.exception("pins and saves could not be released either")

    # -- scheduler side -----------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        assert self._deps is not None, "a scheduler hook on a worker"
        facts = with_hash_units(self._deps.facts, kv_cache_manager)
        deps = self._deps = replace(self._deps, facts=facts)
        pool = VllmBlockPool(kv_cache_manager, [group.index for group in deps.facts.groups])
        self._positions = {group.index: at for at, group in enumerate(deps.facts.groups)}
        try:
            half = self.scheduler_half = SchedulerHalf(deps, pool)
        except Exception:
            deps.close()
            raise
        self._step_trace = half.gaps.log.steps
        resets = watch_resets if deps.config.observes else Resets
        resets(kv_cache_manager, pool.tables[CONTEXT], half.before_reset)
        if half.events is not None:
            self._convert_events = EventConverter(kv_cache_manager, deps.facts.groups)
            watch_cleared(kv_cache_manager, half.events.on_cleared)
        observes, fingerprints = deps.config.observes, deps.fingerprints
        assert isinstance(fingerprints, Fingerprints)
        self.weight_calls = WeightCalls(
            half,
            fingerprints,
            half.before_reset if observes else kv_cache_manager.reset_prefix_cache,
            deps.config.harmless_calls,
            deps.clock,
        )

    @never_raises(lambda self: None)
    def on_new_request(self, request: Any) -> None:
        if request.abort_immediately:
            # The request is refused, because the server rejected it or the engine is paused. vLLM
            # only passes it so that a connector can free resources. Its job is still between turns.
            return
        hints = hints_of(request)
        self._unread_ids.look(hints)
        self._scheduler.on_arrived(VllmRequest(request), hints)

    @never_raises(lambda self: (0, False))
    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._scheduler.match(request.request_id, num_computed_tokens)

    @never_raises(lambda self: None)
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        half = self._scheduler
        try:
            half.on_allocated(request.request_id, num_external_tokens)
        except Exception:
            if num_external_tokens > 0:
                half.refuse_restore(request.request_id)
            raise

    @never_raises(lambda self: {})
    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[Any, int]:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource  # since 0.32, like this hook

        disk = min(num_external_tokens, self._scheduler.tokens_from_ssd(request.request_id))
        found = {CacheHitSource.HOST: num_external_tokens - disk, CacheHitSource.DISK: disk}
        return {source: tokens for source, tokens in found.items() if tokens}

    # The hooks of every step have their own guards, because the wrapper's cost would be noticeable.

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        try:
            orders = self.scheduler_half.build_orders(  # type: ignore[union-attr]
                scheduler_output.num_scheduled_tokens,
                kept_states(scheduler_output, self._positions) if self._has_states else (),
            )
        except Exception:
            self._hook_failed("build_connector_meta")
            orders = self._scheduler.take_orders()
        if self._step_trace is not None:
            self._step_trace.step(lambda: scheduled_step(scheduler_output))
        return TieredMetadata(orders)

    def update_connector_output(self, connector_output: Any) -> None:
        meta = connector_output.kv_connector_worker_meta
        if meta is None:
            return
        try:
            self.scheduler_half.on_reports(meta.reports)  # type: ignore[union-attr]
        except Exception:
            self._hook_failed("update_connector_output")

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    @never_raises(lambda self: (False, None))
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, self._scheduler.on_finished(request.request_id)

    @never_raises(lambda self: False)
    def has_pending_block_frees(self) -> bool:
        return self._scheduler.release_for_running()

    @never_raises(lambda self: False)
    def has_pending_push_work(self) -> bool:
        half = self._scheduler
        pending = half.has_pending_push_work()
        if pending and half.awaits_demotions and self._paused_at != half.step:
            # An idle engine steps only for the workers' reports, so that KV events are published.
            self._paused_at = half.step
            time.sleep(REPORTS_EVERY_S)
        return pending

    def take_events(self) -> Sequence[Any]:
        if self._convert_events is None:
            return ()
        try:
            return self._convert_events(self.scheduler_half.events.take())  # type: ignore[union-attr]
        except Exception:
            # Unlike other hooks, this hook leaves nothing to release, and would fail again.
            self._convert_events = None
            self._scheduler.stop_events()
            return (AllBlocksCleared(),)

    @never_raises(lambda self: False)
    def reset_cache(self) -> bool:
        self._scheduler.reset()
        return True

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        ranks = 1 + max((rank for _, rank in metadata), default=0)
        self.set_xfer_handshake_metadata(
            {stage * ranks + rank: one for (stage, rank), one in metadata.items()}
        )

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        found = {r: one for r, one in metadata.items() if isinstance(one, TieredHandshake)}
        if not self._introduced:  # after a sleep vLLM repeats the handshake of the start
            self._introduced = True
            self._scheduler.on_handshake({rank: one.handshake for rank, one in found.items()})

    # -- worker side --------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        tensors = self._kv_cache_config.kv_cache_tensors
        layers = [layer for tensor in tensors for layer in tensor.layers if layer in kv_caches]
        self._worker.register([kv_caches[layer] for layer in layers])

    # Since 0.33: called around the sleep of an engine, which frees its KV cache.

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        return True

    def unregister_kv_caches(self) -> None:
        self._worker.release_vram()

    def restore_kv_caches(self) -> None:
        self._worker.take_vram()

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return TieredHandshake(self._worker.handshake())

    def _orders(self) -> Orders:
        meta = self._get_connector_metadata()
        assert isinstance(meta, TieredMetadata)
        return meta.orders

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._worker.start(self._orders())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing, because sync restores are complete before the forward pass starts."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing, because blocks are saved whole, after the forward pass."""

    def wait_for_save(self) -> None:
        self._worker.save(self._orders())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        over = self._worker.finish()
        return KVConnectorTransferResults(
            finished_recving=over.requests, failed_recving=over.failed
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_bad_blocks()

    def build_connector_worker_meta(self) -> TieredWorkerMetadata | None:
        reports = self._worker.take_reports()
        return TieredWorkerMetadata(reports) if reports is not None else None

    # -- both sides ---------------------------------------------------------------

    def get_kv_connector_stats(self) -> TieredStats | None:
        half = self.scheduler_half
        if half is None or not half.stats_due:
            return None
        try:
            return TieredStats(data=half.stats.take())
        except Exception:
            self._hook_failed("get_kv_connector_stats")
            return None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> TieredStats:
        return TieredStats(data=data or {})

    @classmethod
    def build_prom_metrics(cls, *args: Any, **kwargs: Any) -> TieredPromMetrics:
        return TieredPromMetrics(*args, **kwargs)

    def shutdown(self) -> None:
        if self.scheduler_half is not None:
            self.scheduler_half.close()
        elif self._deps is not None:
            self._deps.close()
        if self.worker_half is not None:
            self.worker_half.close()


def _tool_reader(vllm_config: Any) -> ToolCalls:
    """Create the reader of tool calls, or a stub if the engine has no tokenizer."""
    model_config = vllm_config.model_config
    if model_config.skip_tokenizer_init:
        return NoTools()

    def load() -> Any:
        from vllm.tokenizers import cached_tokenizer_from_config

        return cached_tokenizer_from_config(model_config)

    return ToolReader(load)

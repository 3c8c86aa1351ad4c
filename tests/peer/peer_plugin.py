"""A pytest plugin that runs vLLM's tests with this project's classes.

pytest loads this module as ``peer_plugin``, because ``tests`` is vLLM's own package in that run.
``PEER_MODE`` selects the classes.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

STOCK, SCHEDULER, CONNECTOR = "stock", "scheduler", "connector"


def pytest_configure() -> None:
    mode = os.environ["PEER_MODE"]
    if mode == STOCK:
        return
    import vllm.v1.core.sched.diffusion_scheduler
    import vllm.v1.engine.core  # noqa: F401
    from vllm.v1.core.sched import async_scheduler, scheduler

    from tiered_kv.connectors.vllm.engine_scheduler import (
        AsyncContinuumScheduler,
        ContinuumScheduler,
    )

    class Sync(ContinuumScheduler):
        """The synchronous scheduler. ``ContinuumScheduler`` would return the asynchronous one under
        async scheduling, but vLLM's tests choose the class themselves."""

    if mode == SCHEDULER:
        scheduler.Scheduler = Sync
        async_scheduler.AsyncScheduler = AsyncContinuumScheduler
        return

    class WithConnector:
        """A scheduler that gets this project's connector if no other is configured."""

        def __init__(self, vllm_config: Any, kv_cache_config: Any, *args: Any, **kwargs: Any):
            kv_cache_config = _give_connector(vllm_config, kv_cache_config)
            super().__init__(vllm_config, kv_cache_config, *args, **kwargs)  # type: ignore[call-arg]

        def update_from_output(self, scheduler_output: Any, result: Any) -> Any:
            result = _copied_at_once(scheduler_output, result)
            return super().update_from_output(scheduler_output, result)  # type: ignore[misc]

    scheduler.Scheduler = type("Scheduler", (WithConnector, Sync), {})
    async_scheduler.AsyncScheduler = type(
        "AsyncScheduler", (WithConnector, AsyncContinuumScheduler), {}
    )


def _give_connector(vllm_config: Any, kv_cache_config: Any) -> Any:
    """Return the KV cache configuration with memory for the connector. Returns it unchanged if the
    engine has a connector, or is a type of engine that the connector refuses."""
    from vllm.config import KVTransferConfig
    from vllm.v1.kv_cache_interface import KVCacheTensor

    from tiered_kv.connectors.vllm.engine_config import refuse_unsupported
    from tiered_kv.errors import UnsupportedError

    groups, cache = kv_cache_config.kv_cache_groups, vllm_config.cache_config
    if vllm_config.kv_transfer_config is not None or vllm_config.model_config.is_encoder_decoder:
        return kv_cache_config
    cached, cache.enable_prefix_caching = cache.enable_prefix_caching, True
    vllm_config.kv_transfer_config = KVTransferConfig(
        kv_connector="TieredContinuumConnector",
        kv_connector_module_path="tiered_kv.connectors.vllm.connector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"cpu_gib": 1.0, "admission": "off"},
    )
    try:
        refuse_unsupported(vllm_config)
    except UnsupportedError:
        vllm_config.kv_transfer_config, cache.enable_prefix_caching = None, cached
        return kv_cache_config
    if len(groups) != 1 or kv_cache_config.kv_cache_tensors:
        return kv_cache_config
    page, blocks = groups[0].kv_cache_spec.page_size_bytes, kv_cache_config.num_blocks
    tensor = KVCacheTensor(
        size=page * blocks,
        layers=list(groups[0].layer_names),
        layer_stride=page * blocks,
        block_stride=page,
        offset=0,
    )
    return replace(kv_cache_config, kv_cache_tensors=[tensor])


def _copied_at_once(scheduler_output: Any, result: Any) -> Any:
    """Return the step's result, extended with a worker report that all of the step's copies have
    finished."""
    from vllm.v1.outputs import KVConnectorOutput

    from tiered_kv.connectors.vllm.envelopes import TieredMetadata, TieredWorkerMetadata
    from tiered_kv.messages import Reports
    from tiered_kv.orders import OrderReport, RestoreMode

    meta = scheduler_output.kv_connector_metadata
    if not isinstance(meta, TieredMetadata) or result.kv_connector_output is not None:
        return result
    orders = meta.orders
    done = {order.order_id: OrderReport(1, frozenset(), 0, 0.0) for order in orders.saves}
    done |= {order.order_id: OrderReport(1, frozenset(), 0, 0.0) for order in orders.loads}
    if not done:
        return result
    arrived = {order.request_id for order in orders.loads if order.mode is RestoreMode.ASYNC}
    said = KVConnectorOutput(
        finished_recving=arrived, kv_connector_worker_meta=TieredWorkerMetadata(Reports(done))
    )
    return replace(result, kv_connector_output=said)

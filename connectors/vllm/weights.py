"""Calls of the engine that may change weights. Each of these calls first starts a new generation of
pages.

Trainers update the weights of a running engine through methods of its workers, whose names they
choose. All of these calls go through ``Executor.collective_rpc``: the calls of ``LLM``,
``AsyncLLM`` and the HTTP routes, ``update_weights`` and ``reload_weights``, and calls by trainers
that run the executor in their own process. So every call of ``collective_rpc`` whose method is not
known to be harmless starts a new generation before it reaches a worker. Afterwards, KV computed
with the old weights is not found in any tier or in VRAM, and running requests are no longer saved.
Steps that were sent before the call run before it, and later steps run after it.

Changes of parameters without any of these calls cannot be detected.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiered_kv.connectors.runtime.dependencies import Clock
    from tiered_kv.connectors.runtime.scheduler import SchedulerHalf

    from .fingerprints import Fingerprints

logger = logging.getLogger(__name__)

_STEP = "a step, or a part of one"
_START = "vLLM calls it when the engine starts or stops"
_READS = "it only reads"
_ADAPTERS = "it changes which adapters are resident, not weights; loads are handled separately"
_CACHES = "it empties a cache of inputs"
_SLEEP = (
    "vLLM resets its cache before a sleep that frees memory; weights are restored unchanged, or "
    "are loaded by a call that is not in this table"
)
HARMLESS: Mapping[str, str] = {
    "execute_model": _STEP,
    "sample_tokens": _STEP,
    "execute_dummy_batch": _STEP,
    "take_draft_token_ids": _STEP,
    "determine_available_memory": _START,
    "compile_or_warm_up_model": _START,
    "initialize_from_config": _START,
    "get_kv_cache_spec": _START,
    "get_kv_connector_handshake_metadata": _START,
    "get_supported_kv_cache_layouts": _START,
    "set_kv_cache_layout": _START,
    "update_max_model_len": _START,
    "shutdown": _START,
    "check_health": _READS,
    "compute_weight_checksums": _READS,
    "get_compilation_match_table": _READS,
    "get_encoder_timing_stats": _READS,
    "get_model_inspection": _READS,
    "get_supported_tasks": _READS,
    "list_loras": _READS,
    "profile": _READS,
    "save_sharded_state": _READS,
    "save_tensorized_model": _READS,
    "synchronize_device": _READS,
    "add_lora": _ADAPTERS,
    "pin_lora": _ADAPTERS,
    "remove_lora": _ADAPTERS,
    "release_late_interaction_query_cache": _CACHES,
    "reset_encoder_cache": _CACHES,
    "reset_mm_cache": _CACHES,
    "discard": _SLEEP,
    "sleep": _SLEEP,
    "wake_up": _SLEEP,
    "handle_ft_command": "it repairs communication; vLLM calls it on a separate thread",
}
"""Worker methods that do not change weights, each with the reason."""

WINDOW_S = 60.0
"""Period in which a method's calls are logged once, seconds."""
OFTEN = 10
"""Number of calls of one method in ``WINDOW_S`` seconds at which a warning is logged."""
_MOST_NAMES = 256


class WeightCalls:
    """Starts a new generation of KV before any call to one engine's workers that may change
    weights. Used on the scheduler's thread.

    Args:
        start_over: resets vLLM's cache, and the connector with it.
        harmless: methods and functions that do not change weights, in addition to ``HARMLESS``.
    """

    def __init__(
        self,
        half: SchedulerHalf,
        fingerprints: Fingerprints,
        start_over: Callable[[], object],
        harmless: Iterable[str],
        clock: Clock,
    ) -> None:
        self._half = half
        self._fingerprints = fingerprints
        self._start_over = start_over
        self._harmless = frozenset(harmless)
        self._clock = clock
        self._logged: dict[str, tuple[float, int]] = {}

    def before(
        self, method: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Start a new generation if a call to the workers may change weights. Must be called before
        the workers are called. Never raises.

        Args:
            method: name of a worker method, or a function called with the worker.
            args, kwargs: arguments of the call.
        """
        if isinstance(method, str) and method in HARMLESS:
            if method == "add_lora" or method == "remove_lora":
                self._guard(lambda: self._before_adapter(method, args, kwargs or {}))
            return
        name = method if isinstance(method, str) else getattr(method, "__qualname__", repr(method))
        if name not in self._harmless:
            self._guard(lambda: self._before_update(name))

    def _before_adapter(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        (given,) = (*args, *kwargs.values())
        if method == "remove_lora":
            self._fingerprints.on_unload(given)
        elif self._fingerprints.on_load(given):
            logger.info("adapter %s changed: all KV computed so far is invalid", given.lora_path)
            self._start_over()

    def _before_update(self, name: str) -> None:
        self._half.before_weights_change()
        self._start_over()
        self._log(name)

    def _guard(self, prepare: Callable[[], None]) -> None:
        try:
            prepare()
        except Exception:
            self._half.errors.add("preparing for a call that may change weights", "KV is dropped")
            self._half.before_reset()

    def _log(self, name: str) -> None:
        now = self._clock()
        since, calls = self._logged.get(name, (now - WINDOW_S, 0))
        if now - since >= WINDOW_S:
            if len(self._logged) >= _MOST_NAMES:
                self._logged.clear()
            since, calls = now, 0
            logger.info("%s may change the weights: all KV computed so far is invalid", name)
        self._logged[name] = since, calls + 1
        if calls + 1 == OFTEN:
            logger.warning(
                "%s was called %d times within %d s. It may change the weights, so each call "
                "drops all KV in VRAM, in CPU memory and on SSD. If it does not change them, add "
                "it to TIERED_KV_HARMLESS_CALLS",
                name,
                OFTEN,
                WINDOW_S,
            )


def install() -> None:
    """Intercept the calls of every executor to which vLLM passes tiered-kv's connector, and calls
    of ``EngineCore.set_weight_version``. Idempotent."""
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor.abstract import Executor

    give = Executor.init_kv_output_aggregator
    if hasattr(give, "__wrapped__"):
        return

    @functools.wraps(give)
    def init_kv_output_aggregator(self: Any, connector: Any) -> None:
        watch(self, connector)
        give(self, connector)

    declare = EngineCore.set_weight_version

    @functools.wraps(declare)
    def set_weight_version(self: Any, *args: Any, **kwargs: Any) -> None:
        calls = calls_of(self.scheduler.get_kv_connector())
        if calls is not None:
            calls.before("set_weight_version")
        declare(self, *args, **kwargs)

    Executor.init_kv_output_aggregator = init_kv_output_aggregator
    EngineCore.set_weight_version = set_weight_version


def watch(executor: Any, connector: Any) -> None:
    """Intercept every call to an executor's workers. Does nothing unless ``connector`` is or
    contains tiered-kv's connector."""
    calls = calls_of(connector)
    if calls is None:
        return
    run = executor.collective_rpc

    @functools.wraps(run)
    def collective_rpc(
        method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None, **options: Any
    ) -> Any:
        calls.before(method, args, kwargs)
        return run(method, timeout, args, kwargs, **options)

    executor.collective_rpc = collective_rpc


def calls_of(connector: Any) -> WeightCalls | None:
    """Return the ``WeightCalls`` of tiered-kv's connector, also inside vLLM's ``MultiConnector``;
    None if there is no such connector."""
    for one in (connector, *getattr(connector, "_connectors", ())):
        calls = getattr(one, "weight_calls", None)
        if isinstance(calls, WeightCalls):
            return calls
    return None

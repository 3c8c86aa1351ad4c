"""A connector that has the KV of every context, to show which KV vLLM needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    SupportsHMA,
)

from tiered_kv.testing.checked_kv import kv
from tiered_kv.testing.vllm.rig import Rig

Tables = Sequence[Sequence[int]]
"""Block ids of a request, by group."""
Offer = tuple[str, int, int, int]
"""A state at the end of a block, as vLLM offers it: request, group, block and tokens."""


class Chance(Protocol):
    """The part of ``random.Random`` that is used here."""

    def randint(self, a: int, b: int) -> int: ...
    def randrange(self, start: int) -> int: ...
    def random(self) -> float: ...
    def randbytes(self, n: int) -> bytes: ...


@dataclass(slots=True)
class _Load:
    tokens: list[int]
    local: int
    tables: Tables
    steps: int
    fails: bool


class PerfectStore(KVConnectorBase_V1, SupportsHMA):
    """Both halves of the connector, on a rig without another connector.

    Args:
        rng: decides how many tokens of a context are available, when they arrive, and whether
            their load fails.
        failures: fraction of the loads that fail.
    """

    scheduler_half = None  # a rig detects the connector under test by this attribute
    worker_half = SimpleNamespace(
        bad_blocks=frozenset(), backend=None, stores={}, compressor=None, snapshots=None
    )

    def __init__(self, rig: Rig, rng: Chance, failures: float = 0.0) -> None:
        self._rig, self._rng, self._failures = rig, rng, failures
        self.is_empty = False
        """True if the store offers no further KV."""
        self._loads: dict[str, _Load] = {}
        self._local: dict[str, int] = {}
        self._failed: set[str] = set()
        self._retried: set[str] = set()
        self._connector_metadata: Any = None
        self._kv_cache_config = rig.scheduler.kv_cache_config
        self.loaded: dict[str, int] = {}
        """Number of tokens after which each request continued with KV from this store, by
        request."""
        self.failed = 0
        """Number of loads that failed."""
        self.on_finish: Callable[[Any, Tables], None] = lambda request, tables: None
        """Called with vLLM's request before its blocks are freed."""
        self.after_pass: Callable[[list[Offer]], None] = lambda offers: None
        """Called after each forward pass, with the states that vLLM offered for it."""
        self._offers: list[Offer] = []
        rig.worker = self
        rig.scheduler.connector = self
        rig.scheduler.defer_block_free = rig.options.ahead  # vLLM sets this with any connector

    # -- scheduler half ---------------------------------------------------------------

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        name, local = request.request_id, num_computed_tokens
        if name in self._failed - self._retried:  # or vLLM may deadlock; see ``Restores.retries``
            self._retried.add(name)
            return None, False
        most = request.num_tokens - 1
        if self.is_empty or most <= local or name in self._failed:
            return 0, False
        if self._may_starve(request):
            return None, False
        self._local[name] = local
        here = self._rng.randint(local, most)
        return here - local, here > local

    def _may_starve(self, request: Any) -> bool:
        """True if the pool may be too small for this request and for the loaded requests that hold
        blocks and do not run yet, each with its partial block and one more. vLLM may deadlock then;
        see ``PinPressure.comes_behind``."""
        rig, running = self._rig, set(self._rig.running())
        holding = [
            one
            for name, one in rig.scheduler.requests.items()
            if name in self.loaded and name not in running and rig.table(name)
        ]
        wanted = sum(
            one.num_tokens // group.spec.block_size + 2
            for one in (*holding, request)
            for group in rig.runner.groups
        )
        return bool(holding) and wanted >= rig.options.blocks

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if not num_external_tokens:
            return
        name = request.request_id
        local = self._local[name]
        self.loaded[name] = local + num_external_tokens
        fails = self._rng.random() < self._failures
        self.failed += fails
        if fails:
            self._failed.add(name)
        tokens = list(request.all_token_ids[: self.loaded[name]])
        self._loads[name] = _Load(
            tokens, local, blocks.get_block_ids(), self._rng.randrange(4), fails
        )

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        state = scheduler_output.kv_connector_block_state
        self._offers = [
            (name, *offer)
            for name, offers in state.boundary_state_offloads.items()
            for offer in offers
        ]
        return KVConnectorMetadata()

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(self, request: Any, block_ids: Tables) -> tuple[bool, None]:
        self.on_finish(request, block_ids)
        return False, None

    # -- worker half ------------------------------------------------------------------

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Write the KV that a hit needs into its blocks, and random bytes into the rest of the
        blocks."""
        for load in self._loads.values():
            load.steps -= 1
            if load.steps > 0:
                continue
            cells = kv(load.tokens)
            for group, table in zip(self._rig.runner.groups, load.tables, strict=True):
                size = group.spec.block_size
                for i in group.spec.reach.blocks(len(cells), size):
                    if i >= load.local // size:
                        noise = self._rng.randbytes(len(group[table[i]]))
                        group[table[i]][:] = np.frombuffer(noise, dtype=np.uint8)
                if not load.fails:
                    group.put(table, cells)

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None:
        self.after_pass(self._offers)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        done = {name: one for name, one in self._loads.items() if one.steps <= 0}
        for name in done:
            del self._loads[name]
        failed = {name for name, one in done.items() if one.fails}
        return KVConnectorTransferResults(finished_recving=set(done), failed_recving=failed)

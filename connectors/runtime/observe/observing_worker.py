"""The worker half of an engine that is only observed: it looks at the engine's KV, and has no
memory, file or thread for it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tiered_kv.config import TierConfig
from tiered_kv.connectors.runtime.base import EngineFacts
from tiered_kv.connectors.runtime.worker.compressor import codecs_of
from tiered_kv.connectors.runtime.worker.cpu_size import slots_of
from tiered_kv.connectors.runtime.worker.kv_tensors import flops_of, storage_of
from tiered_kv.connectors.runtime.worker.speed_probe import measure_reads
from tiered_kv.connectors.runtime.worker.worker import WorkerHalf
from tiered_kv.keys import Fingerprint
from tiered_kv.messages import Handshake
from tiered_kv.policies.cache.compression import staging_slots

logger = logging.getLogger(__name__)


class ObservingWorker(WorkerHalf):
    """One rank's side of the connector, which does nothing in a step. See ``WorkerHalf``."""

    _virtual_slots = 0
    _compresses: tuple[int, ...] = ()

    def register(self, kv_caches: Sequence[Any]) -> None:
        """Measure this machine. KV is read, for a few milliseconds, and not written.

        Raises:
            ConfigError: the CPU tier would hold no page, or there is no such codec.
            UnsupportedError: the engine's KV cache lies in several allocations.
        """
        facts, config = self._facts, self._config
        self._speeds = replace(self._speeds, flops=flops_of(kv_caches))
        if not facts.groups or config.cpu_gib == 0:
            return
        slots = slots_of(facts, config)
        self._speeds = replace(self._speeds, copy=measure_reads(storage_of(kv_caches)))
        if staging := staging_slots(slots):
            self._compresses = tuple(codecs_of(facts, config.codec))
        self._virtual_slots = slots - (staging if self._compresses else 0)
        logger.info("CPU tier of rank %d: %d slots, none of them made", self._rank, slots)

    def handshake(self) -> Handshake:
        """Speeds of this rank, and what its tiers would have room for. They begin empty."""
        said = super().handshake()
        return replace(said, slots=self._virtual_slots, compresses=self._compresses)


def make_worker_half(
    facts: EngineFacts,
    config: TierConfig,
    rank: int,
    fingerprints: Callable[[], Sequence[Fingerprint]],
    clock: Callable[[], float],
) -> WorkerHalf:
    """Make a rank's worker half for the mode that is configured. Takes what that takes."""
    make = ObservingWorker if config.observes else WorkerHalf
    return make(facts, config, rank, fingerprints, clock)

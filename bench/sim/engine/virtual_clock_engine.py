"""An engine on a virtual clock: vLLM's scheduler, the connector's scheduler half, and a stand-in
worker.

Time passes in steps, whose duration ``StepCost`` determines. While all requests only decode,
several steps are taken together (a leap): every running request produces the tokens that it would
have produced until the next event. Only the connector's timed admissions can fall within a leap
(see ``LEAP_WAITING_S``); otherwise a leap just saves the simulator's own time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from tiered_kv.bench.sim.servers.arrivals import Order
from tiered_kv.bench.sim.servers.schedulers import (
    REACH_BLOCKS,
    ReachScheduler,
    StaticBatchScheduler,
)
from tiered_kv.bench.sim.servers.servers import CLAIRVOYANT, Server
from tiered_kv.connectors.runtime.dependencies import Dependencies
from tiered_kv.connectors.runtime.policy_state import PolicyState
from tiered_kv.connectors.runtime.step_timer import StepTimer
from tiered_kv.connectors.vllm.engine_scheduler import ContinuumScheduler
from tiered_kv.connectors.vllm.envelopes import TieredHandshake
from tiered_kv.messages import Handshake, Speeds, StoredPages
from tiered_kv.orders import RestoreMode
from tiered_kv.page_group import KvKind
from tiered_kv.policies.admission.working_set import JobForecast
from tiered_kv.policies.base import TurnPolicy
from tiered_kv.policies.cache.restore_mode import AlwaysRestore
from tiered_kv.storage.notebook import NoNotebook
from tiered_kv.testing.vllm.changes import given
from tiered_kv.testing.vllm.engine import EngineSize, engine_config, kv_config, make_scheduler
from tiered_kv.tiers import SSD, StoreId

from .lookups import RememberedLookups
from .machines import GIB, Machine, Tiers
from .metrics import TurnRecord
from .worker import SimWorker

BEGIN_S = 1000.0
"""Start of the clock, seconds. Not 0, which connectors may interpret as never."""
LONGEST_LEAP = 64
"""Maximum number of decode steps per leap."""
LEAP_WAITING_S = 0.25
"""Longest leap while requests wait, seconds. A leap can delay the connector's timed admissions by
its duration."""
EPOCH_S = 1.8e9 - BEGIN_S
"""Seconds since the epoch at clock time 0, so that traces have the same times in every run."""
LONGEST_WAIT_S = 86_400.0
"""Largest value of ``admission_max_wait_s``, seconds. No run lasts that long."""


class LeapTimer(StepTimer):
    """Step timer that counts a leap as the number of its decode steps.

    Args:
        decoded: returns the number of steps so far, including steps within leaps.
    """

    def __init__(self, decoded: Callable[[], int]) -> None:
        super().__init__()
        self._decoded = decoded
        self._seen = 0

    def look(self, now: float, steps: int) -> None:
        since, self._seen = self._decoded() - self._seen, self._decoded()
        super().look(now, steps and since)


@dataclass(frozen=True, slots=True)
class ChunkedRestore(AlwaysRestore):
    """Restore policy that restores only whole chunks, without the partial chunk at the end.

    Attributes:
        chunk: tokens per chunk.
    """

    chunk: int

    def usable(self, tokens: int) -> int:
        return tokens // self.chunk * self.chunk


def connector_settings(
    server: Server, folder: Path, tiers: Tiers, trace: Path | None = None
) -> dict[str, object] | None:
    """Return a server's ``kv_connector_extra_config``; None without the connector.

    Args:
        folder: folder in which the SSD tier's folder is created, if the server has that tier.
        trace: file for the connector's trace; None writes no trace.
    """
    if server.policy is None:
        return None
    if server.ssd:
        (folder / "ssd").mkdir()
    said = {
        "policy": "lru" if server.policy == CLAIRVOYANT else server.policy,  # Engine replaces it
        "cpu_gib": tiers.cpu / GIB if server.cpu else 0,
        "eviction": server.eviction,
        "admission": "off" if server.open else None,
        "admission_max_wait_s": LONGEST_WAIT_S if server.patient else None,
        "ssd_path": str(folder / "ssd") if server.ssd else None,
        "ssd_gib": tiers.ssd / GIB if server.ssd else None,
        "trace": None if trace is None else str(trace),
    }
    return {name: value for name, value in said.items() if value is not None}


@dataclass(slots=True)
class _Live:
    request: Any
    turn: TurnRecord
    cached: int = 0
    ahead: int = 0  # tokens produced in a leap, whose time has already passed


class Engine:
    """A server on a virtual clock.

    Args:
        folder: an empty folder, for vLLM's model and the SSD tier.
        pool_blocks: size of the VRAM pool, without the null block.
        held_blocks: maximum number of blocks that all running requests may hold.
        block: tokens per block.
        max_len: maximum request length, tokens.
        policy: replaces the server's policy.
        job_forecast: replaces the forecast of each job's further turns.
        trace: file for the connector's trace; None writes no trace.

    Raises:
        ValueError: the model has KV of several types, which the server does not support.
    """

    def __init__(
        self,
        machine: Machine,
        server: Server,
        folder: Path,
        *,
        pool_blocks: int,
        held_blocks: int,
        block: int,
        max_len: int,
        tiers: Tiers,
        policy: TurnPolicy | None = None,
        job_forecast: JobForecast | None = None,
        trace: Path | None = None,
    ) -> None:
        if server.chunk and machine.groups:
            raise ValueError(
                f"{server.name} can serve only models with full attention: choose another model"
            )
        self.machine = machine
        self.now = BEGIN_S
        self.block = block
        self.steps = 0
        self.decoded_steps = 0
        size = EngineSize(
            blocks=pool_blocks + 1,
            block_size=block,
            kv_bytes=machine.kv_bytes,
            max_model_len=max_len,
            max_num_seqs=machine.max_seqs,
            max_batched_tokens=machine.batched_tokens,
            long_prefill=machine.long_prefill,
            prefix_caching=machine.prefix_caching,
            policy="fcfs" if server.order is Order.ARRIVAL else "priority",
            groups=tuple(replace(group, block_size=block) for group in machine.groups),
        )
        extra = connector_settings(server, folder, tiers, trace)
        config = engine_config(folder / "model", size, extra)
        for wanted, scheduler in (
            (server.in_job_order, ContinuumScheduler),
            (server.in_batches, StaticBatchScheduler),
            (server.within_reach, ReachScheduler),
        ):
            if wanted:
                config.scheduler_config.scheduler_cls = scheduler
        if server.within_reach:
            config.additional_config = {REACH_BLOCKS: held_blocks + 1}
        self._server, self._policy, self._job_forecast = server, policy, job_forecast
        with given(lambda: self.now, self._change):
            self.scheduler = make_scheduler(config, kv_config(size), log_stats=False)
        if not machine.groups:
            RememberedLookups(self.scheduler.kv_cache_manager)
        self._live: dict[str, _Live] = {}
        self._free_at_start = self.pool.get_num_free_blocks()
        self.worker: SimWorker | None = None
        if extra is not None:
            page_bytes = tuple(group.page_bytes for group in self.half.facts.groups)
            self.worker = SimWorker(machine, page_bytes, int(tiers.ssd) if server.ssd else 0)
            self._introduce(page_bytes)

    def _change(self, found: Dependencies) -> Dependencies:
        """Return the connector's dependencies with the virtual clock, without files, and with the
        server's own variants of parts.
        """
        found.policy_state.close()
        found.notebook.close()
        policy = self._policy or found.policy
        if self._server.variant is not None:
            policy = self._server.variant()
        if self._server.chunk:
            found = replace(
                found, restore_policy=ChunkedRestore(RestoreMode.SYNC, self._server.chunk)
            )
        return replace(
            found,
            wall=lambda: EPOCH_S + self.now,
            policy=policy,
            policy_state=PolicyState(policy, None, ""),
            notebook=NoNotebook(),
            job_forecast=self._job_forecast or found.job_forecast,
            step_timer=LeapTimer(lambda: self.decoded_steps),
        )

    def _introduce(self, page_bytes: tuple[int, ...]) -> None:
        """Report to the connector the speeds that workers would have measured."""
        server, machine, groups = self._server, self.machine, range(len(page_bytes))
        hello = Handshake(
            Speeds(copy=machine.link if server.cpu else 0.0, flops=0.0),
            self.half.pages.index.num_slots,
            page_bytes,
            tuple(groups) if machine.shrinks and server.cpu else (),
            {StoreId(SSD, at): StoredPages((), machine.ssd_read) for at in groups if server.ssd},
        )
        self.scheduler.connector.set_xfer_handshake_metadata({0: TieredHandshake(hello)})
        fit = self.half.gaps.prefills.fit
        fit.suppose(1e3 * machine.cost.token, 0.5e6 * machine.cost.pair)

    @property
    def half(self) -> Any:
        """The connector's scheduler half."""
        return self.scheduler.connector.scheduler_half

    @property
    def pool(self) -> Any:
        """vLLM's block pool."""
        return self.scheduler.kv_cache_manager.block_pool

    @property
    def busy(self) -> bool:
        """True if there are requests, or orders whose reports have not been received."""
        if self.scheduler.has_requests():
            return True
        return self.worker is not None and self.half.orders_under_way

    @property
    def next_event(self) -> float:
        """Time of the worker's next report; infinite if the worker has no orders."""
        return self.worker.next_event if self.worker is not None else math.inf

    # -- driving --------------------------------------------------------------------

    def add(
        self,
        request_id: str,
        turn: TurnRecord,
        chain: Sequence[bytes],
        tokens: list[int],
        params: Mapping[str, object] | None,
        priority: int,
    ) -> None:
        """Add an arriving request.

        Args:
            turn: the turn's record. The engine fills in everything except ``ended_s``.
            chain: block hashes of the context, including the answer.
            tokens: token ids of the prompt.
            params: kv_transfer_params; None without hints.
            priority: lower values run first.
        """

        def hashes(request: Any) -> list[bytes]:
            return list(chain[len(request.block_hashes) : request.num_tokens // self.block])

        request = Request(
            request_id=request_id,
            prompt_token_ids=tokens,
            sampling_params=SamplingParams(
                max_tokens=turn.output,
                ignore_eos=True,
                temperature=0.0,
                extra_args=None if params is None else {"kv_transfer_params": dict(params)},
            ),
            pooling_params=None,
            arrival_time=self.now,
            priority=priority,
            block_hasher=hashes,
        )
        self._live[request_id] = _Live(request, turn)
        self.scheduler.add_request(request)

    def step(self, next_arrival: float) -> list[str]:
        """Run a step, or a leap: several decode steps together that end before ``next_arrival``.
        Returns the ids of finished requests."""
        output = self.scheduler.schedule()
        began = self.now
        self.steps += 1
        counts = output.num_scheduled_tokens
        for request_id in output.preempted_req_ids or ():
            self._live[request_id].ahead = 0
        for fresh in output.scheduled_new_reqs:
            live = self._live[fresh.req_id]
            if live.turn.admitted_s < 0:
                live.turn.admitted_s, live.cached = began, fresh.num_computed_tokens
        meta = output.kv_connector_metadata
        if self.worker is not None:
            ready = self.worker.restore(meta.orders, began)
            self.now = ready if output.has_sync_kv_loads else began
        said: dict[str, list[int]] = {}
        if counts:
            step_s, decoding = self._cost(counts)
            leap = 1
            if decoding and not output.scheduled_new_reqs:
                leap = self._leap(len(counts), step_s, next_arrival)
            self.decoded_steps += leap
            # Each step of a leap reads one more token of each context than the previous step.
            grows = self.machine.cost.kv * len(counts) * leap * (leap - 1) / 2
            self.now += step_s * leap + grows
            said = {request_id: self._computed(request_id, leap) for request_id in counts}
        connector_output = None
        if self.worker is not None:
            self.worker.save(meta.orders, self.now)
            connector_output = self.worker.report(self.now)
        result = ModelRunnerOutput(
            req_ids=list(said),
            req_id_to_index={request_id: i for i, request_id in enumerate(said)},
            sampled_token_ids=list(said.values()),
            kv_connector_output=connector_output,
        )
        heard_of = self.scheduler.update_from_output(output, result).values()
        outputs = (one for some in heard_of for one in some.outputs)
        return [self._finish(one) for one in outputs if one.finish_reason is not None]

    def _cost(self, counts: Mapping[str, int]) -> tuple[float, bool]:
        """Return the duration of one step with this batch, and whether the batch only decodes."""
        cost = self.machine.cost
        tokens, pairs, read, near, decoding = 0, 0.0, 0, 0.0, True
        for request_id, count in counts.items():
            live = self._live[request_id]
            end = live.request.num_computed_tokens  # vLLM has counted this step already
            new = max(1, count - live.ahead)
            tokens += new
            if new > 1:
                pairs += new * (end - new / 2)
            else:
                read += end
            near += cost.near(new, end)
            decoding = decoding and new == 1 and live.turn.first_s >= 0
        return cost.seconds(tokens, pairs, read, len(counts)) + near, decoding

    def _computed(self, request_id: str, leap: int) -> list[int]:
        """Record the progress of a request in a step. Returns the sampled tokens."""
        live = self._live[request_id]
        live.ahead = leap - 1
        if live.request.num_computed_tokens < live.request.num_tokens:
            return []
        if leap > 1:  # none of these tokens is the request's last
            live.request.append_output_token_ids([0] * live.ahead)
        if live.turn.first_s < 0:
            live.turn.first_s = self.now
        return [0]

    def _leap(self, running: int, step_s: float, next_arrival: float) -> int:
        """Return the number of decode steps until the next event: an arrival, a request's end, a
        transfer, or a shortage of blocks.

        Args:
            running: number of requests in the step.
            step_s: duration of one step, seconds.
        """
        scheduler = self.scheduler
        if running != len(scheduler.running):
            return 1
        until = min(next_arrival, self.next_event)
        if self.worker is not None and scheduler.get_request_counts()[1]:
            until = min(until, self.now + LEAP_WAITING_S)
        by_time = (until - self.now) / step_s
        left = min(r.max_tokens - r.num_output_tokens for r in scheduler.running) - 1
        by_budget = self.machine.batched_tokens // running
        return int(max(1, min(LONGEST_LEAP, by_time, left, self._room(running), by_budget)))

    def _room(self, running: int) -> int:
        """Return the number of tokens that each running request can add before blocks run out. For
        a model with recurrent layers, returns the number of tokens to the next block boundary,
        because vLLM treats more tokens than that as a prefill.
        """
        groups = self.machine.groups
        if any(group.kind is KvKind.STATE for group in groups):
            requests = self.scheduler.running
            return int(min(self.block - r.num_computed_tokens % self.block for r in requests))
        free = self.pool.get_num_free_blocks() // (running * max(1, len(groups))) - 1
        return int(free * self.block)

    def _finish(self, one: Any) -> str:
        """Complete the record of a finished request. Returns the request id."""
        live = self._live.pop(one.request_id)
        turn = live.turn
        said = (one.kv_transfer_params or {}).get("tiered_kv", {})
        below, turn.ssd = said.get("cpu_tokens", 0), said.get("ssd_tokens", 0)
        turn.cpu = below - turn.ssd
        turn.vram = max(0, min(live.cached, turn.prompt) - below)
        turn.preempted = live.request.num_preemptions
        return str(one.request_id)

    def check_clean(self) -> None:
        """Check that all blocks, orders and turns were released.

        Raises:
            AssertionError: blocks, orders or turns are left.
        """
        if self.worker is not None:
            half = self.half
            half.admission.pins.release_all()
            half.pages.index.check_integrity()
            assert half.pages.book.in_flight == 0, "orders never settled"
            assert not len(half.turns), "turns never ended"
            assert half.counters.totals["hook_errors"] == 0, "a hook raised"
        lost = self._free_at_start - self.pool.get_num_free_blocks()
        assert lost == 0, f"{lost} blocks leaked"

    def close(self) -> None:
        """Shut down the scheduler and the connector."""
        self.scheduler.shutdown()

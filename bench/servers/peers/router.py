"""vLLM's router with program scheduling, in front of one server.

The router holds programs back so that the contexts of those that it lets run fit together, and lets
a program keep its place for a while after an answer. It never tells the server. A program is
recognised by the header ``X-Session-ID``. Both that time and the order depend on what a step
costs, so its cost models get the costs that stock showed on this machine.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiered_kv.bench.replay.server_costs import ServerCosts
from tiered_kv.bench.servers.service import Launch, ServerError, Service, free_port
from tiered_kv.bench.servers.vllm_server import ServerOptions

from .deployment import Deployed, Setting
from .environments import program

START_S = 60.0
PREFILL = 1_000
"""Tokens of the prefill for which the router is told how far decoding goes on beside it."""


def program_scheduling(
    costs: ServerCosts, capacity_tokens: int, *, most_waiting: int
) -> dict[str, Any]:
    """The router's ``--program-scheduling-config-json``. One queue for all, as its documents
    recommend; the rest is its default.

    Args:
        costs: of stock on this machine.
        capacity_tokens: contexts that the server holds.
        most_waiting: requests waiting in the server, from which on none is let in.
    """
    step = costs.step + costs.seq
    prefill = PREFILL * costs.token
    return {
        "program_scheduling_enable_key": "auto",
        "token_capacity_per_target": capacity_tokens,
        "global_queue": True,
        "admission_waiting_request_threshold": most_waiting,
        "prefill_cost_model": {
            "intercept_seconds": costs.first,
            "linear_seconds_per_1k_tokens": 1e3 * costs.token,
            # Of n tokens there are n²/2 pairs.
            "quadratic_seconds_per_1k_tokens_squared": 1e6 / 2 * costs.pair,
            "decode_throughput_alpha": step / (step + prefill),
        },
        "decode_throughput_model": {
            "fixed_step_seconds": costs.step,
            "batch_step_seconds_per_request": costs.seq,
            "context_step_seconds_per_token": costs.kv,
        },
    }


class ProgramRouter(Service):
    """The router's process.

    Args:
        worker_url: the server that it sends to.
        scheduling: see ``program_scheduling``.
    """

    def __init__(self, worker_url: str, scheduling: dict[str, Any], log_path: Path) -> None:
        super().__init__(log_path, start_timeout_s=START_S)
        self._worker_url = worker_url
        self._scheduling = scheduling

    def launch(self, port: int) -> Launch:
        """The router's command; it retries nothing, as no client here does."""
        command = [program("vllm-router", "vllm-router"), "--host", "127.0.0.1"]
        command += ["--port", str(port), "--prometheus-port", str(free_port())]
        command += ["--worker-urls", self._worker_url, "--worker-startup-check-interval", "1"]
        command += ["--policy", "consistent_hash", "--disable-retries"]
        command += ["--enable-program-scheduling"]
        command += ["--program-scheduling-config-json", json.dumps(self._scheduling)]
        return Launch(command, os.environ)


@dataclass(frozen=True, slots=True)
class BehindRouter:
    """A deployment behind the router.

    Attributes:
        capacity_tokens, most_waiting: see ``program_scheduling``.
    """

    capacity_tokens: int
    most_waiting: int

    @contextmanager
    def __call__(self, options: ServerOptions, setting: Setting) -> Iterator[Deployed]:
        """Start the server, and the router in front of it."""
        if setting.costs is None:
            raise ServerError("the router's cost models need runs of stock, and there are none")
        told = program_scheduling(
            setting.costs, self.capacity_tokens, most_waiting=self.most_waiting
        )
        with setting.start(options) as server:
            log = setting.log.with_suffix(".router.log")
            with ProgramRouter(server.url, told, log) as router:
                yield Deployed(server, router.url, (router,))

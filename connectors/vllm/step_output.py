"""A step, as vLLM's scheduler tells it: what is computed in it, who begins, who was preempted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tiered_kv.connectors.runtime.base import KeptState, ScheduledStep


def scheduled_step(output: Any) -> ScheduledStep:
    """The step of vLLM's ``SchedulerOutput``. Which of its lists has a request that goes on after
    it was preempted depends on vLLM's model runner."""
    new = [one.req_id for one in output.scheduled_new_reqs]
    return ScheduledStep(
        tokens=output.num_scheduled_tokens,
        total=output.total_num_scheduled_tokens,
        begun=[*new, *output.scheduled_cached_reqs.resumed_req_ids],
        preempted=output.preempted_req_ids or (),
    )


def kept_states(output: Any, positions: Mapping[int, int]) -> list[KeptState]:
    """States that vLLM hands over in this step.

    Args:
        positions: positions of page groups by vLLM's number of the group.
    """
    offered = output.kv_connector_block_state.boundary_state_offloads
    return [
        KeptState(request_id, positions[group], block, tokens)
        for request_id, states in offered.items()
        for group, block, tokens in states
        if group in positions
    ]

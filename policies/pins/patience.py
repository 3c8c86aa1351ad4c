"""Waits for blocks that others hold: who waits rather than take those under a pin, and for how long
saves are waited for before somebody is preempted. Pure."""

from __future__ import annotations

from tiered_kv.orders import RestoreMode

SAVES_PATIENCE_S = 1.0
"""Seconds that a running request waits for saves while none of them ends, before others are
preempted for it: a worker that is gone never reports."""


def waiter_started_at(
    job_started_at: float,
    *,
    goes_first: bool,
    somebody_runs: bool,
    in_job_order: bool,
    new: bool,
) -> float | None:
    """Start of the job of a turn that waits for pins which are worth it, seconds, as
    ``release_order`` wants it; None if all pins give way to it.

    A turn does not wait where no running request would give blocks back, nor where it goes before
    those that the pins are for. Where requests are taken in the order of their jobs,
    every other turn waits. In any other order an older job's turn may be behind the one that
    waits, so that only a new job does.

    Args:
        job_started_at: start of the turn's job, seconds.
        goes_first: True if the turn was preempted, has waited for the admission limit, or goes by
            its arrival.
        somebody_runs: True if some request has blocks.
        in_job_order: True if requests are taken in the order of their jobs.
        new: True if no turn of its job has had blocks.
    """
    if goes_first or not somebody_runs:
        return None
    return job_started_at if in_job_order or new else None


def worth_waiting_for_saves(stalled_s: float) -> bool:
    """True if a running request waits for blocks that are being saved.

    Args:
        stalled_s: time since a save ended, or since it began to wait, seconds.
    """
    return stalled_s < SAVES_PATIENCE_S


def needs_one_more(
    mode: RestoreMode | None, *, refused: bool, released: int, stuck: bool = False
) -> bool:
    """True if a pin goes for a turn although its blocks are free.

    It was refused in the step before with its blocks free: an async restore must leave what running
    prefills still need, and the next part of a prompt may take more blocks of windows and states
    than its end. How much that is the engine does not say, so pins go one by one.

    Args:
        mode: mode of the restore that it was offered; None without one.
        refused: True if it was refused in the step before although its blocks were free.
        released: pins that went for it now.
        stuck: True if nothing runs, and the context has windows or states.
    """
    return refused and not released and (stuck or mode is RestoreMode.ASYNC)

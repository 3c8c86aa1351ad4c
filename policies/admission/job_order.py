"""The order of requests: who is let in, admitted and kept running first. Pure.

Each rank sorts ascending: the least is first.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Place:
    """A request, as the orders see it.

    Attributes:
        job_started_at: start of its job, seconds; the request's own arrival without a job.
        arrived_at: arrival of the request, seconds.
        new: True if no turn of its job has had blocks.
        preempted: True if it was preempted.
        has_kv: True if its job's KV is pinned, or on its way for it.
        is_last_step: True if its job ends with it.
    """

    job_started_at: float
    arrived_at: float
    new: bool = False
    preempted: bool = False
    has_kv: bool = False
    is_last_step: bool = False


def parked_rank(place: Place) -> tuple[bool, float]:
    """Order in which held requests are let in: turns of started jobs by the start of their jobs,
    then new jobs as they came."""
    return place.new, place.arrived_at if place.new else place.job_started_at


def waiting_rank(place: Place) -> tuple[int, float, float]:
    """Order in which waiting requests are admitted: those that were preempted, those whose KV is
    held or on its way, the others; by the start of their jobs."""
    group = 0 if place.preempted else 1 if place.has_kv else 2
    return group, place.job_started_at, place.arrived_at


def running_rank(place: Place) -> tuple[bool, float]:
    """Order in which running requests lose most by a preemption: last turns, then the oldest
    jobs. The last in this order is the victim."""
    return not place.is_last_step, place.job_started_at


@dataclass(frozen=True, slots=True)
class Room:
    """Blocks for contexts.

    Attributes:
        vram: blocks of VRAM.
        cpu: slots in CPU memory; 0 without that tier.
        share: part of it that may be given out.
    """

    vram: int
    cpu: int
    share: float = 1.0


def fits(room: Room, peak: float, peak_anywhere: float) -> bool:
    """True if a new job has room.

    It needs VRAM for what is needed at the same time, and a place for all of it in VRAM or CPU
    memory; or all of it in CPU memory, from where what VRAM lacks comes back.

    Args:
        peak: blocks of VRAM that all jobs are heading for, the new one included.
        peak_anywhere: blocks of VRAM and CPU memory, those of jobs that are away included.
    """
    in_vram = peak <= room.share * room.vram
    if not room.cpu:
        return in_vram
    in_cpu = peak_anywhere <= min(1.0, room.share) * room.cpu
    return in_cpu or (in_vram and peak_anywhere <= max(room.vram, room.cpu))

"""Room for contexts: a new job is held until it has some, unless that would take it longer than it
would hold others up. Pure."""

from __future__ import annotations

from dataclasses import dataclass

LOOK_EVERY_S = 0.1
"""A job that is held is looked at again when something changed, or after so long: chances to
return change with time alone."""
SPARE_TIMES = 2.0
"""Blocks that are free beside a held job, over those of its first turn, from which on too little
of the pool is given out. With less, one that is let in would crowd those that are about to grow."""


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


def may_wait(waited_s: float, longest_s: float, *, idle: bool) -> bool:
    """True if a turn may have to wait: not while nothing else runs that would give room back, and
    no longer than a client may be left waiting.

    Args:
        longest_s: that time, seconds.
        idle: True if no other turn has blocks or was let in.
    """
    return not (idle or waited_s >= longest_s)


def is_settled(refused_s: float, *, changed: bool) -> bool:
    """True if a turn is held as before, without another look.

    Args:
        refused_s: time since a turn was last found without room, seconds.
        changed: True if jobs came, started, ended or went since then.
    """
    return not changed and refused_s < LOOK_EVERY_S


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


def overflow(room: Room, peak: float, peak_anywhere: float) -> float:
    """Blocks of contexts that have no place: in VRAM, or in CPU memory if there is any. For the
    arguments see ``fits``."""
    if room.cpu:
        return max(0.0, peak_anywhere - min(1.0, room.share) * room.cpu)
    return max(0.0, peak - room.share * room.vram)


def lost_s(computed_s: float, copied_s: float | None, running: int) -> float:
    """Seconds that requests lose, all together, while KV comes back in the cheaper way.

    A copy holds up the request that it is for. A computation holds up every other request of the
    batch as well.

    Args:
        computed_s: time to compute it again, seconds.
        copied_s: time to bring it up from a tier below CPU memory, seconds; None without one.
        running: running requests.
    """
    held_up_s = max(1, running) * computed_s
    return held_up_s if copied_s is None else min(copied_s, held_up_s)


def had_better_wait(lost_s: float, cycle_s: float) -> bool:
    """True if others lose more with every turn of a job than it does while it waits for the time of
    one.

    Args:
        lost_s: seconds that requests lose with a turn, while what had to go for it comes back.
        cycle_s: mean time from a turn's first blocks to the job's next turn, seconds.
    """
    return lost_s > cycle_s


def gives_too_little(*, free: int, need: float, loose: float) -> bool:
    """True if a new job is held beside blocks that nobody will want.

    Args:
        free: free blocks.
        need: blocks of its first turn.
        loose: free blocks that jobs which are away are expected to want back.
    """
    return free > SPARE_TIMES * need + loose

"""Loss of requests where a job is let in whose context has no room, against the wait that it is
spared. Pure."""

from __future__ import annotations


def lost_s(copied_s: float, computed_s: float, running: int) -> float:
    """Seconds that requests lose, all together, while contexts come back that had to go.

    A context that is copied holds up its own request. One that is computed again holds up every
    other request of the batch as well.

    Args:
        copied_s: time of the copies.
        computed_s: time of the computation.
        running: running requests.
    """
    return copied_s + max(1, running) * computed_s


def pays(lost: float, cycle_s: float) -> bool:
    """True if a job had better wait: with every turn of it others lose more than it does while it
    waits for the time of one, its gap included.

    Args:
        lost: seconds that requests lose with every turn.
        cycle_s: mean time from a turn's admission to the next turn.
    """
    return lost > cycle_s

"""Second turns on another replica while the store, a Valkey cluster, loses a master and moves
slots."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from tiered_kv.bench.output import Tick
from tiered_kv.remote.valkey.replies import ServerError
from tiered_kv.remote.valkey.valkey_store import slot_of
from tiered_kv.testing.valkey import ValkeyCluster, ValkeyServer

from .faults import ANSWER, LOOKUPS_S, SLACK_S, longer, waits
from .replicas import Replica

SETTLED_S = 1.0
"""Turns that start at least this long after the promotion count for ``remote_share``, seconds."""
MOVE_S = 0.2
"""Pause between two moves of a slot, seconds."""
POLL_S = 0.02


@dataclass(slots=True)
class Changes:
    """Changes of the cluster so far.

    Attributes:
        moved: number of times that a slot was moved.
        promoted_at: time at which all nodes knew the new master, on the monotonic clock; None until
            then.
    """

    moved: int = 0
    promoted_at: float | None = None


def _slots_with_keys(cluster: ValkeyCluster) -> list[int]:
    found = set[int]()
    for node in cluster.nodes:
        keys = node.ask(b"KEYS", b"tkv:{*")
        assert isinstance(keys, list)
        for key in keys:
            assert isinstance(key, bytes)
            found.add(slot_of(key[key.index(b"{") + 1 : key.index(b"}")]))
    return sorted(found)


@contextmanager
def changing(cluster: ValkeyCluster, lost: ValkeyServer) -> Iterator[Changes]:
    """Move slots to other masters, one after another, and record when the lost master's replica is
    promoted. Yields the changes so far. Slots stop moving when the block ends."""
    changes, over, slots = Changes(), threading.Event(), _slots_with_keys(cluster)

    def move() -> None:
        while True:
            for slot in slots:
                if over.wait(MOVE_S):
                    return
                # During the failover, nodes may refuse commands. The next pass moves the slot.
                with suppress(OSError, ServerError):
                    if not (source := cluster.owner(slot)).answers:
                        continue
                    masters = [one for one in cluster.masters() if one is not source]
                    cluster.move_slot(slot, masters[changes.moved % len(masters)])
                    changes.moved += 1

    def watch() -> None:
        replica = cluster.partner(lost)
        while not over.wait(POLL_S):
            if cluster.has_promoted(replica):
                changes.promoted_at = time.monotonic()
                return

    threads = [threading.Thread(target=one) for one in (move, watch)]
    for thread in threads:
        thread.start()
    try:
        yield changes
    finally:
        over.set()
        for thread in threads:
            thread.join()


def fail_over(
    cluster: ValkeyCluster,
    lost: ValkeyServer,
    replicas: Sequence[Replica],
    prompts: Sequence[Sequence[int]],
    tick: Tick,
) -> dict[str, Any]:
    """Send first turns, then kill a master and send second turns while slots move.

    Args:
        lost: the master to kill.
        replicas: one for the first turns, one for the second turns, and one without a store.
        prompts: prompts of the first turns.

    Returns:
        ``answers_right``: True if all answers equal those of the replica without a store.
        ``remote_share``: fraction of the first turns' tokens that came from the store, in turns
            that started at least a second after the replica's promotion; None without such turns.
        ``worst_wait_s``: longest time that a turn waited for the store, seconds; None if the trace
            contains none of the turns.
        ``in_time``: True if the trace contains all turns, and none waited longer than 120 ms plus
            the longest time to compute a prompt.
        ``promoted_s``: time from the kill until all nodes knew the new master, seconds; None if
            that did not happen.
        ``moved_slots``: number of times that a slot was moved during the second turns.
        ``remote_tokens``: tokens that came from the store, for each second turn.
        ``counted``: number of turns that count for ``remote_share``.
    """
    first, second, alone = replicas
    turns = {f"failover {at}": prompt for at, prompt in enumerate(prompts)}
    for job, prompt in turns.items():
        tick("first turns")
        first.ask(job, prompt)
    first.shared_pages()
    started, remote = list[float](), list[int]()
    with changing(cluster, lost) as changes:
        killed_at = time.monotonic()
        lost.kill()
        for job, prompt in turns.items():
            tick("second turns")
            started.append(time.monotonic())
            remote.append(second.ask(job, longer(prompt)).sources.get("remote_tokens", 0))
    right, alone_ms = True, list[float]()
    for job, prompt in turns.items():
        tick("answers compared")
        alone_ms.append(alone.ask(job, longer(prompt)).ms)
        here, there = (one.ask(job, longer(prompt), ANSWER) for one in (second, alone))
        right = right and here.tokens == there.tokens
    promoted_at = changes.promoted_at
    counted = [
        (tokens, len(prompt))
        for tokens, prompt, at in zip(remote, prompts, started, strict=True)
        if promoted_at is not None and at >= promoted_at + SETTLED_S
    ]
    waited = waits(second, "failover", len(prompts))
    most_s = LOOKUPS_S + max(alone_ms) / 1e3 + SLACK_S
    return {
        "answers_right": right,
        "remote_share": sum(n for n, _ in counted) / sum(n for _, n in counted)
        if counted
        else None,
        "worst_wait_s": max(waited, default=None),
        "in_time": len(waited) >= len(prompts) and max(waited) <= most_s,
        "promoted_s": promoted_at and promoted_at - killed_at,
        "moved_slots": changes.moved,
        "remote_tokens": remote,
        "counted": len(counted),
    }

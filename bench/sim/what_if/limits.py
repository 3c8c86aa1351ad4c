"""Limits of an answer: what a trace does not tell, in sentences."""

from __future__ import annotations

from collections.abc import Iterator

from tiered_kv.policies import registry

from .jobs import Left, RecordedJobs
from .machine import RecordedMachine
from .recording import Recording

ALWAYS = (
    "Arrivals, gaps, prompts and answers are taken to be the same under the other policy: clients "
    "that wait, give up or ask otherwise on a slower server are not known.",
    "What a policy had learned before this trace is not in it: both begin anew.",
    "Costs of a step are those with the recorded connector at work; the other's own are not known.",
    "What contexts share beyond what was found in the trace is not known.",
)
COMPRESSED = "Speeds of compression in CPU memory are assumed: they count only where that is full."


def limits(
    recording: Recording, place: RecordedMachine, found: RecordedJobs, policy: str
) -> list[str]:
    """Say what the answer cannot know, and what it leaves out."""
    said = [*ALWAYS, *place.assumed]
    if recording.header.tiers_bytes.get("cpu"):
        said.append(COMPRESSED)
    eviction = recording.header.eviction
    if eviction and eviction not in registry.EVICTION:
        said.append(f"Pages leave CPU memory by the default rule, not by {eviction!r:.60}.")
    if ":" in policy:
        said.append(f"{policy} runs as it is: what it reads from elsewhere is not simulated.")
    return [*said, *_cut(recording, len(found.jobs)), *_left(found.left)]


def _cut(recording: Recording, jobs: int) -> Iterator[str]:
    turns = len(recording.turns)
    if recording.cut:
        yield (
            f"Only the first {turns:,} turns are simulated, of {jobs:,} jobs: the trace goes on, "
            "and what ran beside the last of them is missing."
        )
    if recording.left_out:
        yield (
            f"{recording.left_out:,} turns of other engines are left out: the one that began at "
            f"{recording.header.started:.0f} as replica {recording.header.replica} has the most."
        )


def _left(left: Left) -> Iterator[str]:
    if left.empty:
        yield f"{left.empty:,} turns without an answer are left out."
    if left.too_long:
        yield f"{left.too_long:,} jobs are left out, since their contexts fill the whole pool."
    if left.beside:
        yield (
            f"{left.beside:,} turns ran beside others of their job: they are taken for jobs of "
            "their own, and share nothing with it."
        )
    if left.begun:
        yield (
            f"{left.begun:,} jobs had begun before the trace: their first turns in it are computed "
            "whole."
        )
    if left.open:
        yield f"{left.open:,} jobs were still waited for at its end: they end with their last turn."
    if left.shared:
        yield (
            f"{left.shared:,} jobs found some of their first prompts: they are taken to share that "
            "much with the others of their client."
        )

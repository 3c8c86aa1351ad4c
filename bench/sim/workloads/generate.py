"""Generated workloads, each from a seed. They are modelled on published workloads where these
exist:

- ``original``: Continuum's benchmark (arXiv 2511.02230), as in ``bench.replay``: eight turns that
  grow to 2,900 tokens, six gaps of 50 to 300 ms and one of 2 to 5 s.
- ``swe-agent``: 25 turns on average after a shared prompt of 4,000 tokens. Nine of ten commands are
  fast: recorded calls of SWE-agent (SWE-agent/SWE-agent @3ea751c, 40 calls) took 0.12 to 1.2 s,
  with a median of 0.24 s. Every tenth runs tests or builds, for 8 to 60 s.
- ``chat``: people who read and type. The median gap is half a minute.
- ``mixed``: half ``swe-agent``, half ``chat``.
- ``burst``: ``original``, with jobs that arrive twenty at a time.
- ``turns-4`` to ``turns-32``: ``original`` with that many turns. One gap in seven is long, and
  every job has at least one long gap.
- ``rollouts``: a reinforcement learning step. Jobs of ``swe-agent``, eight per prompt, all start
  together, and the step ends with the last job.
- ``wrong-hints``, ``no-hints``: ``original`` with clients that send wrong hints or none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from tiered_kv.bench.agents.jobs import (
    ADDED_TOKENS,
    ANSWER_TOKENS,
    FIRST_TOKENS,
    LONG_S,
    SHORT_GAPS,
    SHORT_S,
)

from .workload import Hints, SimJob, SimTurn, Workload

Rng = np.random.Generator
Step = tuple[int, int, float, str]
"""A turn: tokens added, answer tokens, the gap after the turn in seconds, and the tool that runs in
the gap."""

SHORT_TOOL, LONG_TOOL = "cat notes.txt", "pytest -q"
SWE_SHARED, SWE_TURNS, SWE_MOST_TURNS = 4_000, 25, 60
SWE_SLOW = 0.1
BURST = 20
ROLLOUTS = 8
"""Jobs per prompt."""
TURNS = (4, 8, 16, 32)
BLOCK, LARGE_BLOCK = 16, 64
"""Tokens per block: vLLM's default, and a larger size for contexts of 20,000 tokens, because the
simulator takes time for every block."""


def _original(rng: Rng, name: str) -> SimJob:
    gaps = [(float(s), SHORT_TOOL) for s in rng.uniform(*SHORT_S, size=SHORT_GAPS)]
    gaps.insert(int(rng.integers(SHORT_GAPS + 1)), (float(rng.uniform(*LONG_S)), LONG_TOOL))
    return _of_gaps(name, gaps)


def _of_turns(rng: Rng, name: str, count: int) -> SimJob:
    long = max(1, round((count - 1) / (SHORT_GAPS + 1)))
    gaps = [(float(s), SHORT_TOOL) for s in rng.uniform(*SHORT_S, size=count - 1 - long)]
    gaps += [(float(s), LONG_TOOL) for s in rng.uniform(*LONG_S, size=long)]
    return _of_gaps(name, [gaps[at] for at in rng.permutation(len(gaps))])


def _of_gaps(name: str, gaps: Sequence[tuple[float, str]]) -> SimJob:
    added = (FIRST_TOKENS, *[ADDED_TOKENS] * len(gaps))
    steps = zip(added, [*gaps, (0.0, "")], strict=True)
    return _job(name, [(tokens, ANSWER_TOKENS, *gap) for tokens, gap in steps])


def _job(name: str, steps: Sequence[Step], prefix: str = "", prefix_tokens: int = 0) -> SimJob:
    """Create a job whose prompts keep the whole context. No gap follows the last turn."""
    turns, context = list[SimTurn](), 0
    for added, output, gap_s, tool in steps:
        turns.append(SimTurn(context, added, output, gap_s, tool))
        context += added + output
    turns[-1] = replace(turns[-1], gap_s=0.0, tool="")
    return SimJob(name, 0.0, tuple(turns), prefix, prefix_tokens)


def _rollout(rng: Rng, name: str) -> SimJob:
    """Create a job of a group. The length of its prompt depends on the group, not on ``rng``."""
    group = int(name.rpartition("-")[2]) // ROLLOUTS
    prompt = SWE_SHARED + int(np.random.default_rng(group).uniform(500, 2_500))
    job = _swe_agent(rng, name)
    first = replace(job.turns[0], added=prompt)
    more = prompt - job.turns[0].added  # every later context grows by this too
    rest = tuple(replace(turn, shared=turn.shared + more) for turn in job.turns[1:])
    return replace(job, turns=(first, *rest), prefix=f"task-{group}", prefix_tokens=prompt)


def _swe_agent(rng: Rng, name: str) -> SimJob:
    steps = list[Step]()
    for at in range(int(min(max(3, rng.poisson(SWE_TURNS)), SWE_MOST_TURNS))):
        added = _tokens(rng, 500, 1.0) if at else SWE_SHARED + int(rng.uniform(500, 2_500))
        output = _tokens(rng, 120, 0.7)
        slow = rng.random() < SWE_SLOW
        gap_s = float(rng.uniform(8, 60) if slow else min(rng.lognormal(np.log(0.24), 0.7), 5.0))
        steps.append((added, output, gap_s, LONG_TOOL if slow else SHORT_TOOL))
    return _job(name, steps, "swe-agent", SWE_SHARED)


def _chat(rng: Rng, name: str) -> SimJob:
    count, steps = int(rng.integers(2, 9)), list[Step]()
    for at in range(count):
        added, output = _tokens(rng, 150, 0.8) + (0 if at else 300), _tokens(rng, 250, 0.6)
        gap_s = 0.0 if at + 1 == count else float(min(rng.lognormal(np.log(30), 0.8), 300))
        steps.append((added, output, gap_s, ""))
    return _job(name, steps, "chat", 300)


def _mixed(rng: Rng, name: str) -> SimJob:
    return (_chat if rng.random() < 0.5 else _swe_agent)(rng, name)


def _tokens(rng: Rng, median: float, sigma: float) -> int:
    return int(min(max(rng.lognormal(np.log(median), sigma), 10), 8 * median))


ALL = 0
"""Burst size with which all jobs arrive together."""
_MAKERS: Mapping[str, tuple[Callable[[Rng, str], SimJob], Hints, int, int]] = {
    "original": (_original, Hints.RIGHT, 1, BLOCK),
    "swe-agent": (_swe_agent, Hints.RIGHT, 1, LARGE_BLOCK),
    "chat": (_chat, Hints.RIGHT, 1, BLOCK),
    "mixed": (_mixed, Hints.RIGHT, 1, BLOCK),
    "burst": (_original, Hints.RIGHT, BURST, BLOCK),
    **{
        f"turns-{count}": (partial(_of_turns, count=count), Hints.RIGHT, 1, BLOCK)
        for count in TURNS
    },
    "rollouts": (_rollout, Hints.RIGHT, ALL, LARGE_BLOCK),
    "wrong-hints": (_original, Hints.WRONG, 1, BLOCK),
    "no-hints": (_original, Hints.NONE, 1, BLOCK),
}
"""For each workload: the function that creates a job, the hints, the burst size, and the tokens per
block."""
GENERATED = tuple(_MAKERS)


def generate(name: str, count: int, seed: int) -> Workload:
    """Create ``count`` jobs of a workload.

    Raises:
        ValueError: the workload does not exist.
    """
    if name not in _MAKERS:
        raise ValueError(f"unknown workload {name!r}: use one of {', '.join(_MAKERS)}")
    make, hints, burst, block = _MAKERS[name]
    rng = np.random.default_rng([seed, 0])
    jobs = tuple(make(rng, f"{name}-{number}") for number in range(count))
    if hints is Hints.WRONG:
        jobs = tuple(_misled(job) for job in jobs)
    return Workload(name, jobs, hints, block, burst or count)


def _misled(job: SimJob) -> SimJob:
    """Exchange the tool commands, so that every hint about a tool is wrong."""
    other = {SHORT_TOOL: LONG_TOOL, LONG_TOOL: SHORT_TOOL}
    turns = tuple(replace(turn, tool=other.get(turn.tool, "")) for turn in job.turns)
    return replace(job, turns=turns)

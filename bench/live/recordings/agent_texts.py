"""LMCache's agent traces: requests with their texts, one job a session.

A prompt that holds the one before and more goes on from it. Another is sent whole, as it was
recorded: what it has in common with earlier ones, perhaps of another agent of its session, the
server finds by itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tiered_kv.bench.agents.left_out import LeftOut
from tiered_kv.bench.agents.recorded_rows import gap_between
from tiered_kv.bench.agents.sessions import CHARACTERS_PER_TOKEN, Recorded, read_recording
from tiered_kv.bench.sim.workloads.workload import SimJob, SimTurn


@dataclass(frozen=True, slots=True)
class AgentTexts:
    """Jobs whose sizes are in characters.

    Attributes:
        texts: by a job's name, the text that each of its turns adds.
    """

    jobs: tuple[SimJob, ...]
    texts: Mapping[str, tuple[str, ...]]
    left_out: Mapping[str, LeftOut]


def agent_texts(path: Path) -> AgentTexts:
    """All jobs of a recording.

    Raises:
        RecordingError: it cannot be read, or is no such recording.
    """
    record = read_recording(path)
    jobs, texts = [], {}
    for session in record.sessions:
        name = session[0].session
        added = _added(session)
        jobs.append(SimJob(name, 0.0, _turns(session, added)))
        texts[name] = added
    return AgentTexts(tuple(jobs), texts, {"nulls": record.nulls})


def _added(session: Sequence[Recorded]) -> tuple[str, ...]:
    added = [session[0].prompt]
    for before, turn in itertools.pairwise(session):
        if _goes_on(before, turn):
            rest = turn.prompt.removeprefix(before.prompt).removeprefix(before.answer)
            added.append(rest or " ")
        else:
            added.append(turn.prompt)
    return tuple(text or " " for text in added)


def _goes_on(before: Recorded, turn: Recorded) -> bool:
    return len(turn.prompt) > len(before.prompt) and turn.prompt.startswith(before.prompt)


def _turns(session: Sequence[Recorded], added: Sequence[str]) -> tuple[SimTurn, ...]:
    made = []
    context = 0
    for at, turn in enumerate(session):
        goes_on = at > 0 and _goes_on(session[at - 1], turn)
        shared = context if goes_on else 0
        output = max(1, len(turn.answer))
        apart_s = (session[at + 1].at - turn.at) / 1e6 if at + 1 < len(session) else None
        gap = gap_between(apart_s, output / CHARACTERS_PER_TOKEN)
        made.append(SimTurn(shared, len(added[at]), output, gap))
        context = shared + len(added[at]) + output
    return tuple(made)

"""LMCache's agent traces: requests with their texts, one job per session.

A prompt that extends the previous prompt adds only the new text to the context. Any other prompt is
sent whole, as recorded, and the server finds the prefixes that it shares with earlier prompts,
possibly of another agent in the session.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tiered_kv.bench.agents.left_out import LeftOut
from tiered_kv.bench.agents.recorded_rows import gap_between
from tiered_kv.bench.agents.sessions import CHARACTERS_PER_TOKEN, read_recording
from tiered_kv.bench.sim.workloads.workload import SimJob, SimTurn


@dataclass(frozen=True, slots=True)
class AgentTexts:
    """Jobs whose sizes are in characters.

    Attributes:
        texts: by job name, the text that each turn adds.
        left_out: sessions and turns that are not played, by reason.
    """

    jobs: tuple[SimJob, ...]
    texts: Mapping[str, tuple[str, ...]]
    left_out: Mapping[str, LeftOut]


def agent_texts(path: Path) -> AgentTexts:
    """Read all jobs of a recording.

    Raises:
        RecordingError: the file cannot be read, or has another format.
    """
    record = read_recording(path)
    jobs, texts = [], dict[str, tuple[str, ...]]()
    for session in record.sessions:
        turns, added = list[SimTurn](), list[str]()
        before, context = None, 0
        for turn, later in itertools.zip_longest(session, session[1:]):
            goes_on = (
                before is not None
                and len(turn.prompt) > len(before.prompt)
                and turn.prompt.startswith(before.prompt)
            )
            text = turn.prompt
            if goes_on and before is not None:
                text = text.removeprefix(before.prompt).removeprefix(before.answer)
            added.append(text or " ")
            shared, output = context if goes_on else 0, max(1, len(turn.answer))
            apart_s = (later.at - turn.at) / 1e6 if later else None
            gap_s = gap_between(apart_s, output / CHARACTERS_PER_TOKEN)
            turns.append(SimTurn(shared, len(added[-1]), output, gap_s))
            before, context = turn, turns[-1].prompt + output
        name = session[0].session
        jobs.append(SimJob(name, 0.0, tuple(turns)))
        texts[name] = tuple(added)
    return AgentTexts(tuple(jobs), texts, {"nulls": record.nulls})

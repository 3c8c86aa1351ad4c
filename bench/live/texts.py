"""Texts of the jobs that are played on a server whose tokenizer is not known.

Common English words are one token each for nearly every tokenizer; how many exactly is measured
with two requests to the server.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from tiered_kv.bench.agents.jobs import Job, Turn
from tiered_kv.bench.sim.workloads.workload import SimJob

from .live_jobs import copied

_COMMON = (
    "time year people way day man thing woman life child world school state family student "
    "group country problem hand part place case week company system program question work "
    "number night point home water room mother area money story fact month lot right study "
    "book eye job word business issue side kind head house service friend father power hour "
    "game line end member law car city name team minute idea body back parent face level "
    "office door health person art war history party result change morning reason research "
    "girl guy moment air teacher force field paper ground letter window river table market "
    "report figure music price season picture island animal summer garden winter science "
    "engine bridge forest record station village"
)
WORDS = tuple(_COMMON.split())
"""Words that texts are made of."""


def filler(key: str, words: int) -> str:
    """Make a text of ``words`` words, drawn by ``key``. Of two texts with the same key, the shorter
    is a prefix of the longer."""
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little")
    drawn = np.random.default_rng(seed).integers(len(WORDS), size=words)
    return " ".join(WORDS[at] for at in drawn)


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts of one run's jobs.

    Attributes:
        nonce: of the run. No two runs share a prefix. Otherwise the second run on a server would
            find the pages of the first.
        words_per_token: of made-up text.
        recorded: by a job's name, the text that each turn adds, where a recording has it.
    """

    nonce: str
    words_per_token: float
    recorded: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def job(self, sizes: SimJob) -> Job:
        """The job of these sizes; copies of a job get other texts."""
        turns, context = list[Turn](), 0
        for at, turn in enumerate(sizes.turns):
            made = Turn(
                (),
                (),
                turn.gap_s,
                kept=turn.shared / context if at else 1.0,
                tool=turn.tool,
                tool_name=turn.tool_name,
                agents=tuple(map(self.job, turn.agents)),
                length=max(1, turn.output),
                text=self._added(sizes, at),
            )
            turns.append(made)
            context = turn.prompt + turn.output
        return Job(sizes.name, "", tuple(turns))

    def _added(self, job: SimJob, at: int) -> str:
        texts = self.recorded.get(job.name) or self.recorded.get(copied(job.name))
        if texts is not None:
            text = texts[at]
            return text if job.turns[at].shared else f"{self.nonce} {job.name} {text}"
        turn = job.turns[at]
        # What jobs share stands first, and is the same for all of them in one run.
        shared = job.prefix_tokens if at == 0 and job.prefix else 0
        parts = (
            filler(key, round(tokens * self.words_per_token))
            for key, tokens in (
                (f"{self.nonce}/{job.prefix}", shared),
                (f"{self.nonce}/{job.name}/{at}", turn.added - shared),
            )
        )
        return " ".join(filter(None, parts)) or self.nonce

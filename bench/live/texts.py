"""Texts for jobs that are played on a server with an unknown tokenizer.

Common English words are one token each in nearly every tokenizer. Two requests to the server
measure the exact number of tokens per word.
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
"""Vocabulary of generated texts."""


def filler(key: str, words: int) -> str:
    """Return a random text of ``words`` words, seeded with ``key``. Of two texts with the same key,
    the shorter is a prefix of the longer.
    """
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little")
    drawn = np.random.default_rng(seed).integers(len(WORDS), size=words)
    return " ".join(WORDS[at] for at in drawn)


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts of one run's jobs.

    Attributes:
        nonce: text that is unique to the run, so that no two runs share a prefix. Otherwise the
            second run on a server would find the pages of the first.
        words_per_token: words per token of generated text.
        recorded: by job name, the recorded text that each turn adds, if the job was recorded.
    """

    nonce: str
    words_per_token: float
    recorded: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def job(self, sizes: SimJob) -> Job:
        """Return a job with texts of these sizes. Copies of a job get different texts."""
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
        # The shared text comes first, and is the same for all jobs of a run.
        shared = job.prefix_tokens if at == 0 and job.prefix else 0
        parts = (
            filler(key, round(tokens * self.words_per_token))
            for key, tokens in (
                (f"{self.nonce}/{job.prefix}", shared),
                (f"{self.nonce}/{job.name}/{at}", turn.added - shared),
            )
        )
        return " ".join(filter(None, parts)) or self.nonce

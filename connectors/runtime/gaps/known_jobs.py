"""Jobs as an engine before this one knew them: how many turns each has had, and since when.

A job is noted at the end of every turn. One that its client names is looked up when it comes back;
names and salts are noted as digests. One that was inferred is found by its prompt, so all of these
are taken over at once, but for those with a salt, which may be a secret.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from hashlib import sha256

from tiered_kv.connectors.runtime.job_table import Job, JobTable
from tiered_kv.policies.base import JobKey
from tiered_kv.policies.jobs.lineage import Lineage
from tiered_kv.storage.notebook import Fact, NoNotebook

logger = logging.getLogger(__name__)

PREFIX = "job "


class KnownJobs:
    """Notes jobs, and brings them back. One thread.

    Args:
        notebook: has what the engine before noted.
        jobs, lineage: receive jobs that come back.
        clock: monotonic seconds, those of ``jobs``. wall: seconds since the epoch.
    """

    def __init__(
        self,
        notebook: NoNotebook,
        jobs: JobTable,
        lineage: Lineage,
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self._notebook = notebook
        self._jobs = jobs
        self._lineage = lineage
        self._clock = clock
        self._wall = wall
        self._away = notebook.facts(PREFIX)
        for name, fact in list(self._away.items()):
            if "lineage" in fact:
                del self._away[name]
                self._bring_inferred_back(fact)

    def find(self, key: JobKey) -> None:
        """Bring a job back that its client has named, if an engine before knew it."""
        fact = self._away.pop(_name(key), None) if self._away else None
        if fact is not None:
            self._bring_back(key, fact)

    def note(self, job: Job) -> None:
        """Note a job, one of whose turns has ended."""
        age_s = self._clock() - job.started_at
        fact: dict[str, object] = {
            "turns": job.turns,
            "blocks": job.first_blocks,
            "started": self._wall() - age_s,
        }
        if not job.key.salt and (last := self._lineage.dump(job.key)) is not None:
            fact["lineage"] = last
        self._notebook.note(_name(job.key), fact)

    def forget(self, key: JobKey) -> None:
        """Strike out a job that is over."""
        self._notebook.strike(_name(key))

    def _bring_inferred_back(self, fact: Fact) -> None:
        try:
            key = self._lineage.load(fact["lineage"])
        except ValueError as error:
            logger.info("a job that was noted is not used: %s", error)
            return
        self._bring_back(key, fact)

    def _bring_back(self, key: JobKey, fact: Fact) -> None:
        match fact:
            case {"turns": int(turns), "blocks": int(blocks), "started": int() | float() as at}:
                age_s = max(0.0, self._wall() - at)
                self._jobs.adopt(key, self._clock() - age_s, max(0, blocks), max(0, turns))
            case _:
                logger.info("a job that was noted is not used: its numbers are none")


def _name(key: JobKey) -> str:
    said = f"{len(key.salt)} {key.salt}{key.name}"
    return PREFIX + sha256(said.encode("utf-8", "surrogatepass")).hexdigest()[:32]

"""Jobs, which are turns that belong together, and the records of jobs in the notebook.

The notebook records jobs known to a previous engine: their number of turns and when they started. A
job is recorded at the end of every turn. A job that its client names is looked up when its next
turn arrives; names and salts are stored as digests. An inferred job is found by its prompt, so all
inferred jobs are adopted at startup, except those with a salt, which may be a secret.
"""

from __future__ import annotations

import logging
import re
from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from hashlib import sha256
from itertools import count, islice
from operator import attrgetter

from tiered_kv.policies.base import Decision, JobKey
from tiered_kv.policies.jobs.identity import NOBODY, Identity
from tiered_kv.policies.jobs.lineage import TOLERANCE, Lineage
from tiered_kv.storage.notebook import Fact, NoNotebook

from .base import Request

MOST_BRANCHES = 4
"""Number of branches of a job whose last prompts are remembered: the conversation, and the side
requests between its turns."""
MAX_JOBS = 65_536
"""Maximum number of jobs. Beyond this the least recently active job is forgotten, because its
client may never report its end."""

_NUMBER = attrgetter("number")


@dataclass(frozen=True, slots=True)
class PastPrompt:
    """The prompt of a finished turn, as far as needed to recognise prompts that extend it.

    Attributes:
        tokens: length of the prompt.
        blocks: number of its full blocks of ``hash_tokens`` tokens, without the last few tokens,
            which a chat template may omit later.
        block: hash of the last of these blocks.
        start: number of tokens in these blocks.
        rest: the tokens after these blocks, without the last few tokens of the prompt.
        since: start of the gap after the turn, seconds.
    """

    tokens: int
    blocks: int
    block: bytes
    start: int
    rest: array[int]
    since: float

    @classmethod
    def of(cls, request: Request, hash_tokens: int, since: float) -> PastPrompt | None:
        """Return the prompt of a request; None if it is too short, or not given as tokens.

        Args:
            hash_tokens: tokens per block hash.
        """
        prompt, kept = request.prompt_token_ids, request.num_prompt_tokens - TOLERANCE
        blocks = min(kept // hash_tokens, len(request.block_hashes))
        if prompt is None or blocks < 1:
            return None
        start, block = blocks * hash_tokens, request.block_hashes[blocks - 1]
        rest = array("q", prompt[start:kept])
        return cls(request.num_prompt_tokens, blocks, block, start, rest, since)

    def begins(self, request: Request) -> bool:
        """True if the request's prompt begins with this prompt."""
        prompt, hashes = request.prompt_token_ids, request.block_hashes
        if prompt is None or len(hashes) < self.blocks or hashes[self.blocks - 1] != self.block:
            return False
        return array("q", prompt[self.start : self.start + len(self.rest)]) == self.rest

    def extended_by(self, request: Request) -> bool:
        """True if the request's prompt begins with this prompt and is longer."""
        return request.num_prompt_tokens > self.tokens and self.begins(request)


@dataclass(slots=True)
class Job:
    """A known job. Written by ``JobTable``.

    Attributes:
        number: 1 for the first job; a forgotten job that returns gets a new number.
        started_at: when its first turn arrived, or its first turn after the job was presumed to
            have ended; seconds on the scheduler's clock.
        first_blocks: number of blocks of its first prompt, which other jobs may share.
        turns: number of its turns that have arrived.
        running: ids of its unfinished requests.
        over: True if the client declared the running turns to be the last ones, or released the
            job.
        decided: decision for its last finished gap, without the forecast; None before.
        who: its session, agent and parent, as its last turn named them.
        parent: the job whose agent started it; None if unknown.
        prompts: the last prompt of each of its latest branches, oldest first.
    """

    key: JobKey
    number: int
    started_at: float
    first_blocks: int
    turns: int = 0
    running: set[str] = field(default_factory=set)
    over: bool = False
    decided: Decision | None = None
    who: Identity = NOBODY
    prompts: list[PastPrompt] = field(default_factory=list)

    @property
    def parent(self) -> JobKey | None:
        return JobKey(self.key.salt, self.who.parent) if self.who.parent is not None else None


class JobTable:
    """Jobs by key, least recently active first. Used on one thread.

    Attributes:
        on_forgotten: called with the key of each forgotten job.
    """

    def __init__(self) -> None:
        self.on_forgotten: Callable[[JobKey], None] = lambda _: None
        self._jobs: OrderedDict[JobKey, Job] = OrderedDict()
        self._listed: list[Job] = []  # by number
        self._salted: dict[str, dict[JobKey, None]] = {}  # jobs with a salt, by name
        self._count = count(1)

    def __len__(self) -> int:
        return len(self._jobs)

    def get(self, key: JobKey) -> Job | None:
        """Return the job with that key; None if it is unknown."""
        return self._jobs.get(key)

    def turn_arrived(self, key: JobKey, request_id: str, now: float, blocks: int) -> Job:
        """Return the job of an arriving turn. Creates the job if this is its first turn.

        Args:
            blocks: number of blocks of the turn's prompt.
        """
        job = self._jobs.get(key)
        if job is None:
            job = self._enter(Job(key, next(self._count), now, blocks))
        self._jobs.move_to_end(key)
        job.turns += 1
        job.over = False
        job.running.add(request_id)
        return job

    def adopt(self, key: JobKey, now: float, blocks: int, turns: int) -> Job:
        """Return the job with that key, created if it is unknown, and set its number of turns.

        Args:
            blocks: number of blocks of the job's context.
        """
        job = self._jobs.get(key)
        if job is None:
            job = self._enter(Job(key, next(self._count), now, blocks))
        self._jobs.move_to_end(key)
        job.turns, job.over = turns, False
        return job

    def turn_ended(self, job: Job, request_id: str, *, over: bool) -> None:
        """Record that a turn finished. ``over`` is True if the client declared that the turn was
        the job's last. A job without a further turn is forgotten."""
        job.running.discard(request_id)
        job.over = job.over or over
        if job.over and not job.running:
            self.end(job)

    def end_with_turn(self, job: Job) -> None:
        """Make the job's running turns its last ones, unless another turn arrives."""
        job.over = True

    def end(self, job: Job) -> None:
        """Forget a job that has no running turn. Does nothing if the job is forgotten already."""
        if self._jobs.get(job.key) is job:
            self._forget(job)

    def remember_prompt(self, job: Job, request: Request, hash_tokens: int, since: float) -> None:
        """Record the prompt of a turn that ended while no other turn of the job was running.

        Args:
            since: start of the gap after the turn, seconds.
        """
        ended = PastPrompt.of(request, hash_tokens, since)
        if ended is not None:
            others = [one for one in job.prompts if not one.begins(request)]
            job.prompts = [*others, ended][-MOST_BRANCHES:]

    def turn_lost(self, job: Job, request_id: str) -> None:
        """Forget a turn whose end could not be handled. It would otherwise count as running
        forever."""
        job.running.discard(request_id)

    def gap_ended(self, job: Job, decision: Decision) -> None:
        """Record the decision that was made for a finished gap."""
        job.decided = replace(decision, forecast=None)

    def make_youngest(self, job: Job, now: float) -> None:
        """Make the job the youngest. A dormant job loses its place in the job order, because other
        jobs were admitted to its space."""
        job.started_at = now

    def named(self, name: str, most: int) -> list[Job]:
        """Return up to ``most`` jobs of that name. The job without a salt comes first."""
        keys = (JobKey("", name), *islice(self._salted.get(name, ()), most))
        return [self._jobs[key] for key in keys if key in self._jobs][:most]

    def after(self, number: int, most: int) -> list[Job]:
        """Return up to ``most`` jobs with the next higher numbers. The search takes logarithmic
        time in the number of jobs."""
        at = bisect_right(self._listed, number, key=_NUMBER)
        return self._listed[at : at + most]

    def _enter(self, job: Job) -> Job:
        self._jobs[job.key] = job
        self._listed.append(job)
        if job.key.salt:
            self._salted.setdefault(job.key.name, {})[job.key] = None
        if len(self._jobs) > MAX_JOBS:
            self._forget(next(iter(self._jobs.values())))
        return job

    def _forget(self, job: Job) -> None:
        del self._jobs[job.key]
        del self._listed[bisect_left(self._listed, job.number, key=_NUMBER)]
        if job.key.salt:
            named = self._salted[job.key.name]
            del named[job.key]
            if not named:
                del self._salted[job.key.name]
        self.on_forgotten(job.key)


class Responses:
    """Jobs by the response that their next turn may continue (``previous_response_id``). Used on
    one thread.

    A response is continued once: a second request after it is a fork, and thus another job.
    """

    def __init__(self) -> None:
        self._jobs: OrderedDict[tuple[str, str], JobKey] = OrderedDict()

    def __len__(self) -> int:
        return len(self._jobs)

    def answered(self, key: JobKey, request_id: str) -> None:
        """Record the response of a job's turn. Ignores requests of endpoints other than the
        Responses API."""
        response = _RESPONSE.match(request_id)
        if response is None:
            return
        self._jobs[key.salt, response[0]] = key
        if len(self._jobs) > MAX_JOBS:
            self._jobs.popitem(last=False)

    def take(self, salt: str, response: str) -> JobKey | None:
        """Return the job that a response belongs to, and forget the response; None if it is
        unknown."""
        return self._jobs.pop((salt, response), None)


_RESPONSE = re.compile(r"resp_[0-9A-Za-z]{1,64}")

logger = logging.getLogger(__name__)

NOTE_PREFIX = "job "


class KnownJobs:
    """Records jobs in the notebook, and restores the jobs of a previous engine. Used on one thread.

    Args:
        notebook: contains the facts that the previous engine recorded.
        jobs, lineage: receive restored jobs.
        clock: monotonic seconds, as in ``jobs``.
        wall: seconds since the epoch.
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
        self._away = notebook.facts(NOTE_PREFIX)
        for name, fact in list(self._away.items()):
            if "lineage" in fact:
                del self._away[name]
                self._bring_inferred_back(fact)

    def find(self, key: JobKey) -> None:
        """Restore a job that its client has named, if a previous engine knew it."""
        fact = self._away.pop(_name(key), None) if self._away else None
        if fact is not None:
            self._bring_back(key, fact)

    def note(self, job: Job) -> None:
        """Record a job after one of its turns has ended."""
        if not self._notebook.stores:
            return
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
        """Delete the record of a finished job."""
        self._notebook.strike(_name(key))

    def _bring_inferred_back(self, fact: Fact) -> None:
        try:
            key = self._lineage.load(fact["lineage"])
        except ValueError as error:
            logger.info("a job of the previous engine is ignored: %s", error)
            return
        self._bring_back(key, fact)

    def _bring_back(self, key: JobKey, fact: Fact) -> None:
        match fact:
            case {"turns": int(turns), "blocks": int(blocks), "started": int() | float() as at}:
                age_s = max(0.0, self._wall() - at)
                self._jobs.adopt(key, self._clock() - age_s, max(0, blocks), max(0, turns))
            case _:
                logger.info(
                    "a job of the previous engine is ignored: its saved numbers are invalid"
                )


def _name(key: JobKey) -> str:
    said = f"{len(key.salt)} {key.salt}{key.name}"
    return NOTE_PREFIX + sha256(said.encode("utf-8", "surrogatepass")).hexdigest()[:32]

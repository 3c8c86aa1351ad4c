"""Every load on every server in turn, in rounds that no server gains by; each run is kept as it
ends."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from tiered_kv.bench.agents.openai_client import open_client
from tiered_kv.bench.agents.run_files import RunFileError, RunFiles, read_object, run_paths
from tiered_kv.bench.replay.ab import HarnessError
from tiered_kv.bench.replay.results import JobDone

from .chat_client import ChatClient
from .live_jobs import LiveJobs, Unit, fitting
from .live_load import LivePlayer, Load, Material, Played
from .live_run import LiveRun
from .server_page import cached_counts, served, since
from .targets import NONCE_BYTES, Measured, Target, measure_sizes

T = TypeVar("T")

SAMPLE_CHARACTERS = 4_000
"""Characters of a recording that the servers count the tokens of."""
MARGIN = 0.95
"""Part of a server's context that jobs may fill: what a text is worth is an estimate."""


class Rounds:
    """Runs of some loads on some servers.

    Args:
        scale: factor of all sizes.
        turns: of a job at most; None: all.
        longest: most tokens of a context; None: as the servers say.
        tell: told of every run before it starts.
        on_turn: called after every turn.
    """

    def __init__(
        self,
        targets: Sequence[Target],
        loads: Sequence[Load],
        jobs: LiveJobs,
        *,
        rounds: int,
        seed: int,
        scale: float,
        turns: int | None,
        longest: int | None,
        files: RunFiles,
        tell: Callable[[str], None] = lambda _: None,
        on_turn: Callable[[], None] = lambda: None,
    ) -> None:
        self.jobs = jobs
        self._runs: list[LiveRun] = []
        self._targets = list(targets)
        self._loads = list(loads)
        self._rounds = rounds
        self._seed = seed
        self._scale = scale
        self._turns = turns
        self._longest = longest
        self._files = files
        self._tell = tell
        self._on_turn = on_turn
        self._models: dict[str, str] = {}
        self._sizes: dict[str, Measured] = {}

    @property
    def total(self) -> int:
        return len(self._targets) * len(self._loads) * self._rounds

    @property
    def runs(self) -> list[LiveRun]:
        """Runs so far, by load and round; servers stand in the order they were named in."""
        names = [target.name for target in self._targets]
        return sorted(
            self._runs,
            key=lambda run: (self._loads.index(run.load), run.round, names.index(run.server)),
        )

    def prepare(self) -> None:
        """Ask every server for its model, and what texts are worth; the jobs are cut to what all
        servers take.

        Raises:
            HarnessError, bench.live.server_page.ServerPageError: a server cannot be measured.
            ValueError: no job fits.
        """
        sample = _sample(self.jobs)
        limits = [] if self._longest is None else [float(self._longest)]
        for target in self._targets:
            found = served(target.url, target.model, target.api_key)
            self._models[target.name] = found.model
            self._sizes[target.name] = asyncio.run(measure_sizes(target, found.model, sample))
            if found.longest is not None:
                limits.append(MARGIN * found.longest)
        sizes = list(self._sizes.values())
        per_unit = self._scale
        if self.jobs.unit is Unit.CHARACTERS:
            per_unit *= max(one.tokens_a_character for one in sizes)
        most_turns = max(len(job.turns) for job in self.jobs.jobs)
        around = 2 * min(self._turns or most_turns, most_turns)
        spare = around * max(one.tokens_a_message for one in sizes)
        self.jobs = fitting(
            self.jobs,
            tokens_per_unit=per_unit,
            most_tokens=int(min(limits) - spare) if limits else None,
            turns=self._turns,
        )

    def run_all(self) -> None:
        """Everything; what was measured stays when this is interrupted.

        Raises:
            HarnessError: a server finished no job.
        """
        self._warm_up()
        for load in self._loads:
            for number in range(self._rounds):
                for target in drawn_order(self._targets, self._seed, number):
                    self._runs.append(self._one(target, load, number))

    def _warm_up(self) -> None:
        """The first turns of a job on every server: what a server does once is in no figure."""
        job = self.jobs.jobs[0]
        first = replace(job, turns=tuple(replace(one, gap_s=0.0) for one in job.turns[:2]))

        async def warm(player: LivePlayer) -> JobDone:
            return await player.job(first)

        for target in self._targets:
            done = asyncio.run(self._with_player(target, warm))
            if done.error is not None:
                raise HarnessError(f"{target.name} did not finish a first job: {done.error}")

    def _one(self, target: Target, load: Load, number: int) -> LiveRun:
        kept_as = load.name.replace(" ", "-")
        found = self._files.get(kept_as, number, target.name)
        if found is not None:
            return _run_of(*found)
        self._tell(f"{load.name}, round {number + 1}, {target.name}")

        async def play(player: LivePlayer) -> Played:
            return await player.play(self.jobs.jobs, load, self._seed + number)

        before = cached_counts(target.url, target.api_key)
        played = asyncio.run(self._with_player(target, play))
        counts = since(before, cached_counts(target.url, target.api_key))
        failed = [job for job in played.jobs if job.error is not None]
        if len(failed) == len(played.jobs):
            raise HarnessError(f"{target.name} finished no job: {failed[0].error}")
        run = LiveRun(
            server=target.name,
            url=target.url,
            load=load,
            round=number,
            jobs=played.jobs,
            agents=played.agents,
            tells_cached=played.tells_cached,
            counts=counts,
        )
        self._files.put(kept_as, number, target.name, run.as_json())
        return run

    async def _with_player(
        self, target: Target, do: Callable[[LivePlayer], Coroutine[None, None, T]]
    ) -> T:
        material = Material(
            secrets.token_hex(NONCE_BYTES),
            self._sizes[target.name].words_per_token,
            self.jobs.texts if self._scale == 1 else {},
        )
        async with open_client(target.url, target.api_key) as client:
            model = self._models[target.name]
            chat = ChatClient(client, model, target.api, target.hints, target.plain)
            return await do(LivePlayer(chat, material, self._on_turn))


def drawn_order(servers: Sequence[T], seed: int, number: int) -> list[T]:
    """Order of the servers in a round: as they are or reversed, by a coin that ``seed`` throws.

    Then equal servers' differences are as likely positive as negative, in every round for itself,
    whatever the noise is like: the interval of paired differences takes that for granted. An order
    that alternates puts two runs of one server side by side, where one spell of noise hits both.
    """
    heads = np.random.default_rng([seed, number, 3]).integers(2)
    return list(reversed(servers)) if heads else list(servers)


def read_live_runs(folder: Path) -> list[LiveRun]:
    """All runs kept under ``folder``, in order of load, round and server.

    Raises:
        RunFileError: there is none, or one cannot be read.
    """
    found = [_run_of(path, read_object(path)) for path in run_paths(folder)]
    if not found:
        raise RunFileError(f"{folder} holds no runs of tiered-kv bench")
    return sorted(found, key=lambda run: (run.load.level, run.round, run.server))


def _run_of(path: Path, said: dict[str, object]) -> LiveRun:
    try:
        return LiveRun.from_json(said)
    except (KeyError, TypeError, ValueError) as error:
        raise RunFileError(f"{path} holds no run of tiered-kv bench: {error!r}") from error


def _sample(jobs: LiveJobs) -> str:
    texts = [text for job in jobs.jobs for text in jobs.texts.get(job.name, ())]
    return " ".join(texts)[:SAMPLE_CHARACTERS]

"""One server's part of the demo: started, given the jobs, stopped; with a sentence for failures."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from tiered_kv.bench.servers.load import cores_of_others, read_clock
from tiered_kv.bench.servers.service import ServerError, error_in
from tiered_kv.bench.servers.vllm_server import ServerOptions, VllmServer

from .agents import AgentError, Job, TurnResult, run_jobs
from .report import Run
from .turns import sources_from_usage

USUAL_START_S = 30.0
"""A server's start on two cores; only the progress bar uses it."""


class DemoError(RuntimeError):
    """The demo cannot go on; the message says in a sentence or two what happened, what to do, and
    where the log is."""


class Place:
    """The demo's progress, and a sentence for whoever interrupts it."""

    def __init__(self) -> None:
        self._said = "before a server was started"
        self._log: Path | None = None

    def reached(self, what: str, log: Path) -> None:
        """Note a server's progress and its log."""
        self._said, self._log = what, log

    def __str__(self) -> str:
        return self._said

    def stopped(self) -> str:
        """A sentence for an interrupt."""
        log = f" Its log: {shown(self._log)}." if self._log else ""
        return f"stopped: {self._said}; no server is left running.{log} scripts/demo begins anew."


class SoFar:
    """A sentence about a run that goes on: first tokens, and prompt tokens that were computed.

    Args:
        before: turns of the server that ran the same jobs first, in order of their ends; may be
            empty.
    """

    def __init__(self, before: Sequence[TurnResult] = ()) -> None:
        self._before = before
        self._results: list[TurnResult] = []

    def add(self, result: TurnResult) -> None:
        """Record an answered turn."""
        self._results.append(result)

    def __str__(self) -> str:
        here = [result for result in self._results if result.turn > 1]
        if not here:
            return "  the agents' first prompts are computed"
        there = [one for one in self._before[: len(self._results)] if one.turn > 1]
        prompt = sum(result.prompt_tokens for result in here)
        computed = prompt - sum(result.cached_tokens for result in here)
        said = f"  later turns: first token after {fmean(r.ttft_s for r in here):.1f} s"
        if there:
            said += f" (stock: {fmean(r.ttft_s for r in there):.1f} s)"
        return f"{said}, {computed / prompt:.0%} of prompts computed"


class Stage:
    """One server's part of the demo, with its progress on ``console``.

    Args:
        place: kept up to date while it runs.
        patience_s: how long a client waits for the server's next word.
        before: turns of the server that ran the same jobs first, to compare with while this one
            runs.
    """

    def __init__(
        self,
        name: str,
        options: ServerOptions,
        log_path: Path,
        console: Console,
        place: Place,
        patience_s: float,
        before: Sequence[TurnResult] = (),
    ) -> None:
        self._name = name
        self._so_far = SoFar(before)
        self._console = console
        self._options = options
        self._log_path = log_path
        self._place = place
        self._patience_s = patience_s

    def run(self, jobs: Sequence[Job], max_tokens: int) -> Run:
        """Start the server, run the jobs, stop the server.

        ``sources`` of the result are what the server reports as usage.

        Raises:
            DemoError: the server did not start, died, or left a request without an answer.
        """
        try:
            return self._run(jobs, max_tokens)
        except ServerError as error:
            said = error_in(self._log()) or str(error).splitlines()[0]
            raise self._failed(said) from error
        except AgentError as error:
            less = "Run the demo again with less to do (scripts/demo --jobs 4 --turns 4)"
            raise self._failed(f"{error}. {less}, or when the machine is less busy") from error

    def _failed(self, reason: str) -> DemoError:
        return DemoError(f"{self._place}: {reason}. The server's log: {shown(self._log_path)}")

    def _reached(self, count: int, total: int) -> None:
        self._place.reached(f"{self._name}, after {count} of {total} turns", self._log_path)

    def _log(self) -> str:
        return self._log_path.read_text(encoding="utf-8", errors="replace")

    def _run(self, jobs: Sequence[Job], max_tokens: int) -> Run:
        total = sum(len(job.steps) for job in jobs)
        self._place.reached(f"{self._name}, while its server started", self._log_path)
        progress = _progress(self._console)
        line = Text()
        with Live(Group(progress, line), console=self._console):
            starting = progress.add_task(f"{self._name}: server starts", total=USUAL_START_S)

            def on_wait(seconds: float) -> None:
                progress.update(starting, completed=min(seconds, USUAL_START_S * 0.97))

            server = VllmServer(
                self._options, self._log_path, start_timeout_s=self._patience_s, on_wait=on_wait
            )
            with server:
                progress.update(starting, completed=USUAL_START_S)
                self._reached(0, total)
                turns = progress.add_task(f"{self._name}: turns", total=total)
                ended = itertools.count(1)

                def on_turn(result: TurnResult) -> None:
                    count = next(ended)
                    self._so_far.add(result)
                    line.plain = str(self._so_far)
                    progress.update(turns, completed=count)
                    self._reached(count, total)

                began = time.perf_counter()
                clock = read_clock(server.pid or 0)
                try:
                    results = asyncio.run(
                        run_jobs(
                            server.url,
                            jobs,
                            max_tokens=max_tokens,
                            on_turn=on_turn,
                            timeout_s=self._patience_s,
                        )
                    )
                except AgentError:
                    server.check()
                    raise
                return Run(
                    results=results,
                    sources=sources_from_usage(results),
                    wall_s=time.perf_counter() - began,
                    reserved_cpus=server.reserved_cpus,
                    other_cores=cores_of_others(clock, read_clock(server.pid or 0)),
                )


def shown(path: Path) -> str:
    """A path as a reader finds it from where they stand."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:<26}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        console=console,
    )

"""One server's part of the demo: starts the server, runs the jobs, stops the server, and describes
failures in a sentence.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from tiered_kv.bench.agents.client import open_client
from tiered_kv.bench.agents.jobs import Job
from tiered_kv.bench.agents.player import OnTurn, Player, together
from tiered_kv.bench.agents.results import JobDone, Kept, Run, TurnDone
from tiered_kv.bench.servers.load import cores_of_others, read_clock
from tiered_kv.bench.servers.service import ServerError, error_in
from tiered_kv.bench.servers.vllm_server import MODEL_NAME, ServerOptions, VllmServer

from .jobs import Arrivals
from .report import later_ttft_s

USUAL_START_S = 30.0
"""Typical startup time of a server on two cores, seconds. Used only for the progress bar."""


class DemoError(RuntimeError):
    """The demo cannot continue. The message has the cause, a remedy and the path of the log."""


class AgentError(RuntimeError):
    """A server did not answer a turn."""


class Stage:
    """Runs the demo's servers one after another, and shows the progress on ``console``."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._reached = "before a server was started"
        self._log: Path | None = None

    def stopped(self) -> str:
        """Return the message to show after an interrupt."""
        log = f" Its log: {shown(self._log)}." if self._log else ""
        return f"stopped: {self._reached}; no server is left running.{log}"

    def run(
        self,
        name: str,
        options: ServerOptions,
        log: Path,
        arrivals: Arrivals,
        *,
        patience_s: float,
        before: Sequence[TurnDone] = (),
    ) -> Kept:
        """Start a server, play the jobs, and stop the server.

        Args:
            patience_s: maximum wait for a silent server, seconds.
            before: turns of the server that ran the same jobs before, in the order in which they
                finished, for a comparison while this server runs.

        Raises:
            DemoError: the server did not start, died, or left a request without an answer.
        """
        self._reached, self._log = f"{name}, while its server started", log
        total = sum(len(job.turns) for _, job in arrivals)
        columns = TextColumn("{task.description:<26}"), BarColumn(), TaskProgressColumn()
        bars = Progress(*columns, TimeElapsedColumn(), console=self._console)
        starting = bars.add_task(f"{name}: server starts", total=USUAL_START_S)
        line, done = Text(), list[TurnDone]()

        def on_wait(seconds: float) -> None:
            bars.update(starting, completed=min(seconds, USUAL_START_S * 0.97))

        def on_turn(_name: str, turn: TurnDone) -> None:
            done.append(turn)
            line.plain = so_far(done, before)
            bars.update(turns, completed=len(done))
            self._reached = f"{name}, after {len(done)} of {total} turns"

        server = VllmServer(options, log, start_timeout_s=patience_s, on_wait=on_wait)
        try:
            with Live(Group(bars, line), console=self._console), server:
                bars.update(starting, completed=USUAL_START_S)
                turns = bars.add_task(f"{name}: turns", total=total)
                self._reached = f"{name}, after 0 of {total} turns"
                clock = read_clock(server.pid or 0)
                try:
                    jobs = asyncio.run(play(server.url, arrivals, patience_s, on_turn))
                except AgentError:
                    server.check()
                    raise
                others = cores_of_others(clock, read_clock(server.pid or 0))
                return Kept(Run(name, "demo", 0, 0, 0.0, jobs), server.reserved_cpus, others)
        except ServerError as error:
            why = error_in(error.log) or str(error).splitlines()[0]
            raise DemoError(f"{self._reached}: {why}. The server's log: {shown(log)}") from error
        except AgentError as error:
            raise DemoError(
                f"{self._reached}: {error}. Run the demo again with less to do (scripts/demo --jobs"
                f" 4 --turns 4), or when the machine is less busy. The server's log: {shown(log)}"
            ) from error


async def play(
    url: str, arrivals: Arrivals, patience_s: float, on_turn: OnTurn
) -> tuple[JobDone, ...]:
    """Play all jobs on the server at ``url``.

    Raises:
        AgentError: a request failed. The other jobs are abandoned.
    """
    async with open_client(url, MODEL_NAME, silence_s=patience_s) as client:
        player = Player(client, on_turn=on_turn)

        async def one(at_s: float, job: Job) -> JobDone:
            (done,) = await player.arriving([(at_s, job)])
            if done.error is not None:
                raise AgentError(f"{job.name}, {done.error}")
            return done

        return tuple(await together(one(at_s, job) for at_s, job in arrivals))


def so_far(done: Sequence[TurnDone], before: Sequence[TurnDone]) -> str:
    """Return a sentence that compares a run in progress with the other server at the same turn
    count.
    """
    later = [turn for turn in done if turn.turn > 1]
    if not later:
        return "  computing the agents' first prompts"
    prompt = sum(turn.prompt_tokens for turn in later)
    computed = prompt - sum(turn.cached_tokens for turn in later)
    stock_s = later_ttft_s(before[: len(done)])
    stock = f" (stock: {stock_s:.1f} s)" if stock_s else ""
    return (
        f"  later turns: first token after {later_ttft_s(later):.1f} s{stock}, "
        f"{computed / prompt:.0%} of prompts computed"
    )


def shown(path: Path) -> str:
    """Return a path for display, relative to the current folder if it is inside that folder."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)

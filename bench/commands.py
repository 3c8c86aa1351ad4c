"""Does the forecast know how long a shell command takes, after a few others of its tool?

    python -m bench.commands --json

The 200 commands of ``bench.command_list`` run for real, one after the other, on toy projects in a
temporary folder: no network, 30 s each at most, a few minutes in all. Each is then forecast by a
new model that has seen 5 other commands of the same tool: the same decisive program, whatever its
subcommand; fewer where the list has no more. The verdict is whether P(X <= B) > 0.5, for B of 1
and of 5 s. All shares are means over 20 draws of the 5.

``right`` is the share of verdicts that were right, ``right_original`` that of ContextServe's rules
(see ``policies.baselines.contextserve``): first words that are fast, prefixes that are slow, and
for the rest a Normal-Inverse-Gamma on ln X with prior (0, 1, 1, 1) over the same 5 observations.
``always_yes`` is the share of one who says of every command that it is within B. ``by_kind`` has
``right`` and ``right_original`` for each kind of command.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tiered_kv.policies.base import ToolUse, TurnEnd
from tiered_kv.policies.baselines.contextserve import FAST_WORDS, PRIOR, SLOW_PREFIXES
from tiered_kv.policies.forecast.gap_model import GapModel
from tiered_kv.policies.tools.calls import tool_call
from tiered_kv.policies.tools.tool_use import tool_use

from .command_list import COMMANDS, Command
from .output import parser, progress, show
from .toy import make_toys

BOUNDS_S = (1.0, 5.0)
OBSERVATIONS = 5
DRAWS = 20
LIMIT_S = 30.0
NEEDED = ("bash", "git", "gcc", "make", "tar", "gzip", "pytest")


@dataclass(frozen=True, slots=True)
class Run:
    """A command that ran.

    Attributes:
        seconds: until the shell ended; ``LIMIT_S`` if it was stopped then.
    """

    kind: str
    line: str
    use: ToolUse
    seconds: float

    @property
    def tool(self) -> str:
        """The decisive program."""
        return self.use.path[1].partition(" ")[0]


def environment(root: Path) -> dict[str, str]:
    """This process's, with this Python first in the path, login shells included."""
    home = root / "home"
    home.mkdir()
    path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"
    (home / ".bash_profile").write_text(f"export PATH='{path}'\n")
    (home / ".gitconfig").write_text("[user]\nname = Toy\nemail = toy@example.org\n")
    return {**os.environ, "PATH": path, "HOME": str(home), "GIT_CONFIG_NOSYSTEM": "1"}


def run(line: str, root: Path, env: Mapping[str, str]) -> float:
    """Run a line of shell and throw away what it prints; the seconds it took.

    What it left running in the background is stopped.
    """
    with tempfile.TemporaryFile() as output:  # grep stops at its first find if it is /dev/null
        began = time.perf_counter()
        process = subprocess.Popen(
            ["bash", "-c", line],
            cwd=root,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        # Popen.wait with a timeout would only look every 50 ms.
        limit = threading.Timer(LIMIT_S, _stop, (process.pid,))
        limit.start()
        process.wait()
        seconds = min(time.perf_counter() - began, LIMIT_S)
        limit.cancel()
        limit.join()
        _stop(process.pid)
    return seconds


def _stop(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def run_all(
    commands: Mapping[str, Sequence[Command]], root: Path, tick: Callable[[str], None]
) -> list[Run]:
    """Run all that this machine has the programs for."""
    env = environment(root)
    missing = [name for name in NEEDED if shutil.which(name, path=env["PATH"]) is None]
    runs = []
    for kind, listed in commands.items():
        for command in listed:
            tick(kind)
            if any(name in command.line.split() for name in missing):
                continue
            if command.before:
                run(command.before, root, env)
            use = tool_use([tool_call("bash", {"command": command.line})])
            runs.append(Run(kind, command.line, use, run(command.line, root, env)))
    return runs


def original_says(line: str, bound_s: float, seen_s: Sequence[float]) -> bool:
    """ContextServe's verdict on "X <= bound": its rules, and where it has none its posterior."""
    if line.startswith(SLOW_PREFIXES):
        return False
    if line.split()[0] in FAST_WORDS:
        return True
    logs = np.log(np.maximum(seen_s, 1e-3))
    mean = float(logs.mean()) if len(logs) else 0.0
    belief = PRIOR.updated(len(logs), mean, float(((logs - mean) ** 2).sum()))
    return bool(belief.cdf(np.log([bound_s]))[0] > 0.5)


def ours_says(use: ToolUse, bound_s: float, seen: Iterable[Run]) -> bool:
    """The verdict of a new model that has seen these."""
    model = GapModel()
    for other in seen:
        model.observe(_turn(other.use), other.seconds, ended=True)
    return model.forecast(_turn(use)).within(bound_s) > 0.5


def _turn(use: ToolUse) -> TurnEnd:
    return TurnEnd(None, 1, is_last_step=False, aborted=False, context_tokens=2_000, tool=use)


@dataclass(frozen=True, slots=True)
class Verdict:
    """One command, one bound, one draw of observations."""

    kind: str
    within: bool
    ours: bool
    original: bool


def verdicts(runs: Sequence[Run], draws: int = DRAWS) -> list[Verdict]:
    """All of them. The other commands of a tool are others by their text, too."""
    rng = random.Random(1)
    found = []
    for one in runs:
        others = [other for other in runs if other.tool == one.tool and other.line != one.line]
        for _ in range(draws):
            seen = rng.sample(others, min(OBSERVATIONS, len(others)))
            for bound_s in BOUNDS_S:
                found.append(
                    Verdict(
                        one.kind,
                        one.seconds <= bound_s,
                        ours_says(one.use, bound_s, seen),
                        original_says(one.line, bound_s, [other.seconds for other in seen]),
                    )
                )
    return found


def shares(found: Sequence[Verdict]) -> dict[str, float]:
    return {
        "right": float(np.mean([v.ours == v.within for v in found])),
        "right_original": float(np.mean([v.original == v.within for v in found])),
        "always_yes": float(np.mean([v.within for v in found])),
    }


def measure(
    commands: Mapping[str, Sequence[Command]], tick: Callable[[str], None]
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="tiered-kv-toys-") as folder:
        make_toys(Path(folder))
        runs = run_all(commands, Path(folder), tick)
    found = verdicts(runs)
    return {
        **shares(found),
        "commands": len(runs),
        **{
            f"within_{bound_s:g}s": float(np.mean([one.seconds <= bound_s for one in runs]))
            for bound_s in BOUNDS_S
        },
        "run_s": sum(one.seconds for one in runs),
        "by_kind": {
            kind: shares([v for v in found if v.kind == kind])
            for kind in commands
            if any(v.kind == kind for v in found)
        },
    }


def main() -> None:
    args: argparse.Namespace = parser(__doc__.splitlines()[0]).parse_args()
    with progress() as bar:
        bar.disable = args.json or not sys.stderr.isatty()
        task = bar.add_task("toys", total=sum(map(len, COMMANDS.values())))
        result = measure(COMMANDS, lambda kind: bar.update(task, advance=1, description=kind))
    if args.json:
        show("Commands", result, as_json=True)
        return
    by_kind = result.pop("by_kind")
    show("Verdicts on shell commands", result, as_json=False)
    for kind, figures in by_kind.items():
        show(kind, figures, as_json=False)


if __name__ == "__main__":
    main()

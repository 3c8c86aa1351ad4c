"""Wrappers: commands that run another command, possibly with a time limit."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

LONGEST_S = 7 * 86_400.0
"""Maximum duration, seconds. Longer durations, and ``infinity``, are reduced to this maximum."""

SOME_TIMES = 10
"""Assumed number of runs of a command if a script does not specify it."""

SHELLS = frozenset({"bash", "sh", "zsh", "dash", "ksh", "ash", "fish"})

_MAX_WRAPPERS = 8

# For each wrapper: options that take a value, and the number of words between them and the command.
_WRAPPERS: dict[tuple[str, ...], tuple[str, int]] = {
    ("sudo",): ("-u -g -h -p -C -T -r -t -D -R --user --group", 0),
    ("doas",): ("-u -C", 0),
    ("env",): ("-u -C --unset --chdir", 0),
    ("nice",): ("-n --adjustment", 0),
    ("ionice",): ("-c -n --class --classdata", 0),
    ("chrt",): ("", 1),
    ("taskset",): ("-c --cpu-list", 0),
    ("time",): ("-f -o --format --output", 0),
    ("timeout",): ("-k -s --kill-after --signal", 1),
    ("gtimeout",): ("-k -s --kill-after --signal", 1),
    ("nohup",): ("", 0),
    ("setsid",): ("", 0),
    ("stdbuf",): ("-i -o -e --input --output --error", 0),
    ("unbuffer",): ("", 0),
    ("command",): ("", 0),
    ("builtin",): ("", 0),
    ("exec",): ("-a", 0),
    ("xargs",): ("-n -I -P -L -d -a -E -s --max-args --max-procs --delimiter --arg-file", 0),
    ("flock",): ("-w -E --timeout", 1),
    ("xvfb-run",): ("-s -n -e -f --server-args", 0),
    ("strace",): ("-e -o -p -s", 0),
    ("valgrind",): ("", 0),
    ("npx",): ("-p --package", 0),
    ("bunx",): ("-p --package", 0),
    ("uvx",): ("--with --from --python -p", 0),
    ("conda", "run"): ("-n -p --name --prefix --cwd", 0),
    ("mamba", "run"): ("-n -p --name --prefix --cwd", 0),
    ("micromamba", "run"): ("-n -p --name --prefix --cwd", 0),
    ("uv", "run"): ("--with --python -p --extra --group --project --directory --env-file", 0),
    ("poetry", "run"): ("", 0),
    ("pipenv", "run"): ("", 0),
    ("pdm", "run"): ("-p --project", 0),
    ("hatch", "run"): ("", 0),
    ("rye", "run"): ("", 0),
    ("pixi", "run"): ("-e --environment", 0),
    ("coverage", "run"): ("--source --rcfile --data-file --include --omit", 0),
    ("bundle", "exec"): ("", 0),
    ("pnpm", "exec"): ("", 0),
    ("yarn", "exec"): ("", 0),
    ("docker", "exec"): ("-u -w -e --user --workdir --env --env-file", 1),
    ("podman", "exec"): ("-u -w -e --user --workdir --env --env-file", 1),
}
_OPTIONS = {key: (frozenset(takes.split()), skip) for key, (takes, skip) in _WRAPPERS.items()}

# Options with which xargs starts a process for every word or line.
_ONE_BY_ONE = frozenset({"-n1", "-n", "-I", "-I{}", "-I%", "-i", "-L1", "-L"})

_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*\+?=")
_DURATION = re.compile(r"(\d{1,12}(?:\.\d*)?|\.\d{1,12})([smhd]?)")
_UNITS_S = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_VERSIONED = re.compile(
    r"(python|pypy|pip|node|ruby|php|perl|java|gcc|g\+\+|clang|clang\+\+)-?[\d.]+"
)


@dataclass(frozen=True, slots=True)
class Unwrapped:
    """The command that is finally run.

    Attributes:
        words: the command, name first; empty if the line has only assignments, or if ``script`` is
            given.
        most_s: time limit set by a wrapper, seconds.
        script: script that a shell runs; None for other commands.
        by_xargs: True if ``xargs`` reads its arguments from the pipe.
        times: number of runs.
    """

    words: tuple[str, ...]
    most_s: float = math.inf
    script: str | None = None
    by_xargs: bool = False
    times: int = 1


def seconds(word: str) -> float | None:
    """Parse a duration of ``sleep`` or ``timeout``, in seconds; None if the word is not a
    duration."""
    if word in ("inf", "infinity"):
        return LONGEST_S
    match = _DURATION.fullmatch(word)
    return min(float(match[1]) * _UNITS_S[match[2]], LONGEST_S) if match else None


def program(word: str) -> str:
    """Return the name of a program without its version and its folder. For a program outside a
    folder such as ``bin``, the version is kept and the folder is replaced by ``./``."""
    folder, slash, name = word.rpartition("/")
    if slash and folder.rpartition("/")[2] not in ("bin", "sbin", ".bin", "Scripts"):
        return f"./{name}"
    match = _VERSIONED.fullmatch(name)
    return match[1] if match else name.removeprefix("\\") or word


def unwrap(words: Sequence[str]) -> Unwrapped:
    """Remove variable assignments and wrappers from a command, such as ``timeout 10``, and return
    the inner command with the limits that the wrappers set. ``python -m module`` becomes
    ``module``."""
    most_s, by_xargs, times = math.inf, False, 1
    rest = list(words)
    for _ in range(_MAX_WRAPPERS):
        while rest and (not rest[0] or _ASSIGNMENT.match(rest[0])):
            del rest[0]
        if not rest:
            return Unwrapped((), most_s)
        rest[0] = program(rest[0])
        script = _script(rest)
        if script is not None:
            return Unwrapped((), most_s, script)
        inner = _inner(rest)
        if not inner:
            break
        if rest[0] in ("timeout", "gtimeout"):
            duration = rest[len(rest) - len(inner) - 1]
            most_s = min(most_s, seconds(duration) or math.inf)
        if rest[0] == "xargs":
            by_xargs = True
            times = SOME_TIMES if _ONE_BY_ONE & set(rest[: len(rest) - len(inner)]) else times
        rest = inner
    return Unwrapped(tuple(rest), most_s, None, by_xargs, times)


def _script(words: list[str]) -> str | None:
    """Return the script of ``bash -c script`` or ``eval``; None for other commands."""
    if words[0] == "eval":
        return " ".join(words[1:])
    if words[0] not in SHELLS:
        return None
    for n, word in enumerate(words[1:], 1):
        if not word.startswith("-"):
            return None
        if "c" in word and not word.startswith("--"):
            return words[n + 1] if n + 1 < len(words) else None
    return None


def _inner(words: list[str]) -> list[str]:
    """Return the command that a wrapper runs; empty if ``words`` are not a wrapper, or if the
    wrapper runs nothing."""
    if words[0] == "python":
        return _module(words)
    key = next((key for key in (tuple(words[:2]), tuple(words[:1])) if key in _OPTIONS), None)
    if key is None:
        return []
    takes_value, skip = _OPTIONS[key]
    n = len(key)
    while n < len(words) and (words[n].startswith("-") or _ASSIGNMENT.match(words[n])):
        option = words[n]
        n += 1 + (option in takes_value)
        if option == "--":
            break
    return words[n + skip :]


def _module(words: list[str]) -> list[str]:
    """Return the words of ``python -m module`` from the module on; empty for other uses of
    Python."""
    n = 1
    while n < len(words) and words[n].startswith("-") and words[n] not in ("-m", "-c", "-"):
        n += 1 + (words[n] in ("-W", "-X"))
    return words[n + 1 :] if n < len(words) and words[n] == "-m" else []

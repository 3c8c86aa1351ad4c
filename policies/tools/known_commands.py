"""Names and priors of shell commands. A name includes the subcommand, and the arguments that change
what runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from tiered_kv.policies.base import Rule

from .duration_rules import (
    AT_ONCE,
    BUILD,
    END,
    ONE_TEST,
    OVERHEAD_S,
    QUERY,
    RULES,
    SCRIPT,
    SEARCH,
    SEARCH_ALL,
    SERVER,
    TEST,
    TEST_FILE,
)
from .wrappers import SOME_TIMES

_INTERPRETERS = frozenset({"python", "node", "ruby", "perl", "php", "bash", "sh", "zsh"})
_INLINE = frozenset({"-c", "-e", "-r", "-"})
_FIRST_OF_TWO = frozenset(
    {"npm run", "yarn run", "pnpm run", "docker compose", "uv pip", "python manage.py"}
)
_WITH_SUBCOMMAND = {key.partition(" ")[0] for key in RULES if " " in key} - _INTERPRETERS
_WITH_SUBCOMMAND |= {"make", "ninja", "docker-compose", "gh", "aws", "gcloud", "systemctl", "rake"}
_WITH_SUBCOMMAND |= {"kubectl", "just", "task", "mvn", "gradle", "./gradlew", "bazel", "tox"}
_WITH_SUBCOMMAND -= {"tar"}
# Options before the subcommand that take a value.
_TAKE_VALUE = {
    "git": frozenset({"-C", "-c", "--git-dir", "--work-tree"}),
    "make": frozenset({"-C", "-f", "-j", "-l", "--directory", "--file"}),
    "ninja": frozenset({"-C", "-f", "-j"}),
    "npm": frozenset({"--prefix", "-w", "--workspace"}),
    "docker": frozenset({"--context", "-H", "-f"}),
    "kubectl": frozenset({"-n", "--namespace", "--context"}),
    "go": frozenset({"-C"}),
}
_TAR_MODE = re.compile(r"-?[a-zA-Z]*([ctxru])[a-zA-Z]*|--(create|list|extract|get|append|update)")
_EVERYWHERE = frozenset({"/", "~", "$HOME"})
_MAX_NAME_CHARS = 40


def split_command(words: Sequence[str]) -> tuple[str, Sequence[str]]:
    """Split a command into its name and its arguments. The name includes the subcommand, if any
    (``git clone``, ``npm run build``, ``tar -x``).

    Args:
        words: words of the command, at least one, as in ``Segment.words``.
    """
    name = words[0][:_MAX_NAME_CHARS]
    if name == "tar":
        mode = _TAR_MODE.fullmatch(_tar_mode(words[1:]))
        return (f"tar -{mode[1] or mode[2][0]}" if mode else name), words[1:]
    if name in _INTERPRETERS:
        plain = next((w for w in words[1:] if w in _INLINE or not w.startswith("-")), "")
        if plain in _INLINE or not plain:
            rest = words[words.index(plain) + 1 :] if plain else words[1:]
            return f"{name} {plain}".strip(), rest
        rest = words[words.index(plain) + 1 :]
        if plain.rpartition("/")[2] != "manage.py":
            return f"{name} <path>", [plain, *rest]
        words, name = [plain, *rest], "python manage.py"
    elif name not in _WITH_SUBCOMMAND:
        return name, words[1:]
    takes_value = _TAKE_VALUE.get(name, frozenset())
    options: list[str] = []
    n = 1
    while n < len(words):
        word = words[n]
        n += 1
        if word.startswith(("-", "+")) or "=" in word:
            n += word in takes_value
            options += [word] * (word not in takes_value)
            continue
        name = f"{name} {word[:_MAX_NAME_CHARS]}"
        if name not in _FIRST_OF_TWO:
            break
    return name, [*options, *words[n:]]


class KnownCommand(NamedTuple):
    """Name and rule of a command.

    Attributes:
        name: command, subcommand, and arguments that change what runs. Commands with the same name
            are expected to take similar times.
        rule: prior of the command's duration; None if unknown.
    """

    name: str
    rule: Rule | None


def known_command(words: Sequence[str]) -> KnownCommand:
    """Return the name and the prior of a command.

    Args:
        words: words of the command, at least one, as in ``Segment.words``.
    """
    name, arguments = split_command(words)
    rule: Rule | None = None
    general = name
    while general and rule is None:
        rule = RULES.get(general)
        general = general.rpartition(" ")[0]
    if rule is None and name.startswith("./"):
        rule = SCRIPT
    return _by_arguments(name, rule, arguments) or KnownCommand(name, rule)


def _by_arguments(name: str, rule: Rule | None, arguments: Sequence[str]) -> KnownCommand | None:
    """Return a command whose arguments change what runs, with its refined name and rule; None if no
    argument does."""
    options = set(arguments)
    for asks in ("--help", "--version", "--dry-run"):
        if asks in options:
            return KnownCommand(f"{name} {asks}", AT_ONCE)
    if name == "echo" and options & _SUBMITS:
        return KnownCommand("echo submit", END)
    if name == "tail" and options & {"-f", "-F", "--follow"}:
        return KnownCommand("tail -f", SERVER)
    if name == "make" and "-n" in options:
        return KnownCommand("make -n", AT_ONCE)
    if name == "git clone" and not any("://" in word or "@" in word for word in arguments):
        return KnownCommand("git clone <path>", QUERY)
    if name in ("git gc", "git repack") and options & {"--aggressive", "-f", "-F"}:
        return KnownCommand(f"{name} -f", BUILD)  # repacks everything
    if name in _COMPILERS:
        sources = [word for word in arguments if word.endswith(_C_SOURCES)]
        times = sum(SOME_TIMES if "*" in word else 1 for word in sources)
        if times > 1 and rule:
            median_s = OVERHEAD_S + times * (rule.median_s - OVERHEAD_S)
            return KnownCommand(f"{name} <path>...", Rule(median_s, rule.sigma))
    if name == "tar -c":
        packed = next((c for c in _PACKED if _packs(arguments, c)), "")
        return KnownCommand(name + packed, _PACKED.get(packed, QUERY))
    if rule is SEARCH and options & _EVERYWHERE:
        return KnownCommand(f"{name} /", SEARCH_ALL)
    if rule is TEST:
        if "-k" in options or any("::" in word for word in arguments):
            return KnownCommand(f"{name} <path>::<name>", ONE_TEST)
        if "--collect-only" in options or any(word.endswith(_TEST_SOURCES) for word in arguments):
            return KnownCommand(f"{name} <path>", TEST_FILE)
    return None


_SUBMITS = frozenset({"COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT", "MINI_SWE_AGENT_FINAL_OUTPUT"})
"""Strings that mini-swe-agent prints when it has finished."""

_COMPILERS = frozenset({"gcc", "g++", "cc", "c++", "clang", "clang++", "nvcc"})
_C_SOURCES = (".c", ".cc", ".cpp", ".cxx", ".cu")

# Durations for 20 MB. gzip compresses about 50 MB/s, bzip2 15 MB/s and xz 5 MB/s.
_PACKED = {"z": Rule(0.5, 1.3), "j": Rule(1.4, 1.3), "J": Rule(4.0, 1.3)}
_PACK_OPTIONS = {"z": "--gzip", "j": "--bzip2", "J": "--xz"}


def _packs(arguments: Sequence[str], letter: str) -> bool:
    return _PACK_OPTIONS[letter] in arguments or letter in _tar_mode(arguments).lstrip("-")


def _tar_mode(arguments: Sequence[str]) -> str:
    """Return the argument of tar that contains its mode, such as ``-xzf``; empty if there is none.
    Only the first argument may lack its dash."""
    dashed = [word for n, word in enumerate(arguments) if n == 0 or word.startswith("-")]
    return next((word for word in dashed if _TAR_MODE.fullmatch(word)), "")


_TEST_SOURCES = (".py", ".js", ".ts", ".jsx", ".tsx", ".rb", ".php", ".go", ".java", ".kt")

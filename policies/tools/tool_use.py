"""Summarises a turn's tool calls by the call that is expected to take longest."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from tiered_kv.policies.base import NO_TOOL, Rule, ToolUse

from .calls import ToolCall, name_parts
from .duration_rules import AT_ONCE, OVERHEAD_S, tool_rule
from .known_commands import known_command, split_command
from .shell import Script, Segment, take_apart
from .wrappers import LONGEST_S

UNKNOWN_S = 0.5
"""Assumed duration of an unknown command or tool, for comparison with known ones, seconds."""

SHELL = "bash"
"""Name under which the tools of all shells are recorded, whatever an agent calls them."""

_MAX_COMMAND_CHARS = 2_000
_MAX_PART_CHARS = 80
_MAX_MASKED_WORDS = 8


def tool_use(calls: Sequence[ToolCall]) -> ToolUse:
    """Summarise calls that run concurrently by the slowest of them, with the largest time bounds of
    all calls. Returns ``NO_TOOL`` if there are no calls."""
    if not calls:
        return NO_TOOL
    uses = [_use(call) for call in calls]
    slowest = max(uses, key=_weight)
    return replace(
        slowest,
        least_s=max(use.least_s for use in uses),
        most_s=max(use.most_s for use in uses),
    )


def _weight(use: ToolUse) -> float:
    """Return the expected duration of a call, seconds."""
    median_s = use.rule.median_s if use.rule else UNKNOWN_S
    return min(max(median_s, use.least_s), use.most_s)


def _use(call: ToolCall) -> ToolUse:
    if call.command:
        return _shell_use(call.command, call.arguments)
    parts = name_parts(call.name)
    name = call.name[:_MAX_PART_CHARS]
    kind = _kind(call.arguments)
    path = (name, f"{name} {kind}") if kind else (name,)
    if {"wait", "sleep"} & {*parts, kind}:
        waited = _waited(call.arguments)
        if waited is not None:
            return ToolUse(path, rule=Rule(max(waited, 0.1), 0.1), least_s=waited, most_s=waited)
    return ToolUse(path, rule=tool_rule(parts))


_KIND_KEYS = ("command", "action", "operation", "method", "mode", "subagent_type")
_KIND = re.compile(r"[\w.-]{1,32}")


def _kind(arguments: Mapping[str, object]) -> str:
    """Return the action of a tool such as an editor or a browser, which is an argument of one word;
    empty if there is none."""
    for key in _KIND_KEYS:
        value = arguments.get(key)
        if isinstance(value, str) and _KIND.fullmatch(value):
            return value
    return ""


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return min(number, LONGEST_S) if number >= 0 else None


def _waited(arguments: Mapping[str, object]) -> float | None:
    """Return how long a tool is asked to wait, seconds; None if unknown."""
    for key, unit_s in (("seconds", 1.0), ("duration", 1.0), ("time", 1.0), ("ms", 1e-3)):
        number = _number(arguments.get(key))
        if number is not None:
            return number * unit_s
    return None


_MORE_THAN_SECONDS = 10_000
"""Smallest timeout that is interpreted as milliseconds, the unit of Claude Code. No tool waits
10,000 seconds (almost three hours)."""


def _limit_s(arguments: Mapping[str, object]) -> float:
    """Return the time limit that a call's arguments set for its command, seconds; infinite without
    one."""
    limit_s = math.inf
    for key in ("timeout_ms", "yield_time_ms", "timeout", "timeout_s", "timeout_seconds"):
        number = _number(arguments.get(key))
        if number:
            in_ms = key.endswith("_ms") or number >= _MORE_THAN_SECONDS
            limit_s = min(limit_s, number / 1e3 if in_ms else number)
    return limit_s


def _returns_at_once(arguments: Mapping[str, object]) -> bool:
    keys = ("run_in_background", "is_background", "background")
    return any(arguments.get(key) in (True, "true", "True") for key in keys)


def _shell_use(command: str, arguments: Mapping[str, object]) -> ToolUse:
    shown = command[:_MAX_COMMAND_CHARS]
    script = take_apart(command)
    if _returns_at_once(arguments) or not script.segments:
        return ToolUse((SHELL, "(at once)"), shown, AT_ONCE)
    slowest, rule = _slowest(script)
    name = known_command(slowest.words).name
    if slowest.times > 1:
        name += " (repeated)"
    limit_s = _limit_s(arguments)
    return ToolUse(
        path=(SHELL, name[:_MAX_PART_CHARS], masked(slowest.words)),
        command=shown,
        rule=rule,
        least_s=min(script.least_s, limit_s),
        most_s=min(script.most_s, limit_s),
    )


def _slowest(script: Script) -> tuple[Segment, Rule | None]:
    """Return the segment that takes longest, and a rule for the duration of the whole script, whose
    segments run one after another. The rule is None if the duration of that segment is unknown."""
    slowest, slowest_s, total_s = script.segments[0], -1.0, OVERHEAD_S
    for segment in script.segments:
        rule = known_command(segment.words).rule
        once_s = (rule.median_s if rule else UNKNOWN_S) - OVERHEAD_S
        if segment.sleep_s is not None:
            once_s = segment.sleep_s
        seconds = min(once_s * segment.times, segment.most_s)
        total_s += seconds
        if seconds > slowest_s:
            slowest, slowest_s = segment, seconds
    rule = known_command(slowest.words).rule
    if slowest.sleep_s is not None:
        return slowest, Rule(total_s, 0.1)
    return slowest, Rule(total_s, rule.sigma) if rule else None


_NUMBER = re.compile(r"[+-]?\d[\d.,:%]*[kKMGsmhd]?")
_EXTENSION = re.compile(r".*\.\w{1,5}")
_DIGITS = re.compile(r"\d+")


def _mask(word: str) -> str:
    """Return a placeholder for an argument's type, such as ``<path>``. Names of options are
    kept."""
    if word.startswith("-"):
        return _DIGITS.sub("<n>", word.partition("=")[0])[:24]
    if _NUMBER.fullmatch(word):
        return "<n>"
    if "://" in word[:16] or word.startswith("git@"):
        return "<url>"
    if len(word) > 200 or any(c in word for c in " \t\n'\"(){}|^"):
        return "<text>"
    if "::" in word:
        return "<path>::<name>"
    is_path = "/" in word or word in (".", "..", "~") or "*" in word or _EXTENSION.fullmatch(word)
    return "<path>" if is_path else "<text>"


def masked(words: Sequence[str]) -> str:
    """Return a command in which the parts that are specific to one call are masked. The name of a
    script is kept, because it is the program that runs.

    Args:
        words: words of the command, at least one, as in ``Segment.words``.
    """
    name, arguments = split_command(words)
    parts = [name]
    if name.endswith(" <path>") and arguments:
        parts = [name.removesuffix(" <path>"), arguments[0].rpartition("/")[2][:40]]
        arguments = arguments[1:]
    for word in arguments[:_MAX_MASKED_WORDS]:
        part = _mask(word)
        if part != parts[-1]:
            parts.append(part)
    return " ".join(parts)[:_MAX_PART_CHARS]

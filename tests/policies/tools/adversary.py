"""Adversarial text for parsers, and a measure of how long they take to read it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from hypothesis import strategies as st

MAX_PASSES = 8.0
"""Limit of ``passes``: 8 ms for 1,000 tokens if one character takes 250 ns. The worst text found so
far took 4.3."""

_ROUNDS = 5
_YARD = 4000
_CHARACTER = re.compile(".", re.DOTALL)

BAR, SPACE = "\uff5c", "\u2581"

MARKERS = [
    "<tool_call>", "</tool_call>", "<function=bash>", "</function>", "<parameter=command>",
    "</parameter>", "<invoke name=\"bash\">", "</invoke>", "<parameter name=\"command\">",
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]",
    f"<{BAR}tool{SPACE}call{SPACE}begin{BAR}>", f"<{BAR}tool{SPACE}sep{BAR}>",
    f"<{BAR}tool{SPACE}call{SPACE}end{BAR}>", f"<{BAR}DSML{BAR}invoke name=\"x\">",
    "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>", "functions.bash:0",
    "<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "to=functions.bash ",
    "<|python_tag|>", "<|python_start|>", "<|eom_id|>", "```bash\n", "```json\n", "\n```",
    "<think>", "</think>", "[THINK]", "[/THINK]",
    '{"name": "bash", "arguments": {"command": "ls"}}',
    '{"name": "', '"command": "', "[bash(command=", "\\", "\\\"", "\"", "'", "{", "}", "[", "]",
    "(", ")", ",", ";", " ", "\n",
]  # fmt: skip

SHELL = [
    "$(", "`", "${", ")", "(", "{", "}", "'", '"', "\\", "\\\n", "\n", ";", ";;", "&", "&&", "|",
    "||", "|&", "<<EOF\n", "<<-'EOF'\n", "EOF\n", "<<<", ">", "2>&1", "<(", "((", "))", "[[ ", "]]",
    "for i in 1 2 3; do ", "while true; do ", "; done", "if ", "; then ", "; else ", "; fi",
    "case ", " in ", "esac", "sleep 3 ", "sleep ", "timeout 5 ", "timeout ",
    "bash -c '", "bash -lc \"",
    "sudo ", "env A=b ", "xargs -n1 ", "python -m ", "python -c ", "eval ", "git -C ", "make ",
    "A=b ", "a=(", "#", " ", "\t", "{1..99999}", "!", "wait ", "tar -", "find / -exec ", "\\;",
    "1e309", "9" * 40, "x" * 200,
]  # fmt: skip


def soups(pieces: list[str]) -> st.SearchStrategy[str]:
    """Return a strategy for texts that mix ``pieces`` with arbitrary text in any order, often with
    many repetitions."""
    piece = st.sampled_from(pieces) | st.text(max_size=12)
    once = st.lists(piece, max_size=60).map("".join)
    again = st.builds(
        lambda unit, times: "".join(unit) * times,
        st.lists(piece, min_size=1, max_size=4),
        st.integers(1, 2000),
    )
    return once | st.builds("".join, st.tuples(once, again, once))


def passes(read: Callable[[str], object], text: str) -> float:
    """Return the CPU time of one ``read`` of ``text``, in units of the time to split it into
    characters.

    The result is the best of several rounds. Each round times its own split, because a slow machine
    slows both. A short text counts as one of 1,000 tokens.
    """
    chars = max(len(text), _YARD)
    best = float("inf")
    for _ in range(_ROUNDS):
        yard_s = min(_cpu_s(_take_apart_by_characters, "x" * _YARD) for _ in range(3))
        best = min(best, _cpu_s(read, text) / (yard_s * chars / _YARD))
        if best < MAX_PASSES:
            break
    return best


def _take_apart_by_characters(text: str) -> list[str]:
    pieces = []
    position = 0
    while match := _CHARACTER.match(text, position):
        position = match.end()
        pieces.append(match[0])
    return pieces


def _cpu_s(read: Callable[[str], object], text: str) -> float:
    began = time.thread_time()
    read(text)
    return time.thread_time() - began

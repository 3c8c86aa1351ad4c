"""Text to break readers with, and how long they take over it."""

from __future__ import annotations

import time
from collections.abc import Callable

from hypothesis import strategies as st

CHARS_PER_TOKEN = 4
MS_PER_1000_TOKENS = 5.0
_ROUNDS = 5

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
    """Texts of these pieces and of others, in any order, often the same ones over and over."""
    piece = st.sampled_from(pieces) | st.text(max_size=12)
    once = st.lists(piece, max_size=60).map("".join)
    again = st.builds(
        lambda unit, times: "".join(unit) * times,
        st.lists(piece, min_size=1, max_size=4),
        st.integers(1, 2000),
    )
    return once | st.builds("".join, st.tuples(once, again, once))


def milliseconds(read: Callable[[str], object], text: str) -> float:
    """CPU time of this thread, the best of some rounds: what it costs when nothing else runs."""
    best = float("inf")
    for _ in range(_ROUNDS):
        began = time.thread_time()
        read(text)
        best = min(best, time.thread_time() - began)
        if best * 1e3 < allowed_ms(text):
            break
    return best * 1e3


def allowed_ms(text: str) -> float:
    return MS_PER_1000_TOKENS * max(1.0, len(text) / CHARS_PER_TOKEN / 1000)

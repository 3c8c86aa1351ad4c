"""Tool calls parsed from the end of a turn's answer, in any model's format."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from .formats import BARE, HARMONY, MARKED, Format

MAX_CHARS = 1 << 16
"""Maximum number of characters that are parsed, from the end of a text."""

_MAX_COMMAND_CHARS = 1 << 14


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call.

    Attributes:
        name: name of the tool.
        arguments: arguments as the model wrote them; values are of any JSON type.
        command: shell command if the tool is a shell; empty otherwise.
    """

    name: str
    arguments: Mapping[str, object] = field(default_factory=dict)
    command: str = ""


def read_tool_calls(text: str) -> tuple[ToolCall, ...]:
    """Return the tool calls in an answer, in order; empty if there are none.

    Calls inside a thinking block are ignored. Takes linear time. Never raises.

    Args:
        text: the answer or its end, including special tokens.
    """
    return find_calls(after_thinking(text))


def find_calls(text: str) -> tuple[ToolCall, ...]:
    """Parse the calls in a text without thinking blocks. The first format in which calls are found
    is used."""
    for style in _candidates(text):
        calls = tuple(tool_call(*call) for call in style.read(text))
        if calls:
            return calls
    return ()


def _candidates(text: str) -> Iterator[Format]:
    """Yield the formats in which the text may contain calls, likeliest first.

    A format whose marker occurs earlier is likelier, because later markers may be part of that
    call's arguments.
    """
    if "<|message|>" in text:
        yield HARMONY
    found = [(match.start(), n) for n, p in enumerate(_BEGINS) if (match := p.search(text))]
    for _, index in sorted(found):
        yield MARKED[index]
    yield from BARE


_BEGINS = [re.compile(style.begin) for style in MARKED]

# Markers of the chat templates. gpt-oss ends a message with <|end|>; <|start|> begins the next.
_THINK = r"[\w|:]{0,12}think[\w|:]{0,12}>"
_OPEN = rf"<{_THINK}|<(?:reasoning|thought)>|\[THINK\]|<\|START_THINKING\|>|◁think▷"
_OPEN += r"|<\|begin_of_thought\|>|<\|channel>thought|<\|channel\|>analysis<\|message\|>"
_CLOSE = rf"</{_THINK}|</(?:reasoning|thought)>|\[/THINK\]|<\|END_THINKING\|>|◁/think▷"
_CLOSE += r"|<\|end_of_thought\|>|<channel\|>|<\|end\|>(?=<\|start\|>)"
_MARKS = re.compile(
    f"(?P<open>{_OPEN})|(?P<close>{_CLOSE})"
    f"|(?P<begin>{'|'.join(s.begin for s in (*MARKED, *BARE))})"
    f"|(?P<end>{'|'.join(s.end for s in (*MARKED, *BARE))})"
)


def after_thinking(text: str) -> str:
    """Return the part of an answer after its last thinking block.

    A block may have started before the text. A block without an end extends to the end of the text.
    A marker inside a call belongs to the call's arguments, because agents also edit chat templates.
    """
    text = text[-MAX_CHARS:]
    answer = (0, len(text))
    if_outside: tuple[int, int] | None = None  # the answer if the marker is no argument after all
    in_call = False
    for mark in _MARKS.finditer(text):
        kind = mark.lastgroup
        if kind == "end":
            if_outside, in_call = None, False
        elif kind == "begin":
            answer, if_outside, in_call = if_outside or answer, None, True
        else:
            start, stop = if_outside or answer
            cut = (mark.end(), len(text)) if kind == "close" else (start, min(stop, mark.start()))
            if in_call:
                if_outside = cut
            else:
                answer = cut
    start, stop = if_outside or answer
    return text[start:stop]


_SHELLS = frozenset({"bash", "shell", "sh", "zsh", "terminal", "powershell"})
_RUN = frozenset({"run", "exec", "execute", "command", "commands", "cmd", "tool", "in", "local"})
_NAME_PART = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+")
_COMMAND_KEYS = ("command", "cmd", "commands", "script", "code", "input")


def name_parts(name: str) -> list[str]:
    """Return the words of a tool's name in lower case: ``run`` and ``command`` for ``run_command``
    or ``RunCommand``. The part before the last ``.``, ``/``, ``:`` or ``__`` is a server or a
    namespace, and is dropped."""
    last = re.split(r"[./:]|__", name)[-1]
    return [part.lower() for part in _NAME_PART.findall(last)]


def tool_call(name: str, arguments: Mapping[str, object]) -> ToolCall:
    """Create a call. If the tool is a shell, extract its command."""
    parts = set(name_parts(name))
    if not (parts & _SHELLS or (parts and parts <= _RUN)):
        return ToolCall(name, arguments)
    given = next((arguments[key] for key in _COMMAND_KEYS if key in arguments), None)
    return ToolCall(name, arguments, _as_command(given)[:_MAX_COMMAND_CHARS])


def _as_command(given: object) -> str:
    """Return the argument of a shell tool as one command line; empty if it is not a command. Codex
    passes a list of words."""
    if isinstance(given, str):
        return given.strip()
    if not isinstance(given, list) or not all(isinstance(word, str) for word in given):
        return ""
    return given[0].strip() if len(given) == 1 else shlex.join(given)

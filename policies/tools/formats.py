"""Formats in which models write tool calls, and a reader of each format.

The formats come from the models' chat templates. Every reader scans the text once, from left to
right, skips what it cannot parse, and never raises.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from .pythonic import read_calls

MAX_CALLS = 32
"""Maximum number of calls read from one answer. More calls indicate a model in a loop."""

_JSON = json.JSONDecoder(strict=False)
_BLANK = re.compile(r"\s*")
_NAME = re.compile(r"[\w./:-]{1,128}")
_TEXTS = re.compile(r'"(\w{1,64})"\s*:\s*"((?:[^"\\]|\\.)*)', re.DOTALL)


class RawCall(NamedTuple):
    """A tool call before its shell command is extracted."""

    name: str
    arguments: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Format:
    """A format of tool calls.

    Attributes:
        name: name of the format in vLLM's ``--tool-call-parser``, if it has one.
        begin, end: regular expressions of the markers at both ends of a call.
        read: function that yields the calls in a text.
    """

    name: str
    begin: str
    end: str
    read: Callable[[str], Iterator[RawCall]]


def _json_at(text: str, start: int) -> tuple[object, int] | None:
    """Parse the JSON object or list at ``start``, which white space may precede. Returns the value
    and its end; None if there is no complete value."""
    start = _BLANK.match(text, start).end()  # type: ignore[union-attr]  # always matches
    if not text.startswith(("{", "["), start):
        return None
    try:
        return _JSON.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None


def _as_arguments(value: object) -> Mapping[str, object]:
    """Return the arguments of a call, which may be JSON inside a JSON string; empty if they are
    malformed."""
    if isinstance(value, str):
        read = _json_at(value, 0)
        value = read[0] if read else {}
    return value if isinstance(value, dict) else {}


def _calls_of(value: object) -> Iterator[RawCall]:
    """Yield the calls in a JSON object or in a list of objects, whose field names depend on the
    model."""
    for one in value if isinstance(value, list) else [value]:
        if isinstance(one, dict) and isinstance(one.get("function"), dict):
            one = one["function"]
        if not isinstance(one, dict):
            continue
        name = next((one[key] for key in ("name", "tool_name", "function") if key in one), None)
        keys = ("arguments", "parameters", "args", "input")
        arguments: object = next((one[key] for key in keys if key in one), {})
        if isinstance(name, str) and _NAME.fullmatch(name):
            yield RawCall(name, _as_arguments(arguments))


def _named(name: str, body: str) -> RawCall:
    """Create a call whose name precedes the JSON of its arguments. If the JSON is broken, only its
    strings are kept."""
    read = _json_at(body, 0)
    if read:
        return RawCall(name, _as_arguments(read[0]))
    return RawCall(name, {key: _unescaped(value) for key, value in _TEXTS.findall(body)})


def _salvaged(body: str) -> Iterator[RawCall]:
    """Yield the call in a truncated or broken JSON object, if its name can be read. Of its
    arguments, only strings are kept."""
    texts = dict(_TEXTS.findall(body)) if body.lstrip().startswith(("{", "[")) else {}
    name = texts.pop("name", "")
    if _NAME.fullmatch(name):
        yield RawCall(name, {key: _unescaped(value) for key, value in texts.items()})


def _unescaped(text: str) -> str:
    return text.replace("\\n", "\n").replace('\\"', '"')


def _json_after(text: str, begin: str) -> Iterator[RawCall]:
    """Yield the calls in the JSON after each ``begin`` marker. The JSON parser finds the end of a
    call, because the marker may also occur in an argument."""
    position = 0
    for _ in range(MAX_CALLS):
        start = text.find(begin, position)
        if start < 0:
            return
        position = start + len(begin)
        read = _json_at(text, position)
        if read:
            value, position = read
            yield from _calls_of(value)
            continue
        following = text.find(begin, position)
        yield from _salvaged(text[position : following if following >= 0 else len(text)])


def _between(text: str, begin: str, end: str) -> Iterator[str]:
    """Yield the text after each ``begin``, up to the next ``end`` or the end of the text."""
    position = 0
    for _ in range(MAX_CALLS):
        start = text.find(begin, position)
        if start < 0:
            return
        start += len(begin)
        found = text.find(end, start)
        position = found if found >= 0 else len(text)
        yield text[start:position]


def _read_hermes(text: str) -> Iterator[RawCall]:
    """Read the format of Hermes, Qwen 2.5 and 3:
    ``<tool_call>{"name": …, "arguments": …}</tool_call>``."""
    yield from _json_after(text, "<tool_call>")


def _read_function_tags(text: str) -> Iterator[RawCall]:
    """Read the format of SWE-agent and Qwen3-coder,
    ``<function=f><parameter=k>v</parameter></function>``, and the format of Llama 3.1, which has
    JSON inside the function tag."""
    for block in _between(text, "<function=", "</function>"):
        name, _, body = block.partition(">")
        if not _NAME.fullmatch(name.strip()):
            continue
        if body.lstrip().startswith("{"):
            yield _named(name.strip(), body)
            continue
        arguments = {}
        for parameter in _between(body, "<parameter=", "</parameter>"):
            key, _, value = parameter.partition(">")
            arguments[key.strip()] = value.strip("\n")
        yield RawCall(name.strip(), arguments)


# DeepSeek's vertical bar and space are not the usual characters.
_DSML = "\uff5cDSML\uff5c"
_DEEPSEEK_BEGIN = "<\uff5ctool\u2581call\u2581begin\uff5c>"
_DEEPSEEK_SEPARATOR = "<\uff5ctool\u2581sep\uff5c>"
_DEEPSEEK_END = "<\uff5ctool\u2581call\u2581end\uff5c>"

_ATTRIBUTE = re.compile(r"""\s*["']?([\w./:-]{1,128})""")


def _read_invokes(text: str) -> Iterator[RawCall]:
    """Read the format of MiniMax-M2,
    ``<invoke name="f"><parameter name="k">v</parameter></invoke>``, and the format of DeepSeek
    V3.2, which adds a prefix to every tag."""
    for block in _between(text.replace(_DSML, ""), "<invoke name=", "</invoke>"):
        name = _ATTRIBUTE.match(block)
        if not name:
            continue
        arguments = {}
        for parameter in _between(block, "<parameter name=", "</parameter>"):
            key = _ATTRIBUTE.match(parameter)
            if key:
                arguments[key[1]] = parameter.partition(">")[2].strip("\n")
        yield RawCall(name[1], arguments)


def _read_glm(text: str) -> Iterator[RawCall]:
    """Read the format of GLM-4.5 and later:
    ``<tool_call>f<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>``."""
    for block in _between(text, "<tool_call>", "</tool_call>"):
        name = block.partition("<arg_key>")[0].strip()
        if not _NAME.fullmatch(name):
            continue
        arguments = {}
        for pair in _between(block, "<arg_key>", "</arg_value>"):
            key, _, value = pair.partition("</arg_key>")
            arguments[key.strip()] = value.partition("<arg_value>")[2].strip("\n")
        yield RawCall(name, arguments)


def _read_deepseek(text: str) -> Iterator[RawCall]:
    """Read the formats of DeepSeek: V3 writes ``type<sep>name`` and a JSON code block, V3.1 writes
    ``name<sep>`` and the JSON."""
    for block in _between(text, _DEEPSEEK_BEGIN, _DEEPSEEK_END):
        head, _, rest = block.partition(_DEEPSEEK_SEPARATOR)
        before, fence, body = rest.partition("```json")
        name, body = (before, body) if fence else (head, rest)
        if _NAME.fullmatch(name.strip()):
            yield _named(name.strip(), body)


def _read_kimi(text: str) -> Iterator[RawCall]:
    """Read the format of Kimi-K2, in which ``functions.name:index`` precedes the JSON of each
    call."""
    for block in _between(text, "<|tool_call_begin|>", "<|tool_call_end|>"):
        head, _, body = block.partition("<|tool_call_argument_begin|>")
        name = re.sub(r":\d+\Z", "", head.strip()).removeprefix("functions.")
        if _NAME.fullmatch(name):
            yield _named(name, body)


_MISTRAL_HEAD = re.compile(r"\s*([\w./:-]{1,128})\s*(?:\[CALL_ID\]\w{0,64})?(?:\[ARGS\])?")


def _read_mistral(text: str) -> Iterator[RawCall]:
    """Read the formats of Mistral: ``[TOOL_CALLS]`` and a JSON list, or, since tokenizer v11,
    ``[TOOL_CALLS]name[ARGS]{…}``."""
    for block in _between(text, "[TOOL_CALLS]", "[TOOL_CALLS]"):
        read = _json_at(block, 0)
        head = _MISTRAL_HEAD.match(block)
        if read:
            yield from _calls_of(read[0])
        elif not head:
            yield from _salvaged(block)
        else:
            yield _named(head[1], block[head.end() :])


_HARMONY_TO = re.compile(r"\bto=([^\s<]{1,128})")


def _read_harmony(text: str) -> Iterator[RawCall]:
    """Read the format of gpt-oss, in which every message to a tool is a call, whatever its
    channel."""
    for message in re.split(r"<\|(?:start|end|call|return)\|>", text)[-MAX_CALLS:]:
        head, marker, body = message.partition("<|message|>")
        to = _HARMONY_TO.search(head) if marker else None
        if not to or to[1] in ("user", "assistant", "all"):
            continue
        name = to[1].removeprefix("functions.")
        yield _named(name, body) if body.lstrip()[:1] == "{" else RawCall(name, {"code": body})


_AFTER_ALL = re.compile(r"(?:\s|<\|[^<>|]{1,40}\|>|</s>)*\Z")


def _read_json(text: str) -> Iterator[RawCall]:
    """Read the format of Llama 3: JSON objects separated by ``;``, with or without
    ``<|python_tag|>`` before them. Without the tag, JSON that is followed by text is no call."""
    _, tag, body = text.rpartition("<|python_tag|>")
    position, found = 0, list[RawCall]()
    for _ in range(MAX_CALLS):
        read = _json_at(body, position)
        if not read:
            break
        value, position = read
        if isinstance(value, dict) and len(value) > 1:
            found += _calls_of(value)
        while body.startswith((";", " ", "\n"), position):
            position += 1
    # JSON followed by text is an answer that contains JSON.
    if tag or _AFTER_ALL.match(body, position):
        yield from found


_PYTHON_TAG = re.compile(r"<\|python_(?:tag|start)\|>")


def _read_pythonic(text: str) -> Iterator[RawCall]:
    """Read the format of Llama 3.2 and 4: ``[f(a=1), g(b="x")]``, or ``f.call(a=1)`` for the
    model's own tools."""
    *before, body = _PYTHON_TAG.split(text)
    body = body.strip()
    if not before and not body.startswith("["):
        return
    calls, end = read_calls(body, MAX_CALLS)
    if before or _AFTER_ALL.match(body, end):
        for name, arguments in calls:
            yield RawCall(name.removesuffix(".call"), arguments)


_FENCE_BEGIN = r"```(?:mswea_bash_command|bash|shell|sh)[ \t]*\n"
_FENCE = re.compile(rf"{_FENCE_BEGIN}(.*?)(?:\n```|\Z)", re.DOTALL)


def _read_fence(text: str) -> Iterator[RawCall]:
    """Read the format of mini-swe-agent: a single fenced code block is a shell command. Several
    code blocks are examples in a chat, not calls."""
    found = _FENCE.findall(text)
    if len(found) == 1:
        yield RawCall("bash", {"command": found[0]})


HARMONY = Format("openai", r"<\|message\|>", r"<\|call\|>", _read_harmony)

MARKED = (
    Format("kimi_k2", r"<\|tool_call_begin\|>", r"<\|tool_call_end\|>", _read_kimi),
    Format("deepseek_v3", _DEEPSEEK_BEGIN, _DEEPSEEK_END, _read_deepseek),
    Format("minimax_m2", f"<(?:{_DSML})?invoke name=", f"</(?:{_DSML})?invoke>", _read_invokes),
    Format("hermes", "<tool_call>", "</tool_call>", _read_hermes),
    Format("glm45", "<tool_call>", "</tool_call>", _read_glm),
    Format("qwen3_coder", "<function=", "</function>", _read_function_tags),
    Format("mistral", r"\[TOOL_CALLS\]", r"</s>", _read_mistral),
)
"""Formats whose marker always introduces a call."""

BARE = (
    Format("llama3_json", r"<\|python_tag\|>", r"<\|eom_id\|>", _read_json),
    Format("pythonic", r"<\|python_start\|>", r"<\|python_end\|>", _read_pythonic),
    Format("mini-swe-agent", _FENCE_BEGIN, r"\n```", _read_fence),
)
"""Formats that other text may resemble. They are tried only if no other format yields calls."""

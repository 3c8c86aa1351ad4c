"""KV hints: requests of clients and routers to do something with a job's KV. Input is untrusted.

A hint names an intent and a target. The engine chooses whether to carry it out, and every hint ends
with an outcome and its reason. No hint changes an answer.

A message contains a list of actions, one for each hint. ``HintReader`` reads the message format
that vLLM and SGLang share, in which an object (the envelope) adds a protocol version and a message
id to the list, and reads bare lists too. An action that cannot be read is rejected, and never
raises an error. ``read_request`` reads all hints of a request. ``stated`` runs in the API server,
and reads the body fields that vLLM drops. The middleware adds the result of ``stated`` to the
request.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, NamedTuple

from tiered_kv.json_fields import cut, flag, mapping, plain_text, read_json, real, said
from tiered_kv.status import Cursor

from .identity import AGENTIC_CONTEXT, identify, opened

MAX_ACTIONS = 64
"""Maximum number of actions in a request, or in a call of ``POST /tiered_kv/hints``."""
MAX_TOKENS, MAX_HASHES = 1 << 18, 1 << 14
"""Maximum number of token ids, and of block hashes, in all actions of a request or call."""
MAX_MESSAGE_CHARS = 2 << 20
"""Maximum length of a message that is JSON in a string, characters."""
MAX_ID_BYTES = 128
"""Maximum length of an ``action_id`` in JSON, bytes. A longer id is shortened."""
MAX_SECONDS = 1e9
"""Maximum duration that is read, seconds. The engine keeps nothing for that long."""


class Intent(StrEnum):
    """The action that a hint requests."""

    RETAIN = "retain"
    """Keep the pages longer than their forecast alone would, for a limited time."""
    PIN = "pin"
    """Keep the blocks in VRAM for a limited time, within the pin budget."""
    PREFETCH = "prefetch"
    """Promote the pages to CPU memory now."""
    DEMOTE = "demote"
    """Move the pages to a tier below CPU memory now."""
    RELEASE = "release"
    """The job is over. Delete the pages that it shares with no other job, in every tier."""
    REVISE = "revise"
    """The tool that runs in the job's gap has made progress, or has ended."""


class Outcome(StrEnum):
    """The outcome of a hint."""

    ACCEPTED = "accepted"
    CLIPPED = "clipped"
    """The hint is carried out in part, or for a shorter time."""
    DEFERRED = "deferred"
    """The hint is carried out later, when the job's running turn or a copy has ended."""
    REJECTED = "rejected"
    MISSING = "missing"
    """The job or the pages do not exist in the caller's scope or on this engine, or the hint
    revises the gap of a job that is not between turns."""


@dataclass(frozen=True, slots=True)
class Target:
    """The jobs or pages that a hint concerns, given in exactly one of these ways.

    Attributes:
        job: id of a job in the caller's scope.
        number: number of a job in any scope, from ``/tiered_kv/jobs``. Only operators may use it.
        tokens: token ids from the start of a context.
        hashes: block hashes, each of which covers all tokens up to the end of its block. A hash of
            8 bytes may be the end of a longer hash, because vLLM's KV events may shorten hashes.
        own: True if the target is the job of the request that carries the hint.
    """

    job: str | None = None
    number: int | None = None
    tokens: tuple[int, ...] = ()
    hashes: tuple[bytes, ...] = ()
    own: bool = False


@dataclass(frozen=True, slots=True)
class KvHint:
    """A hint that can be carried out.

    Attributes:
        action_id: the sender's name for the hint.
        ttl_s: time that a retention or a pin lasts, seconds; None for the default.
        priority: relative priority of a retention, -1 to 1.
        expected_s: seconds until the job's tool finishes, for ``REVISE``; None if unknown.
        progress: completed fraction of the tool's work, for ``REVISE``; None if unknown.
        done: True if the tool has finished, for ``REVISE``.
        note: a warning for the sender, which the result's reason repeats.
    """

    action_id: str
    intent: Intent
    target: Target
    ttl_s: float | None = None
    priority: float = 0.0
    expected_s: float | None = None
    progress: float | None = None
    done: bool = False
    note: str = ""


@dataclass(frozen=True, slots=True)
class HintResult:
    """The result of a hint.

    Attributes:
        action_id: the sender's name for the hint.
        intent: intent of the hint; None if it could not be read.
        reason: one sentence for the sender, which contains nothing from other scopes.
        pages: number of pages, or of pinned blocks, that the hint concerned.
        until_s: time that a retention or a pin still lasts, seconds; None for other intents.
    """

    action_id: str
    intent: Intent | None
    outcome: Outcome
    reason: str = ""
    pages: int = 0
    until_s: float | None = None


# -- messages -----------------------------------------------------------------------------

_INTENTS = {
    **{intent.value: intent for intent in Intent},
    "fetch": Intent.PREFETCH,  # vLLM's name. The engine finds the tier itself
    "evict": Intent.RELEASE,  # drafts of vLLM and Dynamo
    "deref": Intent.RELEASE,  # SGLang's draft
}
_VERSIONS = (None, "", "0.1", "1.0")
_ENVELOPE = ("protocol_version", "message_id", "actions")
_ACTION = ("action_id", "action_type", "action_version", "payload")
_OWN = Target(own=True)
_DURATION = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?(ms|s|m|h|d)?")
_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_HASH = re.compile(r"(?P<number>[0-9]{1,20})|(?:0x|hex:)?(?P<digits>(?:[0-9a-fA-F]{2}){8,64})")


class HintReader:
    """Reads the messages of one request, or of one call of ``POST /tiered_kv/hints``. Never raises.

    Args:
        engine: index of this engine for a call of the route; None for a request. A hint that was
            sent to the route may name a job by its number, and must name a target. A hint in a
            request without a target concerns the job of that request.

    Attributes:
        found: for each action, in order, the hint if it can be carried out, otherwise the result.
    """

    def __init__(self, engine: int | None = None) -> None:
        self.found: list[KvHint | HintResult] = []
        self._engine = engine
        self._left, self._tokens, self._hashes = MAX_ACTIONS, MAX_TOKENS, MAX_HASHES

    @property
    def hints(self) -> tuple[KvHint, ...]:
        """The hints that can be carried out, in the order of the actions."""
        return tuple(one for one in self.found if isinstance(one, KvHint))

    @property
    def answered(self) -> tuple[HintResult, ...]:
        """The results of the actions that cannot be carried out, in the order of the actions."""
        return tuple(one for one in self.found if isinstance(one, HintResult))

    def add(self, message: object) -> None:
        """Read a message and add its actions to ``found``. The message is an envelope, a list of
        actions, one action, or the JSON of one of these in a string."""
        try:
            version, actions = _opened(message)
        except ValueError as error:
            version, actions = None, [error]
        note = (
            ""
            if version in _VERSIONS
            else "The protocol version is unknown: version 1.0 is assumed."
        )
        for at, action in enumerate(actions):
            self._left -= 1
            if self._left < 0:
                if self._left == -1:  # one result for all other actions
                    self._read(ValueError(f"only the first {MAX_ACTIONS} actions are read"), at, "")
                break
            note = self._read(action, at, note)

    def _read(self, action: object, at: int, note: str) -> str:
        """Read an action, and add its hint or its result to ``found``. Returns the note for the
        next action: ``note`` if this action was rejected, otherwise an empty string."""
        name, intent = f"#{at}", None
        try:
            if isinstance(action, ValueError):
                raise action
            fields = _fields(action, _ACTION)
            name = _action_id(fields.get("action_id")) or name
            kind = fields.get("action_type")
            intent = _INTENTS.get(kind.removeprefix("kv.")) if isinstance(kind, str) else None
            if intent is None:
                raise ValueError(f"action_type is not one of {', '.join(_INTENTS)}")
            payload = fields.get("payload")
            payload = mapping(payload) if payload is not None else fields
            hint = _hint(KvHint(name, intent, self._target(payload), note=note), payload)
            if not note and fields.get("action_version") not in _VERSIONS:
                hint = replace(
                    hint, note=f"This version of {intent} is unknown: version 1.0 is assumed."
                )
            self.found.append(hint)
        except _ElsewhereError as error:
            self.found.append(HintResult(name, intent, Outcome.MISSING, f"{error}."))
        except ValueError as error:
            reason = f"The hint cannot be read: {error}."
            self.found.append(HintResult(name, intent, Outcome.REJECTED, reason))
            return note
        return ""

    def _target(self, payload: Mapping[str, Any]) -> Target:
        if (number := payload.get("number")) is not None:
            return Target(number=self._number(number))
        who = identify(payload, {AGENTIC_CONTEXT: payload})
        if who.job is not None:
            return Target(job=who.job)
        if who.ignored:
            raise ValueError(
                "the job id is empty, too long, reserved, or neither a string nor an integer"
            )
        if (tokens := _first(payload, "token_ids", "tokens")) is not None:
            self._tokens = _left(self._tokens, tokens, "token ids", MAX_TOKENS)
            if set(map(type, tokens)) != {int} or min(tokens) < 0 or max(tokens) >= 1 << 32:
                raise ValueError("token_ids has a value that is not a token id")
            return Target(tokens=tuple(tokens))
        hashes = _first(payload, "block_hashes", "hashes")
        if hashes is not None and payload.get("include_current_request") is not True:
            self._hashes = _left(self._hashes, hashes, "block hashes", MAX_HASHES)
            return Target(hashes=tuple(map(_block_hash, hashes)))
        if self._engine is not None:
            raise ValueError("a job id, a number, token_ids or block_hashes is required")
        return _OWN

    def _number(self, value: object) -> int:
        if self._engine is None:
            raise ValueError("only the routes under /tiered_kv accept a job's number")
        found = job_number(str(value) if type(value) is int else value)
        if found.engine != self._engine:
            raise _ElsewhereError(f"Job {found} is on another engine")
        return found.number

    def retain(self, terms: Mapping[str, object]) -> None:
        """Add one hint to retain the KV of the request's own job, for the longest of the given
        times and with the given priority. Without either, add nothing. Each unusable value adds a
        rejection.

        Args:
            terms: the times, and the priority under the name ``PRIORITY``, by the names of the
                fields that state them.
        """
        ttl_s, longest, priority = None, "", 0.0
        for name, value in terms.items():
            try:
                if name == PRIORITY:
                    priority = _priority(value)
                elif (ttl := seconds(value)) > (ttl_s or 0.0):
                    ttl_s, longest = ttl, name
            except ValueError as error:
                reason = f"The hint cannot be read: {error}."
                self.found.append(HintResult(name, Intent.RETAIN, Outcome.REJECTED, reason))
        if longest or priority:
            name = longest or PRIORITY
            self.found.append(KvHint(name, Intent.RETAIN, _OWN, ttl_s, priority))


def job_number(text: object) -> Cursor:
    """Parse a job's number, written as ``ENGINE.NUMBER``, or as ``NUMBER`` for the first engine.

    Raises:
        ValueError: the text is neither of these.
    """
    try:
        return Cursor.from_json(text if isinstance(text, str) and "." in text else f"0.{text:.20}")
    except (ValueError, TypeError):
        raise ValueError("the number must be a job's number, or ENGINE.NUMBER") from None


class _ElsewhereError(ValueError):
    """The target of a hint belongs to another engine."""


def _opened(message: object) -> tuple[object, Sequence[object]]:
    """Return the protocol version and the actions of a message; the version is None if the message
    has none. Raises ValueError if the message is unusable."""
    if isinstance(message, str):
        if len(message) > MAX_MESSAGE_CHARS:
            raise ValueError(f"the message has more than {MAX_MESSAGE_CHARS} characters")
        try:
            message = read_json(message)
        except ValueError:
            raise ValueError("the message is not JSON") from None
    if isinstance(message, list):
        return None, message
    envelope = _fields(message, _ENVELOPE)
    if envelope.get("actions") is None and envelope.get("action_type") is not None:
        return None, [envelope]
    actions = envelope.get("actions")
    if not isinstance(actions, list):
        raise ValueError("the message has no list of actions")
    return envelope.get("protocol_version"), actions


def _fields(value: object, names: Iterable[str]) -> Mapping[str, Any]:
    """Return the fields of a JSON object, or the fields ``names`` of one of vLLM's structs. Raises
    ValueError if the value is neither."""
    if isinstance(value, Mapping):
        return value
    found = {name: getattr(value, name) for name in names if hasattr(value, name)}
    if not found:
        raise ValueError("it is neither an envelope nor an action")
    return found


def _action_id(value: object) -> str:
    text = str(value) if isinstance(value, str) or type(value) is int else ""
    return plain_text(cut(text, MAX_ID_BYTES))


def _hint(hint: KvHint, payload: Mapping[str, Any]) -> KvHint:
    """Return the hint with the duration and priority, or the progress of the tool, from the
    payload. Raises ValueError if these are unusable."""
    match hint.intent:
        case Intent.RETAIN | Intent.PIN:
            ttl = _first(payload, "ttl_s", "ttl_seconds", "ttl", "duration")
            return replace(
                hint,
                ttl_s=seconds(ttl) if ttl is not None else None,
                priority=_priority(payload.get("priority", 0)),
            )
        case Intent.REVISE:
            expected, progress = payload.get("expected_tool_s"), payload.get("progress")
            done = payload.get("done", False)
            if expected is None and progress is None and not done:
                raise ValueError("revise needs expected_tool_s, progress or done")
            total = real(payload.get("total", 1))
            return replace(
                hint,
                expected_s=real(expected, 0, MAX_SECONDS) if expected is not None else None,
                progress=real(progress, 0, total) / (total or 1) if progress is not None else None,
                done=flag(bool(done) if done in (0, 1) else done),
            )
    return hint


def seconds(value: object) -> float:
    """Return a duration in seconds. It is a number of seconds, or a text such as ``5m``, ``1h`` and
    ``24h``.

    Raises:
        ValueError: the value is not a duration, or not above 0.
    """
    if isinstance(value, str):
        found = _DURATION.fullmatch(value)
        if found is None:
            raise ValueError('a duration must be a number of seconds, or a text such as "5m"')
        value = float(found[1]) * _UNITS[found[2] or "s"]
    found_s = real(value, 0, MAX_SECONDS)
    if not found_s:
        raise ValueError("a duration must be above 0")
    return found_s


def _priority(value: object) -> float:
    """Map a priority of any scale to a number between -1 and 1, which keeps the order and the sign
    of priorities. Raises ValueError if the value is not a number."""
    given = real(value, -MAX_SECONDS, MAX_SECONDS)
    return given / (1 + abs(given))


def _block_hash(value: object) -> bytes:
    """Return a block hash as bytes. Accepts the hash as bytes or hexadecimal digits, or its last 8
    bytes as an integer or a decimal number. Raises ValueError for anything else."""
    if isinstance(value, str) and (found := _HASH.fullmatch(value)) is not None:
        value = int(value) if found["number"] else bytes.fromhex(found["digits"])
    if type(value) is int and -(1 << 63) <= value < 1 << 64:
        return (value & (1 << 64) - 1).to_bytes(8, "big")
    if isinstance(value, bytes) and 8 <= len(value) <= 64:
        return value
    raise ValueError("the block hashes must be numbers or hexadecimal digits")


def _first(payload: Mapping[str, Any], *names: str) -> Any:
    """Return the value of the first of the fields ``names`` that has one; None if none has."""
    return next((payload[name] for name in names if payload.get(name) is not None), None)


def _left(left: int, values: object, what: str, most: int) -> int:
    """Return how many of the ``left`` values that a message may still have remain after ``values``.
    Raises ValueError if ``values`` is not a list, is empty or has more than ``left`` values."""
    if not isinstance(values, list) or not values:
        raise ValueError(f"the {what} must be a list that is not empty")
    if len(values) > left:
        raise ValueError(f"a request may have at most {most} {what}: send the job id instead")
    return left - len(values)


# -- requests -----------------------------------------------------------------------------

CARRIED = "client_hints"
"""Field of ``kv_transfer_params`` in which the middleware passes the result of ``stated`` to the
engine."""
RETENTION = "prompt_cache_retention"
"""Body field of OpenAI's API that requests a longer retention."""
CACHE_CONTROL, PRIORITY = "cache_control", "nvext.agent_hints"
DEFAULT_TTL = "5m"
"""Time that Anthropic's ``cache_control`` requests by default."""

MESSAGE_FIELDS = ("kv_hint", "kv_hints")
"""Fields of ``kv_transfer_params`` and ``vllm_xargs`` that contain a message."""
FIELDS = frozenset({*MESSAGE_FIELDS, CARRIED, AGENTIC_CONTEXT})
"""Fields of ``kv_transfer_params`` and ``vllm_xargs`` that ``read_request`` reads."""
_NVEXT = ("cache_control", "agent_hints")
_TERMS = (CACHE_CONTROL, RETENTION, "nvext.cache_control", PRIORITY)
_ROUTER_TTL = ("kv_retention_ttl_seconds", "kv_retention_ttl")
_SCALAR_CHARS = 32
_MAPPINGS = (dict, Mapping)
"""Types of JSON objects. ``dict`` comes first, because almost all objects are a ``dict``, and the
check for another ``Mapping`` is slow."""


def stated(body: Mapping[str, Any], cache_control: object = None) -> dict[str, object]:
    """Return the values of the body fields that request a retention, by the names of the fields. An
    unusable value is replaced by an empty string. Never raises.

    Args:
        body: top-level fields of the body.
        cache_control: the longest time in the ``cache_control`` fields of Anthropic's API; None
            without such fields.
    """
    nvext = body.get("nvext")
    parts = [nvext.get(name) if isinstance(nvext, dict) else None for name in _NVEXT]
    control, hints = (one if isinstance(one, dict) else None for one in parts)
    terms = (
        cache_control,
        "24h" if body.get(RETENTION) == "24h" else None,
        control.get("ttl", DEFAULT_TTL) if control is not None else None,
        hints.get("priority") if hints is not None else None,
    )
    return {
        name: value if _is_short(value) else ""
        for name, value in zip(_TERMS, terms, strict=True)
        if value is not None
    }


def _is_short(value: object) -> bool:
    if isinstance(value, str):
        return len(value) <= _SCALAR_CHARS
    return isinstance(value, float) or (type(value) is int and abs(value) < 1 << 63)


class RequestHints(NamedTuple):
    """All KV hints of a request.

    Attributes:
        hints: the hints that can be carried out.
        answered: results of the actions that cannot be carried out.
        is_last_step: True if vLLM's router stated that it does not expect the job to return.
    """

    hints: tuple[KvHint, ...] = ()
    answered: tuple[HintResult, ...] = ()
    is_last_step: bool = False


NO_HINTS = RequestHints()
"""Result for a request without KV hints."""


def read_request(envelope: object, params: object, xargs: object) -> RequestHints:
    """Read all hints of a request. Never raises.

    Args:
        envelope: vLLM's ``Request.kv_hints``.
        params: ``kv_transfer_params`` of the request.
        xargs: ``vllm_xargs`` of the request.
    """
    given = (one for one in (params, xargs) if one and isinstance(one, _MAPPINGS))
    sources = [one for one in given if not FIELDS.isdisjoint(one)]
    reader, terms, is_last = HintReader(), dict[str, object](), False
    messages = [source.get(name) for source in sources for name in MESSAGE_FIELDS]
    for message in (envelope, *messages):
        if message is not None:
            reader.add(message)
    for source in sources:
        context = source.get(AGENTIC_CONTEXT)
        context = opened(context) if isinstance(context, str) else context
        if isinstance(context, _MAPPINGS):
            terms |= {name: context[name] for name in _ROUTER_TTL if context.get(name) is not None}
            is_last = is_last or context.get("expected_resume") is False
    carried = params.get(CARRIED) if isinstance(params, _MAPPINGS) else None
    if isinstance(carried, _MAPPINGS):
        terms |= {name: carried[name] for name in _TERMS if carried.get(name) is not None}
    reader.retain(terms)
    return RequestHints(reader.hints, reader.answered, is_last)


# -- answers ------------------------------------------------------------------------------


def results_json(
    results: Iterable[HintResult], hints: Iterable[KvHint] = ()
) -> list[dict[str, object]]:
    """Return results as JSON values.

    Args:
        hints: hints whose notes are put before the reasons of their results, found by
            ``action_id``.
    """
    notes = {hint.action_id: hint.note for hint in hints if hint.note}
    return [
        said(replace(one, reason=f"{notes[one.action_id]} {one.reason}".strip()))
        if one.action_id in notes
        else said(one)
        for one in results
    ]

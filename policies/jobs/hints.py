"""What a client says about a turn, read without trusting it.

A client may say it in four places, read in this order; the first usable value of each name
counts:

1. ``kv_transfer_params`` of the request's body;
2. ``vllm_xargs`` of the body, which vLLM hands on as ``SamplingParams.extra_args``;
3. the request's session, as vLLM knows it (``session_id`` of the body, the header
   ``X-Session-ID``, ``session_id`` of ``vllm_xargs``): a job id, nothing else;
4. ``session_id`` of ``kv_transfer_params``, where the middleware puts a session that vLLM does
   not know: the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

MAX_JOB_ID_CHARS = 512
"""A longer name is a mistake (or an attack): it would be kept for as long as the job."""
MAX_TOOL_NAME_CHARS = 256
MAX_TOOL_COMMAND_CHARS = 16_384
"""About what the end of an answer can hold that is decoded to look for a tool call."""
MAX_EXPECTED_S = 7 * 86_400.0
"""A week: nothing is kept for a gap that long."""
INFERRED_PREFIX = "(inferred) "
"""What names of inferred jobs begin with, and a client's must not."""


@dataclass(frozen=True, slots=True)
class TurnHints:
    """What was said and could be used; None where nothing was.

    Attributes:
        job_id: the job's name.
        is_last_step: True if no turn of this job follows.
        tool_name, tool_command: what runs after this turn.
        expected_s: how long that is expected to take, seconds.
        ignored: how many values could not be used.
    """

    job_id: str | None = None
    is_last_step: bool = False
    tool_name: str | None = None
    tool_command: str | None = None
    expected_s: float | None = None
    ignored: int = 0


def read_hints(
    kv_transfer_params: object, xargs: object = None, session_id: object = None
) -> TurnHints:
    """Read a request's sources; whatever cannot be used is counted, never raised.

    ``job_id`` is a non-empty string of at most 512 characters, or an integer, which is taken as
    its decimal text. ``is_last_step`` is a bool, or 0 or 1 (vLLM turns the booleans of
    ``vllm_xargs`` into numbers). ``tool_name`` and ``tool_command`` are non-empty strings.
    ``expected_tool_s`` is a number of seconds from 0 to a week.

    An unknown key of ``kv_transfer_params`` counts as ignored; those of ``xargs`` may be meant
    for others. Session ids are looked at only as long as no job id was found.
    """
    found: dict[str, Any] = {}
    ignored = 0
    for source in (kv_transfer_params, xargs):
        if source is None:
            continue
        if not isinstance(source, Mapping):
            ignored += 1
            continue
        for name, read in _READERS.items():
            said = source.get(name)
            if said is None:
                continue
            value = read(said)
            if value is None:
                ignored += 1
            else:
                found.setdefault(name, value)
    sessions = [session_id]
    if isinstance(kv_transfer_params, Mapping):
        ignored += sum(1 for key in kv_transfer_params if key not in _KNOWN)
        sessions.append(kv_transfer_params.get("session_id"))
    job_id = found.get("job_id")
    for session in sessions:
        if job_id is None and session is not None:
            job_id = _job_id(session)
            ignored += job_id is None
    return TurnHints(
        job_id,
        found.get("is_last_step", False),
        found.get("tool_name"),
        found.get("tool_command"),
        found.get("expected_tool_s"),
        ignored,
    )


def _job_id(said: object) -> str | None:
    if isinstance(said, int) and not isinstance(said, bool):
        return str(said) if abs(said) < 2**64 else None
    name = _text(said, MAX_JOB_ID_CHARS)
    return None if name is None or name.startswith(INFERRED_PREFIX) else name


def _yes_or_no(said: object) -> bool | None:
    return bool(said) if isinstance(said, int) and said in (0, 1) else None


def _text(said: object, most: int) -> str | None:
    return said if isinstance(said, str) and 0 < len(said) <= most else None


def _seconds(said: object) -> float | None:
    if isinstance(said, bool) or not isinstance(said, int | float):
        return None
    return float(said) if 0 <= said <= MAX_EXPECTED_S else None


_READERS: dict[str, Callable[[object], Any]] = {
    "job_id": _job_id,
    "is_last_step": _yes_or_no,
    "tool_name": lambda said: _text(said, MAX_TOOL_NAME_CHARS),
    "tool_command": lambda said: _text(said, MAX_TOOL_COMMAND_CHARS),
    "expected_tool_s": _seconds,
}

# tiered_kv is what answers carry: a client that sends an answer's parameters back is not wrong.
_KNOWN = frozenset({*_READERS, "session_id", "tiered_kv"})

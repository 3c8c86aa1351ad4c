"""Hints: what clients report about a turn. Input is untrusted.

A client may give hints in four places, read in this order. The first usable value of each name
counts:

1. ``kv_transfer_params`` of the request's body;
2. ``vllm_xargs`` of the body, which vLLM passes on as ``SamplingParams.extra_args``;
3. the request's session as known to vLLM (``session_id`` of the body, the header ``X-Session-ID``,
   ``session_id`` of ``vllm_xargs``): only a job id;
4. ``session_id`` of ``kv_transfer_params``, where the middleware puts sessions that vLLM does not
   know: also a job id.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from tiered_kv.json_fields import real, string, whole

MAX_JOB_ID_CHARS = 512
"""Maximum length of a job id, which is kept as long as the job. A longer one is an error or an
attack."""
MAX_TOOL_NAME_CHARS = 256
MAX_TOOL_COMMAND_CHARS = 16_384
"""Maximum length of a command, about as much as the decoded end of an answer can contain."""
MAX_EXPECTED_S = 7 * 86_400.0
"""Maximum expected duration, a week. No KV is kept that long."""
INFERRED_PREFIX = "(inferred) "
"""Prefix of the names of inferred jobs, which clients may not use."""

_MAPPINGS = (dict, Mapping)
"""Types of a source. Almost all are a ``dict``; the check for another ``Mapping`` is slow."""


class TurnHints(NamedTuple):
    """Usable hints of a request; None where there is none.

    Attributes:
        job_id: name of the job.
        is_last_step: True if no turn of this job follows.
        tool_name, tool_command: the tool that runs after this turn.
        expected_s: expected duration of the tool, seconds.
        ignored: number of unusable values.
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
    """Read a request's hints. Unusable values are counted; nothing is raised.

    ``job_id`` is a non-empty string of at most 512 characters, or an integer, which is converted to
    its decimal text. ``is_last_step`` is a bool, or 0 or 1 (vLLM turns the booleans of
    ``vllm_xargs`` into numbers). ``tool_name`` and ``tool_command`` are non-empty strings.
    ``expected_tool_s`` is a number of seconds from 0 to a week.

    An unknown key of ``kv_transfer_params`` counts as ignored. Unknown keys of ``xargs`` do not,
    because they may be meant for others. Session ids are read only if no job id was found.
    """
    found: dict[str, Any] = {}
    ignored = 0
    for source in (kv_transfer_params, xargs):
        if source is None:
            continue
        if not isinstance(source, _MAPPINGS):
            ignored += 1
            continue
        for name, given in source.items():
            read = _READERS.get(name)
            if read is None or given is None:
                continue
            try:
                found.setdefault(name, read(given))
            except ValueError:
                ignored += 1
    sessions = [session_id]
    if isinstance(kv_transfer_params, _MAPPINGS):
        ignored += len(kv_transfer_params.keys() - _KNOWN)
        sessions.append(kv_transfer_params.get("session_id"))
    job_id = found.get("job_id")
    for session in sessions:
        if job_id is None and session is not None:
            try:
                job_id = _job_id(session)
            except ValueError:
                ignored += 1
    return TurnHints(
        job_id,
        found.get("is_last_step", False),
        found.get("tool_name"),
        found.get("tool_command"),
        found.get("expected_tool_s"),
        ignored,
    )


def _job_id(value: object) -> str:
    if type(value) is int:
        return str(whole(value, 1 - 2**64, 2**64 - 1))
    name = string(value, 1, MAX_JOB_ID_CHARS)
    if name.startswith(INFERRED_PREFIX):
        raise ValueError("the name is reserved for inferred jobs")
    return name


def _yes_or_no(value: object) -> bool:
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    raise ValueError("it is neither true nor false")


_READERS: dict[str, Callable[[object], Any]] = {
    "job_id": _job_id,
    "is_last_step": _yes_or_no,
    "tool_name": partial(string, least=1, most=MAX_TOOL_NAME_CHARS),
    "tool_command": partial(string, least=1, most=MAX_TOOL_COMMAND_CHARS),
    "expected_tool_s": partial(real, most=MAX_EXPECTED_S),
}

# Answers contain tiered_kv: a client may legitimately send an answer's parameters back.
_KNOWN = frozenset({*_READERS, "session_id", "tiered_kv"})

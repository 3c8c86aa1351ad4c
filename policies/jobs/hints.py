"""Hints: what clients report about a turn. Input is untrusted.

Hints are read in ``kv_transfer_params`` of the request's body, then in ``vllm_xargs``, which vLLM
passes on as ``SamplingParams.extra_args``. If several sources have usable values of a hint, the
first is used. The module ``identity`` finds the job, and the module ``kv_hints`` reads the actions
that the client requests for the job's KV.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from tiered_kv.json_fields import real, string

from .identity import NOBODY, PARAMS_FIELDS, Identity, identify
from .kv_hints import FIELDS, NO_HINTS, HintResult, KvHint, read_request

MAX_TOOL_NAME_CHARS = 256
MAX_TOOL_COMMAND_CHARS = 16_384
"""Maximum length of a command, about as much as the decoded end of an answer can contain."""
MAX_EXPECTED_S = 7 * 86_400.0
"""Maximum expected duration, a week. No KV is kept that long."""

_MAPPINGS = (dict, Mapping)
"""Types of objects in which hints are read. ``dict`` comes first, because almost all objects are a
``dict``, and the check for another ``Mapping`` is slow."""


class TurnHints(NamedTuple):
    """Usable hints of a request. A hint that the request lacks is None.

    Attributes:
        job_id: id of the job; None if it must be inferred.
        is_last_step: True if no turn of this job follows.
        tool_name, tool_command: name and command of the tool that runs after this turn.
        expected_s: expected duration of the tool, seconds.
        ignored: number of unusable values.
        who: the job's session, agent and parent.
        kv_hints: KV hints that can be carried out.
        kv_answered: results of KV hints that cannot be carried out.
    """

    job_id: str | None = None
    is_last_step: bool = False
    tool_name: str | None = None
    tool_command: str | None = None
    expected_s: float | None = None
    ignored: int = 0
    who: Identity = NOBODY
    kv_hints: tuple[KvHint, ...] = ()
    kv_answered: tuple[HintResult, ...] = ()


def read_hints(
    kv_transfer_params: object,
    xargs: object = None,
    session_id: object = None,
    kv_hints: object = None,
) -> TurnHints:
    """Read a request's hints. Unusable values are counted in ``ignored``. Never raises.

    ``is_last_step`` is a bool, or 0 or 1 (vLLM turns the booleans of ``vllm_xargs`` into numbers).
    ``tool_name`` and ``tool_command`` are non-empty strings. ``expected_tool_s`` is a number of
    seconds from 0 to a week. Unknown keys of ``kv_transfer_params`` are counted in ``ignored`` too.
    Unknown keys of ``xargs`` are not counted, because they may be meant for other software.

    Args:
        kv_transfer_params: the request's field of that name; None without it.
        xargs: ``vllm_xargs`` of the request; None without it.
        session_id: session id that vLLM read from the request; None without one.
        kv_hints: value of vLLM's field ``Request.kv_hints``; None without it.
    """
    found: dict[str, Any] = {}
    ignored, asks = 0, kv_hints is not None
    for source in (kv_transfer_params, xargs):
        if source is None:
            continue
        if not isinstance(source, _MAPPINGS):
            ignored += 1
            continue
        asks = asks or not FIELDS.isdisjoint(source)
        for name, given in source.items():
            read = _READERS.get(name)
            if read is None or given is None:
                continue
            try:
                found.setdefault(name, read(given))
            except ValueError:
                ignored += 1
    if isinstance(kv_transfer_params, _MAPPINGS):
        ignored += len(kv_transfer_params.keys() - _KNOWN)
    who = identify(kv_transfer_params, xargs, session_id)
    asked = read_request(kv_hints, kv_transfer_params, xargs) if asks else NO_HINTS
    return TurnHints(
        who.job,
        found.get("is_last_step", asked.is_last_step),
        found.get("tool_name"),
        found.get("tool_command"),
        found.get("expected_tool_s"),
        ignored + who.ignored + len(asked.answered),
        who,
        asked.hints,
        asked.answered,
    )


def _yes_or_no(value: object) -> bool:
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    raise ValueError("it is neither true nor false")


_READERS: dict[str, Callable[[object], Any]] = {
    "is_last_step": _yes_or_no,
    "tool_name": partial(string, least=1, most=MAX_TOOL_NAME_CHARS),
    "tool_command": partial(string, least=1, most=MAX_TOOL_COMMAND_CHARS),
    "expected_tool_s": partial(real, most=MAX_EXPECTED_S),
}

# The kv_transfer_params of an answer contain tiered_kv, and a client may send them back.
_KNOWN = PARAMS_FIELDS | FIELDS | {*_READERS, "tiered_kv"}

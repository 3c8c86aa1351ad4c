"""What a client says about a turn, read without trusting it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MAX_JOB_ID_CHARS = 512
"""A longer name is a mistake (or an attack): it would be kept for as long as the job."""

_KNOWN = frozenset({"job_id", "is_last_step"})


@dataclass(frozen=True, slots=True)
class TurnHints:
    """What was said and could be used.

    Attributes:
        job_id: the job's name, None if it was not given.
        is_last_step: True if no turn of this job follows.
        ignored: how many values could not be used.
    """

    job_id: str | None = None
    is_last_step: bool = False
    ignored: int = 0


def read_hints(params: object) -> TurnHints:
    """Read ``kv_transfer_params``; whatever cannot be used is counted, never raised.

    A job id is a non-empty string of at most 512 characters, or an integer, which is
    taken as its decimal text. ``is_last_step`` is a bool, or 0 or 1.
    """
    if params is None:
        return TurnHints()
    if not isinstance(params, Mapping):
        return TurnHints(ignored=1)
    ignored = sum(1 for key in params if key not in _KNOWN)

    job_id: str | None = None
    raw = params.get("job_id")
    if isinstance(raw, int) and not isinstance(raw, bool) and abs(raw) < 2**64:
        job_id = str(raw)
    elif isinstance(raw, str) and 0 < len(raw) <= MAX_JOB_ID_CHARS:
        job_id = raw
    elif raw is not None:
        ignored += 1

    last = False
    said = params.get("is_last_step")
    if isinstance(said, bool) or (isinstance(said, int) and said in (0, 1)):
        last = bool(said)
    elif said is not None:
        ignored += 1
    return TurnHints(job_id, last, ignored)

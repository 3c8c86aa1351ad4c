"""Reader of a trace's steps."""

from __future__ import annotations

from pathlib import Path

from tiered_kv.trace.rotation import files_to_read, steps_to_read
from tiered_kv.trace.trace_reader import RecordReader

from .step_record import StepRecord


class StepReader(RecordReader[StepRecord]):
    """The steps of a trace, once each, in the order in which they were written.

    Args:
        path: what ``TIERED_KV_TRACE`` names.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(steps_to_read(path), StepRecord.from_json)


def has_steps(path: Path) -> bool:
    """True if the trace that ``TIERED_KV_TRACE`` names has steps."""
    return any(True for _ in files_to_read(steps_to_read(path)))

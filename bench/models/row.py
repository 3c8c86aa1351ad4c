"""Row of a model: what was restored of it, and what is wrong."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

PROMPT, ANSWER, MORE = 700, 60, 30
"""Tokens of a turn's prompt (no whole number of blocks), of its answer, and of what comes after."""
CONTEXT, AFTER = 768, 60
"""Least tokens of the aligned context, and tokens after it."""
SAID = 8
"""Tokens of an answer that is compared."""


@dataclass(slots=True)
class Row:
    """Findings of one model. False, 0 and None are also what was never reached.

    Attributes:
        groups: KV groups in words.
        context: tokens of the aligned context.
        equal: answers after restores from CPU memory, SSD and a restart are those after a hit in
            VRAM, bit for bit, and each was really restored.
        equal_bytes: what a turn restores of the one before is what that left in VRAM, byte for
            byte, and two restores give the same answer.
        control_differs: zeros in place of any one group's pages change the answer.
        pinned_hit: tokens of a pinned job found in VRAM after rivals had filled it.
        cpu_tokens, ssd_tokens, restart_tokens: tokens restored of the aligned context.
        answer_recomputed: tokens of the last turn that had KV and are computed again, when VRAM has
            lost it.
        stock_answer_recomputed: the same with stock vLLM, whose VRAM has lost nothing.
        stripped_hit: tokens found of a prompt that leaves out half of the last answer.
        stop_string_hit: tokens found of a prompt after an answer that a stop string ended.
        stop_string_had: tokens of that prompt that had KV.
        acceptance: share of a drafter's guesses that are right, by where its KV came from.
        notes: what is wrong, or was left out, in words.
        cannot_start: reason why stock vLLM does not run the model here; None if it does.
        seconds: time that it all took.
    """

    model: str
    groups: list[str] = field(default_factory=list)
    context: int = 0
    equal: bool = False
    equal_bytes: bool = False
    control_differs: bool = False
    pinned_hit: int = 0
    cpu_tokens: int = 0
    ssd_tokens: int = 0
    restart_tokens: int = 0
    answer_recomputed: int | None = None
    stock_answer_recomputed: int | None = None
    stripped_hit: int = 0
    stop_string_hit: int = 0
    stop_string_had: int = 0
    acceptance: dict[str, float | None] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    cannot_start: str | None = None
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """All fields by name, but for those that do not concern the model."""
        fields = asdict(self)
        for name in ("acceptance", "cannot_start"):
            if not fields[name]:
                del fields[name]
        return fields

    @contextmanager
    def noting(self, what: str) -> Iterator[None]:
        """Turn an exception into a note, so that the row is told as far as it goes."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.notes.append(f"{what}: {in_a_line(error)}")

    def summary(self) -> str:
        """The row in a line of words."""
        if self.cannot_start is not None:
            return f"cannot start: {self.cannot_start}"
        verdicts = [
            f"{'' if getattr(self, name) else 'NOT '}{name}"
            for name in ("equal", "equal_bytes", "control_differs")
        ]
        tokens = f"restored {self.cpu_tokens}/{self.ssd_tokens}/{self.restart_tokens}"
        return ", ".join([*verdicts, f"{tokens} of {self.context}", *self.notes])


def in_a_line(error: BaseException) -> str:
    """The kind of an error and the begin of what it says, of the error that caused it."""
    while error.__cause__ is not None:
        error = error.__cause__
    said = " ".join(str(error).split())[:200]
    return f"{type(error).__name__}: {said}" if said else type(error).__name__

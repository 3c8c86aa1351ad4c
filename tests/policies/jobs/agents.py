"""Clients that do not name their jobs, with a simplified hash chain."""

from __future__ import annotations

from collections.abc import Sequence

from tiered_kv.policies.jobs.lineage import Inferred, Lineage

BLOCK = 4
SYSTEM = list(range(100, 141))
"""A system prompt that ends in the middle of a block."""
ASSISTANT = [1, 2, 3, 4, 5]
"""End of a question in a chat template, with as many tokens as in ChatML."""
TOOL = [50, 51, 52, 53, 54, 55, 56]


def chained(tokens: Sequence[int]) -> list[bytes]:
    """Return a hash for every full block, of all tokens up to the block's end."""
    ends = range(BLOCK, len(tokens) + 1, BLOCK)
    return [repr(list(tokens[:end])).encode() for end in ends]


class Agents:
    """Clients of an engine. None of them names its job."""

    def __init__(self) -> None:
        self.lineage = Lineage(BLOCK)

    def ask(self, prompt: Sequence[int], salt: str = "") -> Inferred:
        inferred = self.lineage.arrived(salt, chained(prompt), prompt)
        assert inferred is not None
        return inferred

    def end(self, turn: Inferred, answer: Sequence[int] = (), *, aborted: bool = False) -> None:
        self.lineage.ended(turn.job, answer, aborted=aborted)

    def asked(self, prompt: Sequence[int], answer: Sequence[int] = (), salt: str = "") -> Inferred:
        """Run a turn from its arrival to its end."""
        turn = self.ask(prompt, salt)
        self.end(turn, answer)
        return turn


def question(*tokens: int) -> list[int]:
    return [*SYSTEM, *tokens, *ASSISTANT]

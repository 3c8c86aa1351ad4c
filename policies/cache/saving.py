"""Saves: when a turn is looked at for blocks to save, and what of its end is saved. Pure.

Looking at every running request in every step would cost more than the saves.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import filterfalse, islice

from tiered_kv.keys import PageKey

STRIDE_TOKENS = 256
"""A decoding request is looked at once it may have filled this many tokens' blocks..."""
TOGETHER = 16
"""...in a step that is a multiple of this. What it filled since is saved when it finishes,
and lost when it is preempted: at most 272 tokens or a block."""


@dataclass(frozen=True, slots=True)
class SaveStride:
    """The blocks of a decoding request that are saved together.

    Attributes:
        block_size: tokens of a block.
        tokens: tokens of those blocks: one block at least.
    """

    block_size: int
    tokens: int

    @classmethod
    def of(cls, block_size: int) -> SaveStride:
        """The stride of an engine with blocks of that size."""
        return cls(block_size, max(block_size, STRIDE_TOKENS // block_size * block_size))

    def next_look(self, step: int, *, saved: int, computed: int, known: int) -> int:
        """The step at which a turn is looked at again.

        A prefill may fill many blocks in the next step. A decoding request fills one token a
        step, so it is known when its next blocks can be full at the earliest.

        Args:
            step: the present step.
            saved: blocks that were saved so far.
            computed: tokens that are computed once the step has run.
            known: tokens of the prompt and of the answer so far.
        """
        look = step + 1
        if computed >= known:
            look += max(0, saved * self.block_size + self.tokens - computed - 1)
            look += -look % TOGETHER
        return look


def is_tail_worth_a_slot(blocks: int, *, of_job: bool) -> bool:
    """True if the partial block at the end of a turn's context is saved. A few stray tokens are
    not.

    Args:
        blocks: full blocks before it.
        of_job: True if the turn belongs to a job, which may go on.
    """
    return blocks > 0 or of_job


def worth_a_slot(
    pages: Mapping[PageKey, int], lacking: Collection[PageKey], free: int
) -> Mapping[PageKey, int]:
    """The pages to save: those that no tier below has, and as many of the others as slots are free
    besides. What VRAM and a tier below both hold is worth no page that CPU memory alone has.

    Args:
        pages: pages that CPU memory lacks, and their blocks.
        lacking: those of the pages that no tier below has.
        free: free slots of CPU memory.
    """
    if len(lacking) == len(pages):
        return pages
    others = filterfalse({*lacking}.__contains__, pages)
    wanted = [*lacking, *islice(others, max(0, free - len(lacking)))]
    return {key: pages[key] for key in wanted}

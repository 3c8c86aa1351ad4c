"""An aligned context, dense retention: the same answer wherever its KV comes from.

Every source gets a job of its own. The jobs' prompts are equal, but no KV is shared, so that each
finds exactly the context and computes exactly the rest. Where a drafter looks ahead, vLLM's pool
gives a block less, and a restore may give more.
"""

from __future__ import annotations

from collections.abc import Sequence

from tiered_kv.bench.models.engine.asking import Asker, Turn, text
from tiered_kv.bench.models.engine.vram import unlike

from .row import AFTER, CONTEXT, SAID, Row

CPU, SSD, RESTART, VRAM = "cpu", "ssd", "restart", "vram"
DRAFTED = 33
"""Tokens of an answer of which guesses are counted: one, and steps of up to four."""


class AlignedContext:
    """The context and what comes after it.

    Args:
        asker: an engine; the context ends where it can find a prefix.

    Attributes:
        tokens: length of the context.
    """

    def __init__(self, asker: Asker) -> None:
        self.tokens = -(-CONTEXT // asker.alignment) * asker.alignment
        self.context = asker.text(self.tokens, 1)
        self.prompt = self.context + text(AFTER, 2, asker.vocabulary)

    def begin(self, asker: Asker, names: Sequence[str]) -> None:
        """Have the context computed for each job."""
        for name in names:
            asker.ask(self.context, name, 1)

    def go_on(self, asker: Asker, name: str, tokens: int = SAID) -> Turn:
        """Ask the job's next turn, which is its last: it keeps nothing in VRAM."""
        return asker.ask(self.prompt, name, tokens, last=True)


def before_restart(asker: Asker, row: Row) -> Turn:
    """Fill in what one engine shows; returns the turn that was a hit in VRAM."""
    case = AlignedContext(asker)
    tokens = row.context = case.tokens
    case.begin(asker, [VRAM])
    hit = case.go_on(asker, VRAM)
    if hit.source.local != tokens - asker.dropped:
        row.notes.append(f"vLLM found {hit.source.local} of {tokens} tokens in its own pool")
    case.begin(asker, [CPU, SSD, RESTART])
    asker.evict_vram()
    again = case.go_on(asker, CPU)
    row.cpu_tokens = again.source.restored
    row.equal = _same(asker, row, CPU, again, hit)
    with row.noting("control"):
        _control(asker, case, hit, row)
    with row.noting("drafts"):
        row.acceptance = _acceptance(asker, case)
    with row.noting("ssd"):
        asker.move_to_ssd()
        asker.evict_vram()
        again = case.go_on(asker, SSD)
        row.ssd_tokens = again.source.restored
        row.equal = _same(asker, row, SSD, again, hit) and row.equal
    return hit


def after_restart(asker: Asker, row: Row, hit: Turn) -> None:
    """Fill in what an engine shows that was started again with the same SSD."""
    case = AlignedContext(asker)
    # By the end of another turn the connector knows an adapter by its files.
    asker.ask(asker.text(AFTER, 5), "first", 1, last=True)
    again = case.go_on(asker, RESTART)
    row.restart_tokens = again.source.restored
    row.equal = _same(asker, row, RESTART, again, hit) and row.equal


def _same(asker: Asker, row: Row, source: str, again: Turn, hit: Turn) -> bool:
    wrong = []
    if again.source.restored < hit.source.local or not hit.source.local:
        wrong.append(f"{again.source.restored} of {row.context} tokens restored")
    else:
        wrong += unlike(hit.found, asker.began(again, hit.source.found))
    if not again.says_the_same(hit):
        wrong.append("another answer than after a hit in VRAM")
    row.notes += [f"{source}: {said}" for said in wrong]
    return not wrong


def _control(asker: Asker, case: AlignedContext, hit: Turn, row: Row) -> None:
    silent, groups = list[str](), asker.offloaded_groups()
    for position, group in enumerate(groups):
        name = f"control {position}"
        case.begin(asker, [name])
        asker.evict_vram()
        with asker.zeroed(position) as struck:
            wrong = case.go_on(asker, name)
        if not struck():
            silent.append(f"no page of {group.words} was restored")
        elif wrong.logprobs == hit.logprobs:
            silent.append(f"{struck()} zeroed pages of {group.words} change nothing")
        elif not unlike(hit.found, asker.began(wrong, hit.source.found)):
            silent.append(f"{struck()} zeroed pages of {group.words} came up as they were")
    row.control_differs = bool(groups) and not silent
    row.notes += [f"control: {said}" for said in silent]


def _acceptance(asker: Asker, case: AlignedContext) -> dict[str, float | None]:
    """Share of a drafter's guesses that are right: after a hit in VRAM, after a restore, and when
    its own layers' part of that is zeroed. Empty without a drafter that has layers."""
    layers = asker.draft_layers()
    found = dict[str, float | None]()
    for name in ("pool", "restored", "zeroed") if layers else ():
        case.begin(asker, [f"drafts {name}"])
        if name != "pool":
            asker.evict_vram()
        with asker.zeroed_layers(layers if name == "zeroed" else []):
            found[name] = case.go_on(asker, f"drafts {name}", DRAFTED).acceptance
    return found

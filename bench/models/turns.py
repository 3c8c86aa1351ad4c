"""Turns of an agent, vLLM's own retention: what the next turn finds, and what it computes again."""

from __future__ import annotations

from tiered_kv.bench.models.engine.asking import Asker, Turn, text
from tiered_kv.bench.models.engine.vram import unlike

from .row import ANSWER, MORE, PROMPT, SAID, Row

LEAST_BEFORE_STOP = 20
"""Tokens of an answer before the stop string that ends it."""
STRIPPED, STOPPED, PINNED = "stripped", "stopped", "pinned"


def stock_turns(asker: Asker, row: Row) -> list[int]:
    """Fill in what stock vLLM shows, with nothing evicted; returns an answer's tokens."""
    first = asker.ask(_prompt(asker), "stock", ANSWER)
    after = _next(asker, first, "stock")
    row.stock_answer_recomputed = _recomputed(first, after)
    return first.tokens


def turns(asker: Asker, row: Row) -> None:
    """Fill in what the connector shows."""
    with row.noting("restore of a turn"):
        first = asker.ask(_prompt(asker), "one", ANSWER)
        _restore(asker, first, row)
        with row.noting("stop string"):
            _stop_string(asker, first, row)
    with row.noting("stripped answer"):
        first = asker.ask(_prompt(asker), STRIPPED, ANSWER)
        asker.evict_vram()
        kept = first.prompt + first.tokens[len(first.tokens) // 2 :]
        row.stripped_hit = asker.ask(kept + _more(asker), STRIPPED, SAID, last=True).source.found
    with row.noting("pin"):
        first = asker.ask(_prompt(asker), PINNED, ANSWER)
        if not asker.pinned_blocks:
            row.notes.append("pin: none was made")
        asker.rivals(PROMPT, seed=1000)
        row.pinned_hit = _next(asker, first, PINNED).source.local


def _restore(asker: Asker, first: Turn, row: Row) -> None:
    asker.evict_vram()
    after = _next(asker, first, "one")
    row.answer_recomputed = _recomputed(first, after)
    if not after.source.restored:
        row.notes.append("turn: nothing was restored")
        return
    twin = asker.ask(_prompt(asker), "two", ANSWER)
    if twin.tokens != first.tokens:
        row.notes.append("turn: the same prompt was answered in two ways")
        return
    asker.evict_vram()
    again = _next(asker, twin, "two")
    wrong = []
    for turn, then in ((first, after), (twin, again)):
        wrong += unlike(asker.ended(turn, then.source.found), then.found)
    if not after.says_the_same(again):
        wrong.append("two restores, two answers")
    row.equal_bytes = not wrong
    row.notes += [f"turn: {said}" for said in dict.fromkeys(wrong)]


def _stop_string(asker: Asker, first: Turn, row: Row) -> None:
    at = stop_token(first.tokens)
    if at is None:
        row.notes.append("stop string: no token of the answer will do")
        return
    stop = f"w{first.tokens[at]}"
    ended = asker.ask(_prompt(asker), STOPPED, ANSWER, stop=stop)
    if ended.tokens != first.tokens[: at + 1]:
        row.notes.append(f"stop string: {len(ended.tokens)} tokens, not {at + 1}, to {stop}")
        return
    asker.evict_vram()
    kept = ended.prompt + ended.tokens[:at]
    row.stop_string_had = ended.source.prompt + at
    row.stop_string_hit = asker.ask(kept + _more(asker), STOPPED, SAID, last=True).source.found


def stop_token(tokens: list[int]) -> int | None:
    """Position of a token whose word is in the answer's text for the first time; None if there is
    none late enough."""
    said = " ".join(f"w{token}" for token in tokens[:LEAST_BEFORE_STOP])
    for at in range(LEAST_BEFORE_STOP, len(tokens)):
        word = f"w{tokens[at]}"
        if word not in said:
            return at
        said += f" {word}"
    return None


def _recomputed(first: Turn, after: Turn) -> int:
    """Tokens that had KV at the end of a turn and were computed again."""
    return max(0, first.with_kv - after.source.found)


def _next(asker: Asker, turn: Turn, name: str) -> Turn:
    return asker.ask(turn.context + _more(asker), name, SAID, last=True)


def _prompt(asker: Asker) -> list[int]:
    return asker.text(PROMPT, 3)


def _more(asker: Asker) -> list[int]:
    return text(MORE, 4, asker.vocabulary)

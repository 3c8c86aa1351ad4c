"""A job's timeline in sentences, from its records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tiered_kv.formatting import count, moment, plain, secs
from tiered_kv.json_fields import cut

from .turn_record import JOB_ROOM, PinEnd, StoryEnd, TurnRecord

_PIN_ENDS = {
    PinEnd.RETURNED: "the next turn arrived",
    PinEnd.EXPIRED: "its time limit was reached",
    PinEnd.PRESSURE: "a request needed the blocks more",
    PinEnd.REVISED: "the parsed tool call did not justify it",
    PinEnd.GIVEN_UP: "the job was given up",
    PinEnd.RESET: "all pins were released",
    PinEnd.CLOSED: "the engine stopped",
}
_ENDS = {
    StoryEnd.RETURNED: "The next turn arrived after {gap}.",
    StoryEnd.OVER: "The client reported that no turn follows.",
    StoryEnd.GIVEN_UP: "The job was given up after {gap} of silence.",
    StoryEnd.CLOSED: "The engine stopped {gap} later.",
    StoryEnd.NO_GAP: "No gap followed.",
}
_LEFT = {"cpu": "in CPU memory", "ssd": "on SSD"}
_TIERS = {
    "pin": "pinned in VRAM for at most {ttl}",
    "cpu": "kept in CPU memory",
    "store": "moved to the tiers below CPU memory",
    "drop": "dropped",
}


def of_job(records: Iterable[TurnRecord], job: str) -> list[TurnRecord]:
    """Return the records of jobs with that name, of any client, sorted by arrival."""
    name = cut(job, JOB_ROOM)
    return sorted((one for one in records if one.job == name), key=lambda one: one.arrived)


def story(one: TurnRecord) -> list[str]:
    """Return a turn's timeline, as a list of sentences."""
    parts = (_beginning, _prompt, _preempted, _answer, _decision, _what_came)
    return [sentence for part in parts for sentence in part(one)]


def _beginning(one: TurnRecord) -> Iterator[str]:
    times = one.times
    yield f"Turn {one.turn} ({plain(one.request)}) arrived at {moment(one.arrived)}."
    if times.admitted_s is None:
        yield f"It was never admitted, and ended after {secs(times.end_s)}."
        return
    reasons = []
    if times.held_s:
        reasons.append(f"{secs(times.held_s)} because its new job was held back")
    if times.pages_s:
        reasons.append(f"{secs(times.pages_s)} for pages being promoted")
    details = f", of which {' and '.join(reasons)}" if reasons else ""
    yield f"It waited {secs(times.admitted_s)}{details}."


def _prompt(one: TurnRecord) -> Iterator[str]:
    tokens = one.tokens
    if one.times.admitted_s is None:
        return
    sources = {"in VRAM": tokens.vram, "in CPU memory": tokens.cpu, "on SSD": tokens.ssd}
    found = [f"{count:,} were {where}" for where, count in sources.items() if count]
    found += [f"{tokens.recomputed:,} were computed"]
    lost = f" The KV of {tokens.lost:,} of these had been evicted." if tokens.lost else ""
    yield f"Of its {tokens.prompt:,} prompt tokens, {_list(found)}.{lost}"
    seen = one.would_have
    places = {"in VRAM": seen.vram, "in CPU memory": seen.cpu, "on SSD": seen.ssd}
    would = [f"{count:,} {where}" for where, count in places.items() if count]
    if would:
        yield f"In observe mode, the connector would have found {_list(would)}."


def _preempted(one: TurnRecord) -> Iterator[str]:
    times = one.preempted
    if not times.count:
        return
    often = "once" if times.count == 1 else f"{times.count:,} times"
    at_first = ", at first" if times.count > len(times.at_s) else ","
    when = f"{at_first} after {_list([secs(at) for at in times.at_s])}" if times.at_s else ""
    yield f"It was preempted {often}{when}."
    for back_s, found in zip(times.back_s, times.found, strict=False):
        yield f"It continued after {secs(back_s)}, with {count(found, 'token')} found."


def _answer(one: TurnRecord) -> Iterator[str]:
    times, tokens = one.times, one.tokens
    if times.admitted_s is None:
        return
    first = (
        f"Its first token arrived after {secs(times.first_token_s)}" if times.first_token_s else ""
    )
    answer = count(tokens.output, "token")
    end = f"it finished after {secs(times.end_s)} with {answer} ({plain(one.finish)})"
    yield f"{first}, and {end}." if first else f"{end[0].upper()}{end[1:]}."


def _decision(one: TurnRecord) -> Iterator[str]:
    made = one.decision
    if one.tool:
        yield f"Then its tool ran: {plain(one.tool[-1])}."
    if one.gap.end in (StoryEnd.OVER, StoryEnd.NO_GAP) or not made.tier:
        return
    if made.q50_s is not None:
        later = f" and {secs(made.q90_s)} (9 in 10)" if made.q90_s is not None else ""
        yield f"The next turn was expected after {secs(made.q50_s)} (1 in 2){later}."
    where = _TIERS.get(made.tier, "kept in another tier").format(ttl=secs(made.ttl_s))
    yield (
        f"So its KV was {where}: finding it in VRAM saves {secs(made.benefit_s)}, and each second "
        f"in VRAM costs {made.vram_price:g} s."
    )


def _were(amount: int, noun: str) -> str:
    return f"{count(amount, noun)} {'was' if amount == 1 else 'were'}"


def _what_came(one: TurnRecord) -> Iterator[str]:
    pin, pages, gap = one.pin, one.pages, one.gap
    if pin.end is not None:
        why = _PIN_ENDS[pin.end]
        yield f"{_were(pin.blocks, 'block')} pinned for {secs(pin.held_s)}, until {why}."
    if pages.promoted or pages.used:
        yield f"{_were(pages.promoted, 'page')} promoted for it, and it used {pages.used:,}."
    if pages.demoted:
        yield f"{_were(pages.demoted, 'page')} demoted."
    if pages.evicted:
        told = [(_LEFT.get(tier, plain(tier)), count) for tier, count in pages.evicted.items()]
        left = [f"{count:,} {where}" for where, count in told]
        yield f"Of its pages, {_list(left)} were evicted."
    if pages.ahead:
        yield f"{_were(pages.ahead, 'page')} promoted before the next turn."
    yield _ENDS[gap.end].format(gap=secs(gap.gap_s or 0.0))
    if gap.saved_s or gap.cost_s:
        yield f"That saved {secs(gap.saved_s)} and cost {secs(gap.cost_s)}."


def _list(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"

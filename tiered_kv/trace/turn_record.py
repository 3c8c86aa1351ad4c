"""Schema 1 of the trace: the story of one turn, as JSON of at most 1 KiB. See docs/trace.md."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from operator import itemgetter
from typing import Any, ClassVar, NamedTuple

from tiered_kv.json_fields import cut, read, said, size

MAX_BYTES = 1024
"""Longest line, its end included."""


class StoryEnd(Enum):
    """End of a turn's story, with which its record is written."""

    RETURNED = "returned"
    """The job's next turn arrived."""
    OVER = "over"
    """The client said that no turn follows."""
    GIVEN_UP = "given_up"
    """The job was silent for too long, or for longest while too many were."""
    CLOSED = "closed"
    """The engine ended before any of that."""
    NO_GAP = "no_gap"
    """An end without a gap: the turn was of no job, another of its job was running, or it ended
    before it had any KV."""


class PinEnd(Enum):
    """End of a pin."""

    RETURNED = "returned"
    """The job's next turn arrived in time."""
    EXPIRED = "expired"
    """Its time was up."""
    PRESSURE = "pressure"
    """A request needed the blocks more."""
    REVISED = "revised"
    """The tool call was read, and did not warrant it."""
    GIVEN_UP = "given_up"
    """The job is not waited for any longer."""
    RESET = "reset"
    """All pins were given up at once: a cache reset, the watchdog, a hook that failed."""
    CLOSED = "closed"
    """The engine ended."""


@dataclass(frozen=True, slots=True)
class TurnTimes:
    """Moments of a turn, seconds after its arrival, and its waits, seconds.

    Attributes:
        held_s: time that it was held as the turn of a new job, for want of room for that job.
        pages_s: time that it then waited for pages on their way up, or for others' to go.
        admitted_s: it was given blocks; None if it never was. What is left of this time, it waited
            for blocks.
        scheduled_s: the first step that computes of it; None if there was none.
        first_token_s: its first token, as the scheduler half heard of it; None if there was none.
        end_s: its end.
    """

    held_s: float = 0.0
    pages_s: float = 0.0
    admitted_s: float | None = None
    scheduled_s: float | None = None
    first_token_s: float | None = None
    end_s: float = 0.0


FIRST_PREEMPTIONS = 3
"""Preemptions of a turn whose moments are told; of more, only their number."""


@dataclass(frozen=True, slots=True)
class Preemptions:
    """Times that the turn lost its blocks to others, and had to begin anew.

    Attributes:
        count: their number.
        at_s: moments of the first ``FIRST_PREEMPTIONS``, seconds after its arrival.
        back_s: moments of the first steps that computed of it again; one less if there was none.
        found: tokens of prompt and answer that it had then, in VRAM or restored.
    """

    count: int = 0
    at_s: tuple[float, ...] = ()
    back_s: tuple[float, ...] = ()
    found: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TurnTokens:
    """Tokens of a turn. Those of the prompt by source add up to it, or are 0 if it was never
    admitted.

    Attributes:
        prompt: length of the prompt.
        vram, cpu: found there at the first admission.
        ssd: came up from a tier below CPU memory for this turn.
        recomputed: computed.
        lost: of those, the least number that its job's last turn left behind somewhere.
        new: tokens of the prompt beyond the context of its job's last turn.
        output: length of the answer.
    """

    prompt: int = 0
    vram: int = 0
    cpu: int = 0
    ssd: int = 0
    recomputed: int = 0
    lost: int = 0
    new: int = 0
    output: int = 0


@dataclass(frozen=True, slots=True)
class WouldHave:
    """Tokens of the prompt that were computed by an engine that is only observed, and that the
    connector would have found. They are part of ``recomputed``.

    Attributes:
        vram: under the pin of its job, or of another that begins alike. cpu: in CPU memory.
        ssd: in a tier below.
    """

    vram: int = 0
    cpu: int = 0
    ssd: int = 0


@dataclass(frozen=True, slots=True)
class PricedDecision:
    """The tier where the turn's KV was to wait, as decided last, and the reasons.

    Attributes:
        tier: ``pin``, ``cpu``, ``store`` or ``drop``.
        gap_class: ``fast``, ``uncertain`` or ``slow``; empty from a policy without classes.
        ttl_s: longest time of the pin.
        back_s: time after the turn's end at which the KV was to be up again; None to wait for the
            next turn.
        q50_s, q90_s: quantiles of the forecast; None without one, or beyond four hours.
        benefit_s: B, time saved if the job returns while its KV is in VRAM.
        restore_s: R, expected time of the cheapest restore.
        recompute_s: time to compute the context again.
        cpu_s: time to restore it from CPU memory; None if it cannot be there.
        tiers_s: time to restore it from each tier below.
        cpu_stay_s: time that a page stays in CPU memory; None while none is evicted.
        survival: share of KV outside VRAM that is still there when it is needed.
        queue_s: T, wait for admission of turns whose KV had left VRAM.
        memoryfulness: η, share of T that a pin saves.
        vram_price: λ, seconds charged for a second in VRAM.
    """

    signed: ClassVar[bool] = True
    """A policy of another package may decide anything."""

    tier: str = ""
    gap_class: str = ""
    ttl_s: float = 0.0
    back_s: float | None = None
    q50_s: float | None = None
    q90_s: float | None = None
    benefit_s: float = 0.0
    restore_s: float = 0.0
    recompute_s: float = 0.0
    cpu_s: float | None = None
    tiers_s: Mapping[str, float] = field(default_factory=dict)
    cpu_stay_s: float | None = None
    survival: float = 1.0
    queue_s: float = 0.0
    memoryfulness: float = 1.0
    vram_price: float = 0.0


@dataclass(frozen=True, slots=True)
class PinStory:
    """The pin after the turn.

    Attributes:
        blocks: blocks that were pinned; 0 without a pin.
        held_s: time that it was held, seconds.
        end: how it ended; None without a pin.
    """

    blocks: int = 0
    held_s: float = 0.0
    end: PinEnd | None = None


@dataclass(frozen=True, slots=True)
class PageMoves:
    """Pages that moved between CPU memory and the tiers below.

    Attributes:
        promoted: pages ordered up for the turn. promoted_bytes: their size, uncompressed, on one
            rank.
        used: pages that had come up, for this turn or for nobody yet, and that it restored.
        ahead: pages ordered up in the gap, before the job returned.
        demoted: pages of its context that the decision sent down.
        evicted: pages of its context that were evicted in the gap, by the tier that they left.
            Those of several jobs count for the one whose turn ended last.
    """

    promoted: int = 0
    promoted_bytes: int = 0
    used: int = 0
    ahead: int = 0
    demoted: int = 0
    evicted: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GapStory:
    """The gap after the turn.

    Attributes:
        end: how the story ended.
        gap_s: length of the gap until then, seconds; None if there was none.
        in_vram: True if the pin was there when the next turn arrived.
        saved_s: B if so, seconds.
        cost_s: price of the time that the pin was held, seconds.
    """

    end: StoryEnd = StoryEnd.NO_GAP
    gap_s: float | None = None
    in_vram: bool = False
    saved_s: float = 0.0
    cost_s: float = 0.0


_encode = json.JSONEncoder(separators=(",", ":")).encode


class _Room(NamedTuple):
    """Bytes of texts; and whether all that a price was made of is written, and when the turn was
    preempted."""

    request: int
    tool: int
    whole: bool


JOB_ROOM = 96
"""Most bytes of a job's name."""
_WORD_ROOM, _MOST_TIERS = 24, 4
_ROOM_OF = {"job": JOB_ROOM, "client": _WORD_ROOM, "finish": _WORD_ROOM}
_PRICE = ("tier", "gap_class", "ttl_s", "benefit_s", "vram_price")
_ROOMS = (_Room(96, 120, True), _Room(48, 48, True), _Room(24, 0, True), _Room(24, 0, False))
"""Used in this order, until the record fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRecord:
    """The story of one turn, written when it is over.

    Attributes:
        job: name of the job; None if the turn was of none.
        client: digest of the client's cache salt; empty without one. Equal names of different
            clients are different jobs.
        replica: index of the engine among data-parallel ones.
        turn: number of the turn in its job, from 1.
        request: the engine's id of the request.
        arrived: seconds since the epoch.
        finish: the engine's name for how the turn ended, or for where it was if it did not.
        tool: the tool that ran in the gap, from the general to the particular; empty if unknown.
    """

    job: str | None = None
    client: str = ""
    replica: int = 0
    turn: int
    request: str
    arrived: float
    finish: str = ""
    tool: tuple[str, ...] = ()
    times: TurnTimes = field(default_factory=TurnTimes)
    preempted: Preemptions = field(default_factory=Preemptions)
    tokens: TurnTokens = field(default_factory=TurnTokens)
    would_have: WouldHave = field(default_factory=WouldHave)
    decision: PricedDecision = field(default_factory=PricedDecision)
    pin: PinStory = field(default_factory=PinStory)
    pages: PageMoves = field(default_factory=PageMoves)
    gap: GapStory = field(default_factory=GapStory)

    @property
    def ended(self) -> float:
        """Its end, seconds since the epoch."""
        return self.arrived + self.times.end_s

    def to_line(self) -> str:
        """The record as a line of at most ``MAX_BYTES``, its end not included. Long texts are cut;
        of a job's name always at the same place."""
        whole = said(self) | {"arrived": round(self.arrived, 3)}
        line = ""
        for room in _ROOMS:
            line = _encode(_fitted(whole, room))
            if len(line) < MAX_BYTES:
                break
        return line

    @classmethod
    def from_json(cls, found: object) -> TurnRecord:
        """Read a record; fields that are not known are passed over.

        Raises:
            ValueError: it is none; the message tells why.
        """
        return read(cls, found)


def _fitted(whole: Mapping[str, Any], room: _Room) -> dict[str, Any]:
    """A record as JSON knows it, with its texts cut."""
    fitted = dict(whole)
    for name, most in (*_ROOM_OF.items(), ("request", room.request)):
        if name in fitted:
            fitted[name] = cut(fitted[name], most)
    if tool := _cut_all(fitted.pop("tool", ()), room.tool):
        fitted["tool"] = tool
    if "preempted" in fitted:
        fitted["preempted"] = _first(fitted["preempted"], FIRST_PREEMPTIONS * room.whole)
    if "evicted" in fitted.get("pages", {}):
        left = list(fitted["pages"]["evicted"].items())[:_MOST_TIERS]
        evicted = {cut(name, _WORD_ROOM): pages for name, pages in left}
        fitted["pages"] = fitted["pages"] | {"evicted": evicted}
    made = dict(fitted.get("decision", {}))
    if not room.whole:
        made = {name: made[name] for name in _PRICE if name in made}
    for name in made.keys() & {"tier", "gap_class"}:
        made[name] = cut(made[name], _WORD_ROOM)
    if "tiers_s" in made:
        tiers = sorted(made["tiers_s"].items(), key=itemgetter(1))[:_MOST_TIERS]
        made["tiers_s"] = {cut(name, _WORD_ROOM): seconds for name, seconds in tiers}
    if made:
        fitted["decision"] = made
    return fitted


def _first(story: Mapping[str, Any], most: int) -> dict[str, Any]:
    """The story with so many elements of each list."""
    told = {name: one[:most] if isinstance(one, list) else one for name, one in story.items()}
    return {name: one for name, one in told.items() if one != []}


def _cut_all(texts: Sequence[str], room: int) -> list[str]:
    """The first texts, the last of them cut, so that they take so many bytes."""
    kept = list[str]()
    for text in texts:
        if room < _WORD_ROOM:
            break
        kept.append(cut(text, room))
        room -= size(kept[-1]) + len('"",')
    return kept

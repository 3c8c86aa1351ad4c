"""Schema 1 of the trace: the timeline of one turn, as JSON of at most 1 KiB. See docs/trace.md."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from operator import itemgetter
from typing import Any, ClassVar, NamedTuple

from tiered_kv.json_fields import cut, read, said, size

MAX_BYTES = 1024
"""Maximum length of a line, including its line break."""


class StoryEnd(Enum):
    """Event that ends a gap. The record of the turn before the gap is written when this event
    occurs.
    """

    RETURNED = "returned"
    """The job's next turn arrived."""
    OVER = "over"
    """The client reported that no turn follows."""
    GIVEN_UP = "given_up"
    """The job was silent for four hours, or for longer than all other jobs when over 8,192 jobs
    waited."""
    CLOSED = "closed"
    """The engine stopped before the gap ended."""
    NO_GAP = "no_gap"
    """The turn had no job or no KV, or another turn of the job was running."""


class PinEnd(Enum):
    """Reason for the end of a pin."""

    RETURNED = "returned"
    """The job returned before the time limit."""
    EXPIRED = "expired"
    """The time limit was reached."""
    PRESSURE = "pressure"
    """A request needed the blocks."""
    REVISED = "revised"
    """A tool call or a client revised the decision."""
    GIVEN_UP = "given_up"
    """The job is no longer expected."""
    RESET = "reset"
    """All pins were released, for example by a cache reset."""
    CLOSED = "closed"
    """The engine stopped."""


@dataclass(frozen=True, slots=True)
class TurnTimes:
    """Times of a turn, in seconds. ``held_s`` and ``pages_s`` are durations; the others count from
    the turn's arrival, and are None for an event that did not occur.

    Attributes:
        held_s: time for which a new job was held back.
        pages_s: further wait for promoted pages, or for space to promote them.
        admitted_s: allocation of the first blocks.
        scheduled_s: first step that computes the turn, after any restore.
        first_token_s: first token, up to one step late.
        end_s: end of the turn.
    """

    held_s: float = 0.0
    pages_s: float = 0.0
    admitted_s: float | None = None
    scheduled_s: float | None = None
    first_token_s: float | None = None
    end_s: float = 0.0


FIRST_PREEMPTIONS = 3
"""Number of preemptions of a turn whose times are recorded. Later preemptions are only counted."""


@dataclass(frozen=True, slots=True)
class Preemptions:
    """Preemptions of the turn. Times are in seconds after the turn's arrival.

    Attributes:
        count: number of preemptions.
        at_s, back_s: times of the first three preemptions, and of the resumptions after them.
        found: tokens found in VRAM or restored at each resumption.
    """

    count: int = 0
    at_s: tuple[float, ...] = ()
    back_s: tuple[float, ...] = ()
    found: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TurnTokens:
    """Tokens of a turn. ``vram``, ``cpu``, ``ssd`` and ``recomputed`` add up to ``prompt``; all
    four are 0 if the turn was never admitted.

    Attributes:
        prompt, output: length of prompt and answer.
        vram, cpu, ssd: prompt tokens found in that tier at the first admission; ``ssd`` covers all
            lower tiers, including shared tiers.
        recomputed: prompt tokens that were computed.
        lost: lower bound of the ``recomputed`` tokens that were in the job's last context.
        new: prompt tokens beyond the job's last context.
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
    """Part of ``recomputed`` that an engine in observe mode would have found in a tier.

    Attributes:
        vram: tokens under a pin of the job, or of another job with the same prefix.
        cpu, ssd: tokens in CPU memory, or in a lower tier.
    """

    vram: int = 0
    cpu: int = 0
    ssd: int = 0


@dataclass(frozen=True, slots=True)
class PricedDecision:
    """The last decision about the turn's KV, with its inputs. Times are in seconds.

    Attributes:
        tier: ``pin``, ``cpu``, ``store`` (lower tiers) or ``drop``.
        gap_class: ``fast``, ``uncertain`` or ``slow``, if the policy has classes.
        ttl_s: the pin's time limit.
        back_s: time of the planned promotion, after the turn's end; None if the promotion waits for
            the next turn.
        q50_s, q90_s: quantiles of the forecast gap; None without a forecast, or beyond four hours.
        benefit_s: B, time saved by KV that is still in VRAM.
        restore_s: R, expected time of the cheapest restore.
        recompute_s: time to recompute the context.
        cpu_s: time to restore the context from CPU memory; None without CPU memory.
        tiers_s: time to restore the context from each lower tier.
        cpu_stay_s: time that a page stays in CPU memory; None without evictions.
        survival: fraction of KV outside VRAM that is still resident when needed; default 1.
        queue_s: T, admission wait of turns whose KV had left VRAM.
        memoryfulness: η, fraction of T that a pin saves; default 1.
        vram_price: λ, seconds charged per second in VRAM.
    """

    signed: ClassVar[bool] = True
    """Makes ``json_fields.read`` accept negative numbers, because a policy of another package may
    decide anything."""

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
    """The pin after the turn. Times are in seconds.

    Attributes:
        blocks: pinned VRAM blocks.
        held_s: duration of the pin.
        end: reason for the pin's end; None without a pin.
    """

    blocks: int = 0
    held_s: float = 0.0
    end: PinEnd | None = None


@dataclass(frozen=True, slots=True)
class PageMoves:
    """Pages moved between CPU memory and the tiers below.

    Attributes:
        promoted, promoted_bytes: pages promoted for this turn, and their uncompressed size on one
            rank, bytes.
        used: promoted pages that this turn was the first to restore.
        ahead: pages promoted in the gap.
        demoted: pages that the decision demoted.
        evicted: pages evicted in the gap, by tier. Needs an eviction rule with ``waiting_job``,
            such as ``worth``.
        superseded: pages of earlier contexts that the prompt superseded.
    """

    promoted: int = 0
    promoted_bytes: int = 0
    used: int = 0
    ahead: int = 0
    demoted: int = 0
    evicted: Mapping[str, int] = field(default_factory=dict)
    superseded: int = 0


@dataclass(frozen=True, slots=True)
class GapStory:
    """The gap after the turn. Times are in seconds; ``gap_s`` is None if there was no gap.

    Attributes:
        end: event that ended the gap; left out for ``no_gap``.
        gap_s: length of the gap.
        in_vram: true if the job returned while pinned.
        saved_s, cost_s: the decision's B if ``in_vram``, and the decision's λ times the duration of
            the pin.
    """

    end: StoryEnd = StoryEnd.NO_GAP
    gap_s: float | None = None
    in_vram: bool = False
    saved_s: float = 0.0
    cost_s: float = 0.0


_encode = json.JSONEncoder(separators=(",", ":")).encode


class _Room(NamedTuple):
    """Space for texts in a line.

    Attributes:
        request, tool: maximum length of the request id and of the tool's words, bytes.
        whole: True if preemption times and all inputs of the decision are written.
    """

    request: int
    tool: int
    whole: bool


JOB_ROOM = 96
"""Maximum length of a job's name, bytes."""
_WORD_ROOM, _MOST_TIERS = 24, 4
MOST_HINTS = 4
"""Maximum number of hints in a record."""
HINTS_ROOM = MOST_HINTS * (_WORD_ROOM + len('"",'))
_ROOM_OF = {
    **dict.fromkeys(("job", "session", "parent"), JOB_ROOM),
    **dict.fromkeys(("agent", "client", "finish"), _WORD_ROOM),
}
_PRICE = ("tier", "gap_class", "ttl_s", "benefit_s", "vram_price")
_ROOMS = (_Room(96, 120, True), _Room(48, 48, True), _Room(24, 0, True), _Room(24, 0, False))
"""Limits on the texts of a record, tried in this order until the record fits into a line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRecord:
    """A turn, written when its gap ends.

    Attributes:
        job: job name, if any.
        session: job of the session's main agent, if that is another job.
        agent: the agent's id in that session; None for the main agent.
        parent: job whose agent started this agent.
        client: digest of the client's ``cache_salt``, which separates equal job names.
        replica: index among data-parallel engines.
        turn: number of the turn in the job, from 1.
        request: vLLM's request id.
        arrived: arrival time, seconds since the epoch.
        finish: vLLM's finish status, or its request state when the engine stopped.
        tool: the tool that ran in the gap, from general to specific.
        hints: intent and outcome of the last four hints, such as ``pin accepted``.
    """

    job: str | None = None
    session: str | None = None
    agent: str | None = None
    parent: str | None = None
    client: str = ""
    replica: int = 0
    turn: int
    request: str
    arrived: float
    finish: str = ""
    tool: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()
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
        """End of the turn, seconds since the epoch."""
        return self.arrived + self.times.end_s

    def to_line(self) -> str:
        """Return the record as a line of at most ``MAX_BYTES``, without its line break. Long texts
        are cut. Job names are always cut at the same length.
        """
        whole = said(self) | {"arrived": round(self.arrived, 3)}
        line = ""
        for room in _ROOMS:
            line = _encode(_fitted(whole, room))
            if len(line) < MAX_BYTES:
                break
        return line

    @classmethod
    def from_json(cls, found: object) -> TurnRecord:
        """Read a record. Unknown fields are ignored.

        Raises:
            ValueError: the value is not a record. The message gives the reason.
        """
        return read(cls, found)


def _fitted(whole: Mapping[str, Any], room: _Room) -> dict[str, Any]:
    """Return a record as JSON values, with its texts cut to fit."""
    fitted = dict(whole)
    for name, most in (*_ROOM_OF.items(), ("request", room.request)):
        if name in fitted:
            fitted[name] = cut(fitted[name], most)
    if tool := _cut_all(fitted.pop("tool", ()), room.tool):
        fitted["tool"] = tool
    if hints := _cut_all(fitted.pop("hints", ())[-MOST_HINTS:], HINTS_ROOM * room.whole):
        fitted["hints"] = hints
    if "preempted" in fitted:
        fitted["preempted"] = _first(fitted["preempted"], FIRST_PREEMPTIONS * room.whole)
        if not fitted["preempted"]:
            del fitted["preempted"]
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
    """Return ``story`` with at most ``most`` elements in each list, and without empty lists."""
    told = {name: one[:most] if isinstance(one, list) else one for name, one in story.items()}
    return {name: one for name, one in told.items() if one != []}


def _cut_all(texts: Sequence[str], room: int) -> list[str]:
    """Return the first texts that fit into ``room`` bytes. The last text is cut if necessary."""
    kept = list[str]()
    for text in texts:
        if room < _WORD_ROOM:
            break
        kept.append(cut(text, room))
        room -= size(kept[-1]) + len('"",')
    return kept

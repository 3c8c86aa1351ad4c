"""Analysis of a trace: statistics of its turns, jobs, pins and decisions. See docs/trace.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from .traced_jobs import TracedJobs
from .turn_record import PinEnd, StoryEnd
from .turn_table import Column, TurnTable

MOST_TOOLS = 20
"""Number of tools that are reported separately, by number of turns. All other tools are reported
together."""
OTHERS, UNNAMED = "(others)", "(none)"


@dataclass(frozen=True, slots=True)
class Spread:
    """Distribution of durations, seconds."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values: Column) -> Spread | None:
        """Return the distribution of all values that are not NaN; None if there are none."""
        values = values[~np.isnan(values)].astype(float)
        if not len(values):
            return None
        return cls(float(values.mean()), *np.quantile(values, [0.5, 0.9, 0.95, 0.99]).tolist())


@dataclass(frozen=True, slots=True)
class Jobs:
    """The jobs of a trace.

    Attributes:
        jobs: number of jobs.
        cut: number of jobs whose first turn is not in the trace. The completion times of these jobs
            are not counted.
        waiting: number of jobs that were still expected when their engine stopped. The completion
            times of these jobs are counted.
        completion_s: time from the arrival of the first turn to the end of the last turn.
    """

    jobs: int
    cut: int
    waiting: int
    completion_s: Spread | None


@dataclass(frozen=True, slots=True)
class Waits:
    """Waits of turns, seconds.

    Attributes:
        queue_s: time from arrival to admission.
        held_s, pages_s: sums over all turns of two parts of the wait for admission: the time for
            which new jobs were held back, and the time that turns waited for promoted pages.
        first_token_s: time from arrival to the first token.
    """

    queue_s: Spread | None
    held_s: float
    pages_s: float
    first_token_s: Spread | None


@dataclass(frozen=True, slots=True)
class Prompts:
    """Tokens of prompts.

    Attributes:
        tokens: prompt tokens of admitted turns.
        vram, cpu, ssd: fraction of the prompt tokens that was found in this tier; None if there are
            no prompt tokens.
        recomputed: fraction of the prompt tokens that was computed.
        lost: fraction of the prompt tokens that was computed although an earlier turn of the job
            had its KV.
        prefill_saved_s: time that computing the found tokens would have taken. For each turn, this
            is the proportional part of ``recompute_s``, the time to compute the whole context.
    """

    tokens: int
    vram: float | None
    cpu: float | None
    ssd: float | None
    recomputed: float | None
    lost: float | None
    prefill_saved_s: float


@dataclass(frozen=True, slots=True)
class WouldHaveSaved:
    """Prompt tokens that an engine in observe mode computed, and that the connector would have
    found.

    Attributes:
        tokens: number of these tokens.
        vram, cpu, ssd: number of these tokens by tier.
        share: these tokens as a fraction of all prompt tokens; None if there are no prompt tokens.
        prefill_s: time to compute these tokens, estimated as in ``Prompts.prefill_saved_s``.
    """

    tokens: int
    vram: int
    cpu: int
    ssd: int
    share: float | None
    prefill_s: float


@dataclass(frozen=True, slots=True)
class Pins:
    """Pins that ended for the same reason.

    Attributes:
        pins: number of pins.
        held_s: duration of the pins, seconds.
    """

    pins: int
    held_s: Spread | None


@dataclass(frozen=True, slots=True)
class Promotions:
    """Pages promoted from the lower tiers.

    Attributes:
        pages: pages ordered to be promoted, for turns or in advance.
        nbytes: size of the pages promoted for turns, uncompressed, on one rank, bytes.
        used: promoted pages that a turn restored.
        waste: fraction of promoted pages that no turn restored; None if no page was promoted.
    """

    pages: int
    nbytes: int
    used: int
    waste: float | None


@dataclass(frozen=True, slots=True)
class Decisions:
    """Decisions, and the gaps that followed.

    Attributes:
        gaps: gaps that ended because the job returned or is no longer expected.
        gap_s: length of the gaps after which the job returned.
        in_vram: fraction of these gaps whose pin still existed; None if no job returned.
        below_q50, below_q90: fraction of forecast gaps that were not longer than this quantile of
            their forecast; None if no gap was forecast. Good forecasts give 0.5 and 0.9.
        saved_s, cost_s: sums over the gaps of ``GapStory.saved_s`` and ``GapStory.cost_s``.
        best_s: sum of the gains of a clairvoyant policy: B - λ X for each gap of X seconds, or 0 if
            that is negative or the job did not return. B is the decision's ``benefit_s``, and λ its
            ``vram_price``.
        regret_s: ``best_s`` minus the actual gain, ``saved_s - cost_s``.
    """

    gaps: int
    gap_s: Spread | None
    in_vram: float | None
    below_q50: float | None
    below_q90: float | None
    saved_s: float
    cost_s: float
    best_s: float
    regret_s: float


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of a trace.

    Attributes:
        turns: number of turns.
        alone: number of turns that belong to no job.
        span_s: time from the first arrival to the last end, seconds.
        would_have_saved: all 0 unless the engine was in observe mode.
        pins: pins by the reason for their end.
        demoted: pages demoted by decisions.
        superseded: pages of contexts that later prompts of their job superseded.
        by_tool, by_class: decisions by the tool that ran in the gap, and by gap class.
    """

    turns: int
    alone: int
    span_s: float
    jobs: Jobs
    waits: Waits
    prompts: Prompts
    would_have_saved: WouldHaveSaved
    pins: Mapping[str, Pins]
    promotions: Promotions
    demoted: int
    superseded: int
    decisions: Decisions
    by_tool: Mapping[str, Decisions]
    by_class: Mapping[str, Decisions]


def analyze(table: TurnTable) -> Figures:
    """Compute the figures of a trace."""
    arrived = table["arrived"]
    ended = arrived + table["times.end_s"]
    everything = np.ones(len(table), bool)
    return Figures(
        turns=len(table),
        alone=int((table.job < 0).sum()),
        span_s=float(ended.max() - arrived.min()) if len(table) else 0.0,
        jobs=_jobs(TracedJobs.of(table)),
        waits=Waits(
            queue_s=Spread.of(table["times.admitted_s"]),
            held_s=_sum(table["times.held_s"]),
            pages_s=_sum(table["times.pages_s"]),
            first_token_s=Spread.of(table["times.first_token_s"]),
        ),
        prompts=_prompts(table),
        would_have_saved=_would_have_saved(table, _prompts(table).tokens),
        pins=_pins(table),
        promotions=_promotions(table),
        demoted=int(table["pages.demoted"].sum()),
        superseded=int(table["pages.superseded"].sum()),
        decisions=_decisions(table, everything),
        by_tool=_by_tool(table),
        by_class=_by_class(table),
    )


def _jobs(jobs: TracedJobs) -> Jobs:
    whole = jobs.whole.astype(bool)
    return Jobs(
        jobs=len(whole),
        cut=int((~whole).sum()),
        waiting=int(jobs.waiting.sum()),
        completion_s=Spread.of(jobs.completion_s[whole]),
    )


def _prompts(table: TurnTable) -> Prompts:
    found = table["tokens.vram"].astype(float) + table["tokens.cpu"] + table["tokens.ssd"]
    tokens = float(found.sum()) + _sum(table["tokens.recomputed"])
    return Prompts(
        tokens=int(tokens),
        vram=_share(_sum(table["tokens.vram"]), tokens),
        cpu=_share(_sum(table["tokens.cpu"]), tokens),
        ssd=_share(_sum(table["tokens.ssd"]), tokens),
        recomputed=_share(_sum(table["tokens.recomputed"]), tokens),
        lost=_share(_sum(table["tokens.lost"]), tokens),
        prefill_saved_s=_prefill_s(table, found),
    )


def _would_have_saved(table: TurnTable, prompts: int) -> WouldHaveSaved:
    tiers = [table[f"would_have.{tier}"] for tier in ("vram", "cpu", "ssd")]
    found = sum(tiers, np.zeros(len(table)))
    vram, cpu, ssd = (int(tokens.sum()) for tokens in tiers)
    return WouldHaveSaved(
        tokens=vram + cpu + ssd,
        vram=vram,
        cpu=cpu,
        ssd=ssd,
        share=_share(float(found.sum()), prompts),
        prefill_s=_prefill_s(table, found),
    )


def _prefill_s(table: TurnTable, tokens: Column) -> float:
    """Return the time to compute ``tokens`` tokens of each turn, summed over the turns, seconds."""
    context = table["tokens.prompt"].astype(float) + table["tokens.output"]
    return float((table["decision.recompute_s"] * tokens / np.maximum(context, 1.0)).sum())


def _pins(table: TurnTable) -> dict[str, Pins]:
    found = dict[str, Pins]()
    for end in PinEnd:
        held_s = table["pin.held_s"][table.says("pin.end", end.value)]
        if len(held_s):
            found[end.value] = Pins(len(held_s), Spread.of(held_s))
    return found


def _promotions(table: TurnTable) -> Promotions:
    pages = int(table["pages.promoted"].sum() + table["pages.ahead"].sum())
    used = int(table["pages.used"].sum())
    waste = _share(pages - min(used, pages), pages)
    return Promotions(pages, int(table["pages.promoted_bytes"].sum()), used, waste)


def _decisions(table: TurnTable, among: Column) -> Decisions:
    returned = among & table.says("gap.end", StoryEnd.RETURNED.value)
    over = returned | (among & table.says("gap.end", StoryEnd.GIVEN_UP.value))
    gap_s = table["gap.gap_s"].astype(float)
    forecast = returned & ~np.isnan(table["decision.q50_s"])
    q90_s = np.nan_to_num(
        table["decision.q90_s"], nan=np.inf
    )  # None means beyond the longest forecast
    price = table["decision.vram_price"].astype(float)
    best = np.maximum(table["decision.benefit_s"] - price * gap_s, 0.0)[returned].sum()
    saved_s, cost_s = _sum(table["gap.saved_s"][over]), _sum(table["gap.cost_s"][over])
    return Decisions(
        gaps=int(over.sum()),
        gap_s=Spread.of(gap_s[returned]),
        in_vram=_share(float(table["gap.in_vram"][returned].sum()), int(returned.sum())),
        below_q50=_share(
            int((gap_s <= table["decision.q50_s"])[forecast].sum()), int(forecast.sum())
        ),
        below_q90=_share(int((gap_s <= q90_s)[forecast].sum()), int(forecast.sum())),
        saved_s=saved_s,
        cost_s=cost_s,
        best_s=float(best),
        regret_s=float(best) - (saved_s - cost_s),
    )


def _by_tool(table: TurnTable) -> dict[str, Decisions]:
    counts = np.bincount(table.tool, minlength=len(table.tools.of))
    places = np.argsort(-counts, kind="stable")
    found = {
        table.tools.of[place] or UNNAMED: _decisions(table, table.tool == place)
        for place in places[:MOST_TOOLS]
    }
    if len(places) > MOST_TOOLS:
        found[OTHERS] = _decisions(table, np.isin(table.tool, places[MOST_TOOLS:]))
    return found


def _by_class(table: TurnTable) -> dict[str, Decisions]:
    words = table.words["decision.gap_class"].of
    return {
        word or UNNAMED: _decisions(table, table.says("decision.gap_class", word))
        for word in sorted(words)
    }


def _sum(values: Column) -> float:
    return float(values.sum(dtype=float))


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None

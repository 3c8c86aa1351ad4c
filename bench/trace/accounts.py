"""Accounts of one run: the same figure by everybody who tells it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from tiered_kv.bench.replay.play.drive import request_id
from tiered_kv.bench.replay.play.sources import client_name
from tiered_kv.bench.replay.results import TurnDone
from tiered_kv.trace.analysis import Figures, analyze
from tiered_kv.trace.trace_header import recorder_events
from tiered_kv.trace.turn_record import PinEnd, StoryEnd, TurnRecord
from tiered_kv.trace.turn_table import TurnTable

from .names import FAULTS, GAUGED
from .script import Seen

MOST_NAMED = 5
"""Turns that are named where they differ."""
HAPPENED = (
    "prompt_tokens_vram",
    "prompt_tokens_cpu",
    "prompt_tokens_ssd",
    "pages_promoted_used",
    "pages_demoted",
    "pages_evicted",
    "pins",
)
"""Counters that the script must move: figures that are 0 everywhere agree about nothing."""


@dataclass(frozen=True, slots=True)
class Account:
    """A figure, by everybody who tells it.

    Attributes:
        figures: the figure by who tells it.
        about: what is told besides, to find a disagreement's reason.
    """

    what: str
    figures: Mapping[str, object]
    about: object = None

    @property
    def agrees(self) -> bool:
        """True if all say the same."""
        first, *others = self.figures.values()
        return all(other == first for other in others)

    def to_json(self) -> dict[str, object]:
        """The account, without what is not told."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def accounts(seen: Seen) -> list[Account]:
    """All accounts of a run."""
    figures = analyze(TurnTable(seen.records))
    return [
        *_tokens(seen, figures),
        *_turns(seen, figures),
        *_pins(seen, figures),
        *_pages(seen, figures),
        *_jobs(seen, figures),
        *_steps(seen),
        *_happened(seen),
    ]


def _answered(seen: Seen) -> dict[str, TurnDone]:
    """Turns as the clients saw them, by the name of the request."""
    return {
        request_id(job.name, turn.turn): turn
        for job in (*seen.played, *seen.left_open)
        for turn in job.turns
    }


def _tokens(seen: Seen, figures: Figures) -> Iterator[Account]:
    answered, counters = _answered(seen).values(), seen.status["counters"]
    metrics, prompts = seen.metrics, figures.prompts
    traced = Counter[str]()
    for one in seen.records:
        tokens = one.tokens
        traced += Counter(
            vram=tokens.vram,
            cpu=tokens.cpu,
            ssd=tokens.ssd,
            recomputed=tokens.recomputed,
            prompt=tokens.prompt,
            answers=tokens.output,
        )
    sources = ("vram", "cpu", "recomputed")  # what came from SSD came through CPU memory

    def counted(by: Mapping[str, int]) -> int:
        return sum(by[f"prompt_tokens_{source}"] for source in sources)

    yield Account(
        "tokens of prompts",
        {
            "client": sum(turn.prompt_tokens for turn in answered),
            "trace": traced["prompt"],
            "analyze": prompts.tokens,
            "metrics": counted(metrics),
            "status": counted(counters),
            "vllm": metrics["prompt_tokens"],
        },
    )
    yield Account(
        "tokens of prompts that were found",
        {
            "client": sum(turn.cached_tokens for turn in answered),
            "trace": traced["vram"] + traced["cpu"] + traced["ssd"],
            "metrics": metrics["prompt_tokens_vram"] + metrics["prompt_tokens_cpu"],
            "vllm": metrics["cached_tokens"],
        },
    )
    yield Account(
        "tokens of answers",
        {
            "client": sum(turn.output_tokens for turn in answered),
            "trace": traced["answers"],
            "vllm": metrics["answer_tokens"],
        },
    )
    shares = {
        "vram": prompts.vram,
        "cpu": (prompts.cpu or 0.0) + (prompts.ssd or 0.0),
        "ssd": prompts.ssd,
        "recomputed": prompts.recomputed,
    }
    by_trace = {**traced, "cpu": traced["cpu"] + traced["ssd"]}
    for source, share in shares.items():
        yield Account(
            f"tokens of prompts, {source}",
            {
                "trace": by_trace.get(source, 0),
                "analyze": round((share or 0.0) * prompts.tokens),
                "metrics": metrics[f"prompt_tokens_{source}"],
                "status": counters[f"prompt_tokens_{source}"],
            },
        )


def _turns(seen: Seen, figures: Figures) -> Iterator[Account]:
    answered = _answered(seen)
    yield Account(
        "turns",
        {
            "client": len(answered),
            "trace": len(seen.records),
            "analyze": figures.turns,
            "metrics": seen.metrics["turns"],
            "status": seen.status["counters"]["turns"],
            "vllm": seen.metrics["requests"],
        },
    )
    differing = list(_differing(answered, seen.records))
    yield Account(
        "turns of which client and trace tell different things",
        {"found": len(differing), "should be": 0},
        differing[:MOST_NAMED] or None,
    )
    yield Account(
        "preemptions",
        {
            "trace": sum(one.preempted.count for one in seen.records),
            "vllm": seen.metrics["preemptions"],
        },
    )


def _differing(
    answered: Mapping[str, TurnDone], records: Sequence[TurnRecord]
) -> Iterator[dict[str, object]]:
    """Turns whose lengths are not the same by client and trace, or that only one of them has."""
    traced = {client_name(one.request) or one.request: one for one in records}
    for name in answered.keys() | traced.keys():
        turn, record = answered.get(name), traced.get(name)
        client = turn and (turn.turn, turn.prompt_tokens, turn.cached_tokens, turn.output_tokens)
        tokens = record and record.tokens
        trace = (
            record
            and tokens
            and (
                record.turn,
                tokens.prompt,
                tokens.vram + tokens.cpu + tokens.ssd,
                tokens.output,
            )
        )
        if client != trace:
            yield {"request": name, "client": client, "trace": trace}


def _pins(seen: Seen, figures: Figures) -> Iterator[Account]:
    counters = seen.status["counters"]
    yield Account(
        "pins",
        {
            "trace": sum(one.pin.end is not None for one in seen.records),
            "analyze": sum(one.pins for one in figures.pins.values()),
            "recorder": _recorded(seen, "pinned_time"),
            "metrics": seen.metrics["pins"],
            "status": counters["pins"],
        },
    )
    still = seen.status["pins"]["jobs"]
    ended = figures.pins.get(PinEnd.CLOSED.value)
    expired = figures.pins.get(PinEnd.EXPIRED.value)
    # Those that were held at the last look expired since, or ended with the engine.
    late = (ended.pins if ended else 0) + (expired.pins if expired else 0)
    yield Account(
        "pins that expired, or were held to the end",
        {"analyze": late, "status": counters["pins_ended_expired"] + still},
    )


def _recorded(seen: Seen, event: str) -> int:
    return sum(event in one for job in recorder_events(seen.records).values() for one in job)


def _pages(seen: Seen, figures: Figures) -> Iterator[Account]:
    counters, gauges = seen.status["counters"], seen.status["gauges"]
    yield Account(
        "pages that came up",
        {
            "trace": sum(one.pages.promoted + one.pages.ahead for one in seen.records),
            "analyze": figures.promotions.pages,
            "metrics": seen.metrics["pages_promoted"],
            "status": counters["pages_promoted"],
        },
    )
    yield Account(
        "pages that came up and were used",
        {
            "analyze": figures.promotions.used,
            "metrics": seen.metrics["pages_promoted_used"],
            "status": counters["pages_promoted_used"],
        },
    )
    told = sum(one.pages.evicted.get("cpu", 0) for one in seen.records)
    yield Account(
        "evictions of a job's pages that are more than all",
        {"found": max(0, told - seen.metrics["pages_evicted"]), "should be": 0},
    )
    for name in GAUGED:
        yield Account(f"gauge {name}", {"metrics": seen.metrics[name], "status": gauges[name]})
    for name in ("pages_evicted", "pages_demoted", "pages_restored", "jobs_held"):
        yield Account(name, {"metrics": seen.metrics[name], "status": counters[name]})


def _jobs(seen: Seen, figures: Figures) -> Iterator[Account]:
    yield Account(
        "jobs",
        {
            "client": len(seen.played) + len(seen.left_open),
            "analyze": figures.jobs.jobs,
            "recorder": len(recorder_events(seen.records)),
        },
    )
    yield Account(
        "jobs that are waited for, and their turns",
        {
            "client": {job.name: len(job.turns) for job in seen.left_open},
            "jobs": {job["id"]: job["turn"] for job in seen.open_jobs},
            "trace": {one.job: one.turn for one in seen.records if one.gap.end is StoryEnd.CLOSED},
        },
    )
    yield Account(
        "number of jobs that are waited for",
        {
            "client": len(seen.left_open),
            "status": seen.status["jobs"]["known"],
            "analyze": figures.jobs.waiting,
        },
    )


def _steps(seen: Seen) -> Iterator[Account]:
    again = sum(one.preempted.count for one in seen.records)
    if not again:  # else some of it is computed twice
        recomputed = sum(one.tokens.recomputed for one in seen.records)
        answers = sum(one.tokens.output for one in seen.records)
        yield Account(
            "tokens of prompts that were computed",
            {"steps": seen.steps.prefill_tokens, "trace": recomputed},
        )
        yield Account(
            "tokens of answers but for the first ones",
            {"steps": seen.steps.decode_tokens, "trace": answers - len(seen.records)},
        )


def _happened(seen: Seen) -> Iterator[Account]:
    counters = seen.status["counters"]
    never = [name for name in HAPPENED if not counters[name]]
    yield Account("what did not happen", {"found": never, "should be": []})
    wrong = [name for name in FAULTS if counters[name] or seen.metrics[name]]
    yield Account("faults", {"found": wrong, "should be": []})

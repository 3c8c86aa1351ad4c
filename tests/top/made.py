"""Snapshots that tests make."""

from __future__ import annotations

from dataclasses import replace

from rich.console import Console

from tiered_kv.metrics import COUNTERS
from tiered_kv.top.readings import (
    CpuReading,
    Decided,
    EngineReading,
    JobCounts,
    JobReading,
    Kind,
    LowerReading,
    Place,
    State,
    Transfer,
    VramReading,
)
from tiered_kv.top.render.screen import frame, printed, rows_of
from tiered_kv.top.render.wording import Canvas
from tiered_kv.top.view import Growth, Snapshot, View

NOW = 1_800_000_000.0
GIB = 1 << 30
URL = "http://127.0.0.1:8000"
FAST, SLOW = Kind("fast", "pin"), Kind("slow", "store")
NO_CPU = CpuReading(0, 0, 0, 0, 0, 0)


def engine(rank: int = 0, **changes: object) -> EngineReading:
    """An engine in the middle of its work."""
    made = EngineReading(
        engine=rank,
        now=NOW,
        policy="tiered",
        vram=VramReading(blocks=1000, free=500, findable=700, pinned=100, nbytes=57 * GIB),
        cpu=CpuReading(
            slots=4000,
            free_slots=1000,
            compressed_slots=800,
            pages=3400,
            compressed_pages=1200,
            nbytes=32 * GIB,
        ),
        below=(LowerReading("ssd", 12_345, 200 * GIB, 50 * GIB),),
        jobs=JobCounts(
            known=12,
            waiting=6,
            running=3,
            queued=1,
            held=2,
            pins=2,
            pinned_blocks=100,
            most_pinned=900,
            expected_up=1,
        ),
        transfers={"save": Transfer(2, 31), "promote": Transfer(1, 64)},
        decided=Decided(NOW - 300, {FAST: 12, SLOW: 3, Kind(None, "cpu"): 1}),
        counters={
            **dict.fromkeys(COUNTERS, 0),
            "prompt_tokens_vram": 5_000,
            "prompt_tokens_cpu": 3_000,
            "prompt_tokens_ssd": 1_000,
            "prompt_tokens_recomputed": 2_000,
        },
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def new_engine(rank: int = 0) -> EngineReading:
    """An engine to which nobody has come yet."""
    return engine(
        rank,
        vram=VramReading(blocks=1000, free=1000, findable=0, pinned=0, nbytes=57 * GIB),
        cpu=CpuReading(4000, 4000, 0, 0, 0, 32 * GIB),
        below=(LowerReading("ssd", 0, 200 * GIB, 0),),
        jobs=JobCounts(0, 0, 0, 0, 0, 0, 0, 900, 0),
        transfers={},
        decided=Decided(None, {}),
        counters=dict.fromkeys(COUNTERS, 0),
    )


def job(number: int = 1, **changes: object) -> JobReading:
    """A job that waits pinned and is expected back in three seconds."""
    made = JobReading(
        name=f"job-{number}",
        engine=0,
        number=number,
        turn=3,
        state=State.WAITING,
        since=NOW - 2.0,
        context_tokens=12_345,
        place=Place.VRAM,
        pinned_blocks=50,
        until=NOW + 28.0,
        back_at=None,
        q50_s=5.0,
        q90_s=30.0,
        kind=FAST,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def snapshot(*jobs: JobReading, engines: tuple[EngineReading, ...] = ()) -> Snapshot:
    """A server with these jobs, seen for the second time."""
    found = engines or (engine(),)
    grown = Growth(10.0, {"prompt_tokens_vram": 30, "prompt_tokens_recomputed": 70})
    return Snapshot(
        url=URL,
        version="0.1.0",
        vllm_version="0.32.0",
        engines=found,
        all_engines=tuple(one.engine for one in found),
        growth={one.engine: grown for one in found},
        jobs=jobs,
        whole=True,
    )


def shown(
    seen: Snapshot,
    width: int = 120,
    height: int | None = 40,
    view: View | None = None,
    *,
    unicode: bool = True,
) -> list[str]:
    """The lines of a frame, without the spaces at their ends; without a height, of one that is
    printed."""
    canvas, wanted = Canvas(width, height, unicode), view or View()
    wanted = wanted.within(len(wanted.of(seen).jobs), rows_of(seen, wanted, canvas))
    console = Console(width=width, height=height or 10_000, color_system=None, legacy_windows=False)
    part = frame(seen, wanted, canvas) if height is not None else printed(seen, wanted, canvas)
    with console.capture() as captured:
        console.print(part, height=height)
    return [line.rstrip(" ") for line in captured.get().removesuffix("\n").split("\n")]

"""Server states created by tests."""

from __future__ import annotations

from dataclasses import replace

from rich.console import Console

from tiered_kv.metrics import COUNTERS
from tiered_kv.status import (
    Cpu,
    DecisionCount,
    Decisions,
    EngineStatus,
    JobCounts,
    JobDecision,
    JobKv,
    JobState,
    JobStatus,
    LowerTier,
    Pins,
    Quantiles,
    Queues,
    ServerStatus,
    Tiers,
    Transfers,
    Vram,
    Where,
)
from tiered_kv.top.screen import frame, printed, rows_of
from tiered_kv.top.server_state import Growth, ServerState
from tiered_kv.top.view import View
from tiered_kv.top.wording import Canvas

NOW = 1_800_000_000.0
GIB = 1 << 30
URL = "http://127.0.0.1:8000"
FAST = JobDecision("pin", 30.0, "fast")
VRAM = Vram(
    blocks=1000,
    free_blocks=500,
    cached_blocks=700,
    pinned_blocks=100,
    block_tokens=16,
    bytes=57 * GIB,
)
CPU = Cpu(
    pages=3400,
    slots=4000,
    free_slots=1000,
    bytes=32 * GIB,
    used_bytes=24 * GIB,
    compressed_pages=1200,
    compressed_slots=800,
    compressed_share=0.35,
)
SSD = LowerTier("ssd", 12_345, 200 * GIB, 50 * GIB, promoting_pages=64, demoting_pages=0)
NO_LOWER = Tiers(VRAM, Cpu(0, 0, 0, 0, 0, 0, 0, 0.0), ())


def engine(rank: int = 0, **changes: object) -> EngineStatus:
    """Return the status of a busy engine."""
    made = EngineStatus(
        engine=rank,
        now=NOW,
        steps=1000,
        mode="offload",
        policy="tiered",
        eviction="worth",
        admission="auto",
        tiers=Tiers(VRAM, CPU, (SSD,)),
        pins=Pins(jobs=2, blocks=100, most_blocks=900),
        jobs=JobCounts(known=12, begun=4, waiting=6, held=2),
        queues=Queues(running=3, queued=1, held=2, orders_in_flight=3, prefetches=1),
        transfers={"save": Transfers(2, 31), "promote": Transfers(1, 64)},
        decisions=Decisions(
            16,
            NOW - 300,
            (
                DecisionCount("fast", "pin", 12),
                DecisionCount("slow", "store", 3),
                DecisionCount(None, "cpu", 1),
            ),
        ),
        counters={
            **dict.fromkeys(COUNTERS, 0),
            "prompt_tokens_vram": 5_000,
            "prompt_tokens_cpu": 3_000,
            "prompt_tokens_ssd": 1_000,
            "prompt_tokens_recomputed": 2_000,
        },
        gauges={},
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def new_engine(rank: int = 0) -> EngineStatus:
    """Return the status of an engine that has received no request."""
    return engine(
        rank,
        tiers=Tiers(
            replace(VRAM, free_blocks=1000, cached_blocks=0, pinned_blocks=0),
            Cpu(0, 4000, 4000, 32 * GIB, 0, 0, 0, 0.0),
            (replace(SSD, pages=0, used_bytes=0),),
        ),
        pins=Pins(0, 0, 900),
        jobs=JobCounts(0, 0, 0, 0),
        queues=Queues(0, 0, 0, 0, 0),
        transfers={},
        decisions=Decisions(0, None, ()),
        counters=dict.fromkeys(COUNTERS, 0),
    )


def job(
    number: int = 1,
    *,
    where: Where = Where.VRAM,
    until: float | None = NOW + 28.0,
    back_at: float | None = None,
    gap: Quantiles | None = Quantiles(5.0, 30.0),  # noqa: B008 - frozen
    **changes: object,
) -> JobStatus:
    """Return a job that is pinned between turns, and expected back in three seconds."""
    made = JobStatus(
        id=f"job-{number}",
        engine=0,
        number=number,
        salted=False,
        turn=3,
        state=JobState.WAITING,
        began=NOW - 100.0,
        since=NOW - 2.0,
        context_tokens=12_345,
        kv=JobKv(where, 50, until, back_at),
        forecast=gap,
        decision=FAST,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def server(*jobs: JobStatus, engines: tuple[EngineStatus, ...] = ()) -> ServerState:
    """Return the state of a server with these jobs, at the second poll."""
    status = ServerStatus("0.1.0", "0.32.0", engines or (engine(),))
    grown = Growth(10.0, {"prompt_tokens_vram": 30, "prompt_tokens_recomputed": 70})
    return ServerState(
        url=URL,
        status=status,
        growth={one.engine: grown for one in status.engines},
        jobs=jobs,
        whole=True,
    )


def shown(
    seen: ServerState,
    width: int = 120,
    height: int | None = 40,
    view: View | None = None,
    *,
    unicode: bool = True,
) -> list[str]:
    """Return the lines of a frame, without trailing spaces. Without a height, the output is as for
    --once."""
    canvas, wanted = Canvas(width, height, unicode), view or View()
    wanted = wanted.within(len(wanted.of(seen).jobs), rows_of(seen, wanted, canvas))
    console = Console(width=width, height=height or 10_000, color_system=None, legacy_windows=False)
    part = frame(seen, wanted, canvas) if height is not None else printed(seen, wanted, canvas)
    with console.capture() as captured:
        console.print(part, height=height)
    return [line.rstrip(" ") for line in captured.get().removesuffix("\n").split("\n")]

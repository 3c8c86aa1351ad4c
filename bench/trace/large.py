"""A trace of many turns, and the time and memory that its analysis takes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tiered_kv.trace.trace_file import TraceFile
from tiered_kv.trace.trace_header import TraceHeader
from tiered_kv.trace.turn_record import (
    GapStory,
    PageMoves,
    PinEnd,
    PinStory,
    PricedDecision,
    StoryEnd,
    TurnRecord,
    TurnTimes,
    TurnTokens,
)

TURNS_OF_A_JOB = 10
AT_ONCE = 1000
FILE_BYTES = 1 << 30
"""Size of a file here: more than a server's, so that none of the turns is deleted."""
TOOLS = ("pytest", "ls", "cat", "git", "sed", "grep", "python", "make")
ANALYZE = """
import sys
from pathlib import Path
from tiered_kv.cli.app import app
try:
    app(["trace", "analyze", sys.argv[1], "--json"])
finally:
    Path(sys.argv[2]).write_text(Path("/proc/self/status").read_text())
"""
"""Program that analyses a trace, and leaves what the kernel says of it. Its resource usage would
count the memory of the process that started it."""


@dataclass(frozen=True, slots=True)
class Analyzed:
    """An analysis of a trace by the command line.

    Attributes:
        turns: turns that it found. nbytes: size of the trace.
        seconds: time until it ended. cpu_s: processor time of it.
        mib: the most memory that it took.
    """

    turns: int
    nbytes: int
    seconds: float
    cpu_s: float
    mib: float


def analyze_many(turns: int, folder: Path, seed: int) -> Analyzed:
    """Write a trace of that many turns, and analyse it in a process of its own.

    Raises:
        RuntimeError: the analysis failed.
    """
    path = folder / "large.jsonl"
    file = TraceFile(path, _header().to_line(), FILE_BYTES)
    lines = list[str]()
    for one in _records(turns, seed):
        lines.append(one.to_line())
        if len(lines) == AT_ONCE:
            file.append(lines)
            lines.clear()
    if lines:
        file.append(lines)
    file.close()
    nbytes = sum(one.stat().st_size for one in folder.glob("large.jsonl*"))
    out, status_file = folder / "analysis.json", folder / "status"
    began = time.perf_counter()
    with out.open("wb") as said:
        command = [sys.executable, "-c", ANALYZE, str(path), str(status_file)]
        child = subprocess.Popen(command, stdout=said)
        _, status, used = os.wait4(child.pid, 0)
    seconds = time.perf_counter() - began
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise RuntimeError(f"the analysis ended with status {child.returncode}")
    found = json.loads(out.read_text())
    cpu_s = used.ru_utime + used.ru_stime
    peak = re.search(r"^VmHWM:\s+(\d+) kB$", status_file.read_text(), re.MULTILINE)
    assert peak is not None, "Linux tells it"
    return Analyzed(found["turns"], nbytes, seconds, cpu_s, int(peak[1]) / 1024)


def _header() -> TraceHeader:
    return TraceHeader(
        version="bench",
        started=1.79e9,
        clock=0.0,
        model="model",
        policy="occupancy",
        block_size=16,
        vram_blocks=4096,
    )


def _records(turns: int, seed: int) -> Iterator[TurnRecord]:
    """Turns of jobs, as a busy server writes them: numbers of many digits, ids as clients make
    them, all that a price is made of."""
    rng = np.random.default_rng(seed)
    for at in range(turns):
        if not at % AT_ONCE:
            drawn = rng.random((AT_ONCE, 12))
        one = drawn[at % AT_ONCE].tolist()
        job, number = divmod(at, TURNS_OF_A_JOB)
        last = number == TURNS_OF_A_JOB - 1
        prompt = 2_000 + int(30_000 * one[0])
        vram, cpu, ssd = (
            int(prompt * one[1] / 3),
            int(prompt * one[2] / 3),
            int(prompt * one[3] / 3),
        )
        pinned = one[4] < 0.5 and not last
        yield TurnRecord(
            job=f"0199c7a4-5b7e-7d31-a7c2-{job:012x}",
            turn=number + 1,
            request=f"chatcmpl-{at:032x}-0-0123abcd",
            arrived=1.79e9 + at / 20,
            finish="FINISHED_STOPPED",
            tool=("bash", TOOLS[at % len(TOOLS)], f"{TOOLS[at % len(TOOLS)]} <path>"),
            times=TurnTimes(0.0, one[5], 1 + one[5], 1.1 + one[5], 2 + one[6], 4 + 9 * one[6]),
            tokens=TurnTokens(prompt, vram, cpu, ssd, prompt - vram - cpu - ssd, 0, 700, 200),
            decision=PricedDecision(
                tier="pin" if pinned else "cpu",
                gap_class="fast" if pinned else "slow",
                ttl_s=60.0 * pinned,
                q50_s=4 * one[7],
                q90_s=30 * one[7],
                benefit_s=one[8],
                restore_s=one[8] / 2,
                recompute_s=3 * one[8],
                cpu_s=one[8] / 2,
                tiers_s={"ssd": one[8]},
                cpu_stay_s=100 * one[9],
                survival=one[9],
                queue_s=one[10],
                vram_price=0.01 * one[11],
            ),
            pin=PinStory(prompt // 16, 6 * one[7], PinEnd.RETURNED) if pinned else PinStory(),
            pages=PageMoves(ssd // 16, 131_072 * (ssd // 16), ssd // 16, 0, cpu // 16),
            gap=GapStory(StoryEnd.OVER)
            if last
            else GapStory(StoryEnd.RETURNED, 6 * one[7], pinned, one[8] * pinned, 0.01 * one[11]),
        )

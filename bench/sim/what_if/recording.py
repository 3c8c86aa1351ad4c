"""The recording of an engine and its machine: sizes from the header, speeds from the turns."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tiered_kv.bench.servers.server_costs import STEP_TOKENS, FittedCost, Span, fit_steps
from tiered_kv.bench.sim.engine.machines import Machine, Tiers
from tiered_kv.errors import TieredKVError
from tiered_kv.trace.trace_header import TraceHeader
from tiered_kv.trace.trace_reader import BadLine, TraceReader
from tiered_kv.trace.turn_record import TurnRecord

MOST_TURNS = 10_000
"""Maximum number of turns to simulate, from the start of the trace. The limit bounds time and
memory."""

Engine = tuple[int, float]
"""An engine: its data-parallel index, and the start time of its trace."""
FULL = "full"
"""KV type of full attention."""
CPU, SSD = "cpu", "ssd"
ASSUMED_KV_BYTES = 64 << 10
"""KV bytes per token, if the trace lacks this size. Only its ratios to other sizes matter."""
ASSUMED_RUNNING = 256
ASSUMED_COPY_S = 10e-6
"""Time to copy a token's KV from CPU memory to VRAM, if the trace lacks this time, seconds."""
SSD_TIMES = 4.0
"""Time to read a token's KV from SSD, as a multiple of the time to copy it, if the trace lacks this
time."""
WRITE_SHARE = 0.8
"""Speed of writing to SSD, as a fraction of the speed of reading."""
LEAST_KV = 8
"""The simulator's KV bytes per token are a multiple of this number."""
NO_END_BYTES = 1 << 44
MOST_BLOCKS, MOST_BLOCK_TOKENS, MOST_CONTEXT = 4_000_000, 65_536, 4_000_000
"""Maximum sizes to simulate, far beyond any engine's sizes."""


class WhatIfError(TieredKVError):
    """A trace that cannot be simulated. The message gives the reason."""


@dataclass(frozen=True, slots=True)
class Recording:
    """Turns of an engine, in the order in which their gaps ended.

    Attributes:
        left_out: number of turns of other engines.
        cut: True if the trace has more turns than were read.
        bad_lines: number of invalid lines.
        bad: the first invalid lines.
    """

    path: Path
    header: TraceHeader
    turns: tuple[TurnRecord, ...]
    left_out: int
    cut: bool
    bad_lines: int
    bad: tuple[BadLine, ...]


def read_recording(path: Path, most: int = MOST_TURNS) -> Recording:
    """Read the first turns of a trace. Returns the turns of the engine with the most turns.

    Args:
        most: maximum number of turns to read.

    Raises:
        FileNotFoundError: the trace does not exist.
        WhatIfError: the trace has no turns, or does not identify their engine.
    """
    reader = TraceReader(path)
    turns, headers = defaultdict[Engine, list[TurnRecord]](list), dict[Engine, TraceHeader]()
    latest, seen, count, cut = dict[int, Engine](), 0, 0, False
    for turn in reader:
        if count == most:
            cut = True
            break
        for header in reader.headers[seen:]:
            latest[header.replica] = header.replica, header.started
            headers[latest[header.replica]] = header
        seen = len(reader.headers)
        if turn.replica in latest:
            turns[latest[turn.replica]].append(turn)
            count += 1
    if not turns:
        raise WhatIfError(
            f"{path} cannot be simulated: no turn follows a header, and only headers contain the "
            "engine's size"
        )
    chosen, found = max(turns.items(), key=lambda one: len(one[1]))
    left_out, bad = count - len(found), tuple(reader.bad)
    return Recording(path, headers[chosen], tuple(found), left_out, cut, reader.bad_lines, bad)


@dataclass(frozen=True, slots=True)
class RecordedMachine:
    """A simulated stand-in for the recorded machine.

    Attributes:
        fitted: step costs, fitted to the turns.
        assumed: assumptions for data that the trace lacks, one sentence each.
    """

    machine: Machine
    tiers: Tiers
    fitted: FittedCost
    assumed: list[str]


def longest_context(header: TraceHeader) -> int:
    """Return the length of the longest context that the simulator can hold on the recorded machine,
    tokens.
    """
    pool = header.vram_blocks * header.block_size
    return min(pool, header.context_tokens or pool, MOST_CONTEXT) - 1


def recorded_machine(recording: Recording) -> RecordedMachine:
    """Derive the machine of a recording.

    Raises:
        WhatIfError: the simulator cannot represent the machine, or there are too few turns.
    """
    header, assumed = recording.header, list[str]()
    block, blocks, pool = (
        header.block_size,
        header.vram_blocks,
        header.block_size * header.vram_blocks,
    )
    if not (1 <= block <= MOST_BLOCK_TOKENS and 1 <= blocks <= MOST_BLOCKS):
        raise WhatIfError(
            f"the trace's header has vram_blocks={blocks} and block_size={block}: the simulator "
            f"supports 1 to {MOST_BLOCKS:,} blocks of 1 to {MOST_BLOCK_TOKENS:,} tokens"
        )
    if header.groups and header.groups != (FULL,):
        raise WhatIfError(
            f"the engine keeps several types of KV ({', '.join(header.groups)}), which a trace "
            "does not describe fully: only models with full attention in all layers can be "
            "simulated"
        )
    kv_bytes = max(LEAST_KV, header.page_bytes // block // LEAST_KV * LEAST_KV)
    cpu = float(header.tiers_bytes.get(CPU, 0))
    ssd = float(header.tiers_bytes.get(SSD, 0) or NO_END_BYTES)
    if not header.page_bytes:
        kv_bytes = ASSUMED_KV_BYTES
        every = sum(max(0, one.tokens.new + one.tokens.output) for one in recording.turns)
        cpu = ssd = 2.0 * kv_bytes * (every + pool)
        assumed.append(
            "The trace lacks the KV size per token. Tiers are assumed to hold everything."
        )
    if others := sorted(header.tiers_bytes.keys() - {CPU, SSD}):
        assumed.append(
            f"Tiers that the simulator does not support are left out: {', '.join(others)}."
        )
    step_tokens, running = header.step_tokens, header.running
    if not (1 <= running <= step_tokens <= MOST_CONTEXT):  # vLLM ensures this order
        step_tokens, running = STEP_TOKENS, ASSUMED_RUNNING
        assumed.append(
            f"A step is assumed to compute up to {step_tokens:,} tokens of {running} requests."
        )
    copy_s, read_s = _copies(recording.turns, header, assumed)
    fitted = fit_turns(recording.turns, step_tokens, copy_s)
    machine = Machine(
        "recorded",
        pool,
        kv_bytes,
        longest_context(header) + 2,
        fitted.cost,
        link=kv_bytes / copy_s,
        ssd_read=kv_bytes / read_s,
        ssd_write=WRITE_SHARE * kv_bytes / read_s,
        batched_tokens=step_tokens,
        max_seqs=running,
        block=block,
    )
    tiers = Tiers(min(cpu, float(MOST_BLOCKS * kv_bytes * block)), ssd)
    return RecordedMachine(machine, tiers, fitted, assumed)


def fit_turns(turns: Sequence[TurnRecord], step_tokens: int, copy_s_per_token: float) -> FittedCost:
    """Fit the cost of a step to the turns of one engine.

    Args:
        step_tokens: maximum tokens per step.
        copy_s_per_token: seconds to copy a token's KV from CPU memory to VRAM.

    Raises:
        WhatIfError: there are too few turns with times and answers.
    """
    spans = []
    for one in turns:
        times, tokens = one.times, one.tokens
        if times.scheduled_s is None or times.first_token_s is None or tokens.output < 1:
            continue
        restored_s = max(0, tokens.cpu + tokens.ssd) * copy_s_per_token
        aside = times.scheduled_s - (times.admitted_s or 0.0) >= restored_s / 2
        spans.append(
            Span(
                one.arrived + times.scheduled_s,
                one.arrived + times.first_token_s,
                one.ended,
                tokens.prompt,
                max(1, tokens.recomputed),
                tokens.output,
                copied=0.0 if aside else restored_s,
            )
        )
    try:
        return fit_steps([spans], step_tokens)
    except ValueError as error:
        raise WhatIfError(f"{error}: record more turns") from error


def _copies(
    turns: Sequence[TurnRecord], header: TraceHeader, assumed: list[str]
) -> tuple[float, float]:
    """Return the seconds to copy a token's KV from CPU memory to VRAM, and to read it from SSD.
    Appends to ``assumed``.
    """
    copies, reads = list[float](), list[float]()
    for one in turns:
        context, costs = one.tokens.prompt + one.tokens.output, one.decision
        if not costs.cpu_s or costs.cpu_s <= 0 or context <= 0:
            continue
        tokens = -(-context // header.block_size) * header.block_size
        copies.append(costs.cpu_s / tokens)
        reads.append((costs.tiers_s.get(SSD, 0.0) - costs.cpu_s) / tokens)
    reads = [read_s for read_s in reads if read_s > 0]
    copy_s = float(np.median(copies)) if copies else ASSUMED_COPY_S
    if not copies:
        assumed.append("The trace lacks the speed of copies from CPU memory, which is assumed.")
    # Queueing prolongs reads, so the shorter reads show the disk's speed.
    read_s = float(np.quantile(reads, 0.25)) if reads else SSD_TIMES * copy_s
    if not reads and SSD in header.tiers_bytes:
        assumed.append("The trace lacks the speed of the SSD, which is assumed.")
    return copy_s, read_s

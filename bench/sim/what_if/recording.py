"""Recording of one engine: the records of a trace that a simulation can take."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from tiered_kv.errors import TieredKVError
from tiered_kv.trace.trace_header import TraceHeader
from tiered_kv.trace.trace_reader import BadLine, TraceReader
from tiered_kv.trace.turn_record import TurnRecord

MOST_TURNS = 10_000
"""Turns that are simulated, the first of a trace: so that time and memory have an end."""

Engine = tuple[int, float]
"""An engine: its index among data-parallel ones, and when it began with the trace."""


class WhatIfError(TieredKVError):
    """A trace that cannot be simulated; the message says why."""


@dataclass(frozen=True, slots=True)
class Recording:
    """Turns of one engine, in the order in which their stories ended.

    Attributes:
        left_out: turns of other engines.
        cut: True if the trace goes on behind the turns that were read.
        bad_lines: number of lines that are no records. bad: the first of them.
    """

    path: Path
    header: TraceHeader
    turns: tuple[TurnRecord, ...]
    left_out: int
    cut: bool
    bad_lines: int
    bad: tuple[BadLine, ...]


def read_recording(path: Path, most: int = MOST_TURNS) -> Recording:
    """Read the first turns of a trace, those of the engine that has most of them.

    Args:
        most: turns that are read.

    Raises:
        FileNotFoundError: there is no such trace.
        WhatIfError: it has no turn, or does not say of which engine.
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
            f"{path} holds no turn behind a header, which has the size of the engine: "
            "nothing can be simulated"
        )
    chosen, found = max(turns.items(), key=lambda one: len(one[1]))
    left_out, bad = count - len(found), tuple(reader.bad)
    return Recording(path, headers[chosen], tuple(found), left_out, cut, reader.bad_lines, bad)

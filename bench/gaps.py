"""Recorded agent sessions as turns and the gaps after them, for benchmarks of policies.

The format is detected from the file's content, not from its name:

- coding-agent sessions (JSON lines with ``reqs``): a gap is included if both of its ends were
  recorded. The sessions name no tools. After an answer without a tool call (``end_turn``), the gap
  is the wait for a person, which a server can detect from the answer. Otherwise the tool is
  unknown. Sub-agents are separate sessions in their parent's cross-validation fold. Copies
  (``dup``) are left out.
- request logs (JSON lines with ``session_id``, ``timestamp``, ``input``, ``output``): gaps run from
  request to request, so they include both model time and tool time. The tool is parsed from the
  answer, and a token is assumed to have four characters.
- tool rounds (JSON lines with ``session_id`` and ``tools``): the gap is the round's longest tool
  call.
- tool calls (CSV with ``action`` and ``execution_time_s``): one command per row.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile
from pathlib import Path

from tiered_kv.bench.agents.recorded_rows import Row, read_rows, read_table
from tiered_kv.json_fields import lines_of, open_lines
from tiered_kv.policies.base import NO_TOOL, JobKey, ToolUse, TurnEnd
from tiered_kv.policies.tools.calls import ToolCall, read_tool_calls
from tiered_kv.policies.tools.tool_use import tool_use

CHARS_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class Gap:
    """The end of a turn, and the seconds until the job's next turn."""

    turn: TurnEnd
    gap_s: float


@dataclass(frozen=True, slots=True)
class Session:
    """A recorded job.

    Attributes:
        split_by: id whose hash selects the job's cross-validation fold: the session's id, or its
            parent's id.
        gaps: gaps in the order of the turns; never empty.
        model: name of the model that served most turns; empty if not recorded.
    """

    split_by: str
    gaps: Sequence[Gap]
    model: str = ""

    @property
    def names_tools(self) -> bool:
        """True if the client named a tool in any turn."""
        return any(gap.turn.tool not in (None, NO_TOOL) for gap in self.gaps)

    def without_tools(self) -> Session:
        """Return the session as a client that names no tools would have sent it. A server can still
        detect that an answer calls no tool.
        """
        gaps = [
            gap if gap.turn.tool == NO_TOOL else replace(gap, turn=replace(gap.turn, tool=None))
            for gap in self.gaps
        ]
        return replace(self, gaps=gaps)


def read_sources(folder: Path) -> dict[str, list[Session]]:
    """Read the sessions of each file in a folder. Returns them by file stem, in file order. A file
    without gaps, or that cannot be read, is left out and reported on standard error.

    Raises:
        OSError: the folder cannot be read.
    """
    found = dict[str, list[Session]]()
    for path in filter(Path.is_file, sorted(folder.iterdir())):
        try:
            sessions = [session for session in _read(path) if session.gaps]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            sessions = []
        if sessions:
            found[path.name.partition(".")[0]] = sessions
        else:
            print(f"{path.name} contains no gaps between turns", file=sys.stderr)
    return found


def _read(path: Path) -> Iterable[Session]:
    with open_lines(path) as file:
        is_json = next(lines_of(file), b"").startswith(b"{")
    read = read_rows if is_json else read_table
    rows = read(path, _as_it_is)
    for needed, sessions_of in _KINDS:
        if rows and needed <= rows[0].keys():
            return sessions_of(rows)
    raise ValueError(f"{path} has none of the known formats")


def _as_it_is(row: Row) -> Row:
    return row


def _agent_sessions(rows: Iterable[Row]) -> Iterable[Session]:
    for row in rows:
        if row.get("dup"):
            continue
        subs = [request for request in row["reqs"] if request.get("k") == "sub"]
        main = [request for request in row["reqs"] if request.get("k") != "sub"]
        requests = {row["id"]: main, **{f"{row['id']}/{sub['id']}": sub["reqs"] for sub in subs}}
        for name, some in requests.items():
            models = Counter(str(request.get("m") or "") for request in some)
            model = models.most_common(1)[0][0] if models else ""
            yield Session(row["id"], _agent_gaps(name, some), model)


def _agent_gaps(name: str, requests: Sequence[Row]) -> list[Gap]:
    return [
        Gap(
            _turn(
                name,
                number,
                request["t"] + request["api"],
                NO_TOOL if request["stop"] == "end_turn" else None,
                context=request["in"] + request["out"],
                new=request["in"] - request["lcp"],
                output=request["out"],
            ),
            float(following["gap"]),
        )
        for number, (request, following) in enumerate(pairwise(requests), 1)
        if request["api"] is not None and following["gap"] is not None
    ]


def _request_logs(rows: Iterable[Row]) -> Iterable[Session]:
    sessions = _grouped(sorted(rows, key=lambda row: row["timestamp"]), "session_id")
    for name, requests in sessions.items():
        gaps = []
        known = ""
        for number, (row, following) in enumerate(pairwise(requests), 1):
            shared = _shared_chars(known, row["input"])
            known = row["input"] + row["output"]
            turn = _turn(
                name,
                number,
                row["timestamp"] / 1e6,
                tool_use(read_tool_calls(row["output"])),
                context=len(known) // CHARS_PER_TOKEN,
                new=(len(row["input"]) - shared) // CHARS_PER_TOKEN,
                output=len(row["output"]) // CHARS_PER_TOKEN,
            )
            gaps.append(Gap(turn, (following["timestamp"] - row["timestamp"]) / 1e6))
        yield Session(name, gaps)


def _tool_rounds(rows: Iterable[Row]) -> Iterable[Session]:
    for name, rounds in _grouped(rows, "session_id").items():
        gaps = []
        for number, row in enumerate(rounds, 1):
            taken_ms = [tool["tool_wall_latency_ms"] for tool in row["tools"]]
            if not taken_ms or None in taken_ms:
                continue
            turn = _turn(
                name,
                number,
                float(number),
                tool_use([ToolCall(tool["tool_name"]) for tool in row["tools"]]),
                context=row["input_tokens_total"] + row["output_tokens"],
                new=row["newly_append_tokens"],
                output=row["output_tokens"],
            )
            gaps.append(Gap(turn, max(taken_ms) / 1e3))
        yield Session(name, gaps)


def _tool_calls(rows: Iterable[Row]) -> Iterable[Session]:
    for name, calls in _grouped(rows, "file").items():
        gaps = []
        for number, row in enumerate(calls, 1):
            tool = tool_use([ToolCall("bash", command=str(row["action"]))])
            output = len(str(row["action"])) // CHARS_PER_TOKEN
            turn = _turn(name, number, float(number), tool, context=0, new=0, output=output)
            gaps.append(Gap(turn, float(row["execution_time_s"])))
        yield Session(name, gaps)


def _turn(
    name: str,
    number: int,
    ended_at: float,
    tool: ToolUse | None,
    *,
    context: int,
    new: int,
    output: int,
) -> TurnEnd:
    job = JobKey("", name)
    return TurnEnd(job, number, False, False, context, new, output, tool, ended_at)


def _shared_chars(one: str, other: str) -> int:
    if other.startswith(one):
        return len(one)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _grouped(rows: Iterable[Row], key: str) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[row[key]].append(row)
    return groups


_KINDS: list[tuple[set[str], Callable[[Iterable[Row]], Iterable[Session]]]] = [
    ({"id", "reqs"}, _agent_sessions),
    ({"session_id", "timestamp", "input", "output"}, _request_logs),
    ({"session_id", "tools"}, _tool_rounds),
    ({"file", "action", "execution_time_s"}, _tool_calls),
]

"""What a policy is told, and what it may answer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, Protocol

from tiered_kv.tiers import TierId

if TYPE_CHECKING:
    from .distribution import Forecast


class JobKey(NamedTuple):
    """A job, scoped by the cache salt: equal names under different salts are strangers."""

    salt: str
    name: str


class Tier(Enum):
    """Where a finished turn's KV waits."""

    PIN = "pin"
    """In VRAM until a deadline, with its copy in CPU memory."""
    CPU = "cpu"
    """In CPU memory; VRAM may reuse its blocks at once."""
    STORE = "store"
    """In the tiers below CPU memory, as soon as it is saved: the next turn is far away."""
    DROP = "drop"
    """Nowhere in particular: the job is over."""


class GapClass(Enum):
    """ContextServe's three answers, tied to what a restore costs (see ``ttl``)."""

    FAST = "fast"
    """Even a full wait of B seconds pays."""
    SLOW = "slow"
    """No wait pays."""
    UNCERTAIN = "uncertain"


@dataclass(frozen=True, slots=True)
class Rule:
    """What rules alone say of how long a tool runs: ln X is about normal.

    Attributes:
        median_s: seconds.
        sigma: standard deviation of ln X.
    """

    median_s: float
    sigma: float


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What the job does in the gap, several tool calls taken as one: the slowest decides.

    Attributes:
        path: from the general to the particular: the tool, its subcommand, the command with
            numbers, paths and strings masked, as ("bash", "git clone", "git clone <url>"). Made
            of text that a model wrote: short, but any characters.
        command: the shell command that decides, or an empty string; for learned features.
        rule: what rules say; None if they know nothing.
        least_s, most_s: bounds that the command itself sets (``sleep 30``, ``timeout 10``).
        expected_s: what the client said; None if nothing.
    """

    path: tuple[str, ...]
    command: str = ""
    rule: Rule | None = None
    least_s: float = 0.0
    most_s: float = math.inf
    expected_s: float | None = None


NO_TOOL = ToolUse(path=("(no tool)",))
"""The turn ended without a tool call: a person, or another program, is next."""


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """A turn that just finished.

    Attributes:
        job: None when there is no telling which job it belongs to.
        turn: 1 for the job's first turn.
        is_last_step: the client says that no turn follows.
        aborted: the client went away or cancelled.
        context_tokens: tokens whose KV exists now.
        new_tokens: tokens of the prompt that the job's last turn did not have.
        output_tokens: tokens of the answer.
        tool: None while, or because, it is not known.
        ended_at: seconds, on any clock that goes on.
    """

    job: JobKey | None
    turn: int
    is_last_step: bool
    aborted: bool
    context_tokens: int
    new_tokens: int = 0
    output_tokens: int = 0
    tool: ToolUse | None = None
    ended_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Costs:
    """What it costs to have this turn's KV elsewhere, as measured on this machine.

    Attributes:
        recompute_s: seconds to prefill the context again.
        cpu_s: seconds to restore it from CPU memory; None if it cannot be there.
        tiers_s: seconds to bring it up from each tier below CPU memory and restore it.
        queue_s: T, mean seconds that a turn whose KV had left VRAM waited to be admitted.
        memoryfulness: η, how much of T a pin saves (1: a job that has waited goes on).
        vram_price: λ, seconds charged for a second in VRAM; 0 while nobody wants the room,
            1 where the cost of Continuum (arXiv 2511.02230) is.
        held_up: requests that lose B if the job returns and its KV has left VRAM.
        cpu_stay_s: how long a page stays in CPU memory at present before it is evicted.
        survival: the share of what waits outside VRAM that is there still when it is wanted.
    """

    recompute_s: float
    cpu_s: float | None = None
    tiers_s: Mapping[TierId, float] = field(default_factory=dict)
    queue_s: float = 0.0
    memoryfulness: float = 1.0
    vram_price: float = 1.0
    held_up: float = 1.0
    cpu_stay_s: float = math.inf
    survival: float = 1.0

    @property
    def store_s(self) -> float | None:
        """Seconds to restore it from the fastest tier below CPU memory; None without one."""
        return min(self.tiers_s.values(), default=None)

    @property
    def restore_s(self) -> float:
        """R, seconds that the cheapest restore is expected to take: what was lost meanwhile is
        computed again."""
        stored = [s for s in (self.cpu_s, self.store_s) if s is not None]
        if not stored or min(stored) >= self.recompute_s:
            return self.recompute_s
        return self.survival * min(stored) + (1 - self.survival) * self.recompute_s

    @property
    def benefit_s(self) -> float:
        """B = T η + R: seconds saved if the job returns while its KV is in VRAM."""
        return self.queue_s * self.memoryfulness + self.restore_s

    @property
    def work_s(self) -> float:
        """Seconds of all requests that are lost without a pin, T η left out: one that does not
        queue makes another do so."""
        return max(0.0, self.benefit_s * self.held_up - self.queue_s * self.memoryfulness)


@dataclass(frozen=True, slots=True)
class Decision:
    """Where the turn's KV waits.

    Attributes:
        ttl_s: seconds at most if pinned, else 0.
        gap_class: None from policies that do not class gaps.
        forecast: of the gap; None from policies that make none.
        back_s: seconds after the turn's end at which KV below CPU memory should be up again;
            None if it comes up when the next turn asks.
    """

    tier: Tier
    ttl_s: float = 0.0
    gap_class: GapClass | None = None
    forecast: Forecast | None = None
    back_s: float | None = None


class TurnPolicy(Protocol):
    """Decides at the end of every turn. No I/O, no clock, no threads; deterministic.

    ``decide`` changes nothing and takes under 100 µs: it runs on the scheduler thread, once
    when the turn ends (the tool not read yet) and once more when the tool is known.

    Attributes:
        reads_tools: whether a turn's tool makes a difference.
    """

    @property
    def reads_tools(self) -> bool: ...

    def decide(self, turn: TurnEnd, costs: Costs) -> Decision: ...

    def observe(self, turn: TurnEnd, gap_s: float, *, ended: bool) -> None:
        """The job's next turn came ``gap_s`` seconds after this one ended; if not ``ended``, it
        had not come by then and is not waited for any longer (a right-censored gap)."""

    def refit(self) -> None:
        """Learn what takes long from what was observed. May run on another thread, beside
        everything else."""

    def dump(self) -> dict[str, object]:
        """All that was learned, as JSON; empty if nothing ever is."""

    def load(self, learned: Mapping[str, object]) -> None:
        """Go on from what ``dump`` gave, perhaps of another process.

        Raises:
            ValueError: it is not that; nothing has changed.
        """

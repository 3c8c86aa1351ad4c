"""The interface of a policy: the signals that it receives, and the decisions that it returns."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from hashlib import sha256
from typing import TYPE_CHECKING, NamedTuple, Protocol

from tiered_kv.tiers import TierId

if TYPE_CHECKING:
    from .distribution import Forecast

MAX_SALT_CHARS = 512
"""Maximum length of a cache salt that is used as a job scope unchanged."""


class JobKey(NamedTuple):
    """Identity of a job: its name and the cache salt. Equal names under different salts are
    different jobs."""

    salt: str
    name: str


def job_scope(cache_salt: str | None) -> str:
    """Return the job scope of requests with this cache salt: the salt itself; an empty string
    without a salt; a digest if the salt has more than ``MAX_SALT_CHARS`` characters, because the
    scope is kept for as long as the job, and clients may send salts of any length."""
    if cache_salt is None or len(cache_salt) <= MAX_SALT_CHARS:
        return cache_salt or ""
    return f"(sha256) {sha256(cache_salt.encode('utf-8', 'surrogatepass')).hexdigest()}"


class Tier(Enum):
    """Tier in which a finished turn's KV is kept."""

    PIN = "pin"
    """VRAM until a deadline, with a copy in CPU memory."""
    CPU = "cpu"
    """CPU memory. VRAM may reuse the blocks immediately."""
    STORE = "store"
    """The tiers below CPU memory. Chosen if the next turn is far away."""
    DROP = "drop"
    """Release of the KV, because the job is over or prefilling again is cheapest."""


class GapClass(Enum):
    """ContextServe's three classes of gaps. The default policy defines them by what a pin saves
    (see ``pricing.pin_ttl.gap_class``). B is the time that a pin saves if the job returns to it."""

    FAST = "fast"
    """A pin pays off even if it is held for B seconds."""
    SLOW = "slow"
    """A pin of any duration costs more than it saves."""
    UNCERTAIN = "uncertain"
    """A pin pays off, but only if it is shorter than B seconds."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Prior of a tool's duration X: ln X is approximately normal.

    Attributes:
        median_s: median of X, seconds.
        sigma: standard deviation of ln X.
    """

    median_s: float
    sigma: float


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools that a job runs in the gap. Of several tool calls, the slowest is described.

    Attributes:
        path: names from general to specific: the tool, its subcommand, the command with numbers,
            paths and strings masked, such as ("bash", "git clone", "git clone <url>"). A model
            wrote the text. It is short, but may contain any characters.
        command: the slowest shell command; empty if there is none.
        rule: prior of the tool's duration; None if unknown.
        least_s, most_s: bounds set by the command itself (``sleep 30``, ``timeout 10``), seconds.
        expected_s: the client's estimate, seconds; None without one.
    """

    path: tuple[str, ...]
    command: str = ""
    rule: Rule | None = None
    least_s: float = 0.0
    most_s: float = math.inf
    expected_s: float | None = None


NO_TOOL = ToolUse(path=("(no tool)",))
"""A turn without a tool call: the next input comes from a person or another program."""


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """A turn that has just finished.

    Attributes:
        job: identity of its job; None if unknown.
        turn: number of the turn in its job, from 1.
        is_last_step: True if the client declared that no turn follows.
        aborted: True if the client disconnected or cancelled.
        context_tokens: number of tokens whose KV exists now.
        new_tokens: prompt tokens that the job's previous turn did not have.
        output_tokens: length of the answer, tokens.
        tool: tools that run next; None while unknown.
        ended_at: when the turn ended, seconds on any monotonic clock.
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
    """Measured costs of keeping a turn's KV outside VRAM on this machine.

    Attributes:
        recompute_s: time to prefill the context again, seconds.
        cpu_s: time to restore it from CPU memory, seconds; None if CPU memory cannot hold it.
        tiers_s: time to promote it from each tier below CPU memory and restore it, seconds.
        queue_s: T, mean admission wait of turns whose KV had left VRAM, seconds.
        memoryfulness: η, fraction of T that a pin saves (1: a job that has waited does not wait
            again).
        vram_price: λ, seconds charged per second in VRAM: 0 while no request needs the space; 1 in
            Continuum's cost (arXiv 2511.02230).
        held_up: number of requests that lose B (see ``benefit_s``) if the job returns and its KV
            has left VRAM.
        cpu_stay_s: time that a page currently stays in CPU memory before its eviction, seconds.
        survival: fraction of the KV outside VRAM that still exists when it is needed.
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
        """Restore time from the fastest tier below CPU memory, seconds; None without such a
        tier."""
        return min(self.tiers_s.values(), default=None)

    @property
    def restore_s(self) -> float:
        """R: expected time of the cheapest restore, seconds. KV that was lost in the meantime is
        recomputed."""
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
        """Total time that requests lose without a pin, seconds. T η is excluded, because a job that
        does not queue makes another job queue."""
        return max(0.0, self.benefit_s * self.held_up - self.queue_s * self.memoryfulness)


@dataclass(frozen=True, slots=True)
class Decision:
    """The tier that keeps a turn's KV, and for how long.

    Attributes:
        tier: tier that keeps the KV.
        ttl_s: maximum duration of the pin, seconds; 0 without a pin.
        gap_class: class of the gap; None from policies without classes.
        forecast: forecast of the gap; None from policies without one.
        back_s: time after the turn's end at which KV below CPU memory should be promoted again,
            seconds; None to wait for the next turn.
    """

    tier: Tier
    ttl_s: float = 0.0
    gap_class: GapClass | None = None
    forecast: Forecast | None = None
    back_s: float | None = None


class TurnPolicy(Protocol):
    """A policy, which chooses the tier of a turn's KV when the turn ends. Policies are
    deterministic, and use no I/O, clocks or threads.

    ``decide`` does not change the policy, and takes under 100 µs. It runs on the scheduler's
    thread: once when the turn ends, before its tool call is read, and again when the tool is known.

    Attributes:
        reads_tools: True if decisions depend on a turn's tool.
    """

    @property
    def reads_tools(self) -> bool: ...

    def decide(self, turn: TurnEnd, costs: Costs) -> Decision: ...

    def observe(self, turn: TurnEnd, gap_s: float, *, ended: bool) -> None:
        """Update the forecast with the gap after a turn. If ``ended`` is True, the next turn
        arrived after ``gap_s`` seconds. If it is False, the gap is right-censored: the next turn
        had not arrived by then, and is no longer expected."""

    def dump(self) -> dict[str, object]:
        """Return the learned state as values that JSON can represent; empty for a policy that never
        learns."""

    def load(self, learned: Mapping[str, object]) -> None:
        """Restore a state that ``dump`` returned, possibly in another process.

        Raises:
            ValueError: the state is malformed; the policy is unchanged.
        """

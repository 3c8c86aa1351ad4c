"""The contract of a policy: the signals it receives, and the decisions it returns."""

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
"""Longest cache salt that scopes jobs as it is."""


class JobKey(NamedTuple):
    """Identity of a job: its name, scoped by the cache salt. Equal names under different salts
    are different jobs."""

    salt: str
    name: str


def job_scope(cache_salt: str | None) -> str:
    """The scope of the jobs of requests with this cache salt: the salt itself, empty without one,
    or the digest of a long salt. The scope is kept for as long as the job, and a client may send
    salts of any length."""
    if cache_salt is None or len(cache_salt) <= MAX_SALT_CHARS:
        return cache_salt or ""
    return f"(sha256) {sha256(cache_salt.encode('utf-8', 'surrogatepass')).hexdigest()}"


class Tier(Enum):
    """Place where a finished turn's KV waits."""

    PIN = "pin"
    """VRAM until a deadline, with a copy in CPU memory."""
    CPU = "cpu"
    """CPU memory; VRAM may reuse the blocks at once."""
    STORE = "store"
    """The tiers below CPU memory, once the KV is saved: the next turn is far away."""
    DROP = "drop"
    """Any place: the job is over."""


class GapClass(Enum):
    """ContextServe's three classes of gaps, tied to the cost of a restore (see
    ``pricing.pin_ttl``)."""

    FAST = "fast"
    """A full wait of B seconds still pays."""
    SLOW = "slow"
    """Any wait costs more than it saves."""
    UNCERTAIN = "uncertain"


@dataclass(frozen=True, slots=True)
class Rule:
    """Prior of a tool's duration: ln X is about normal.

    Attributes:
        median_s: median of X, seconds.
        sigma: standard deviation of ln X.
    """

    median_s: float
    sigma: float


@dataclass(frozen=True, slots=True)
class ToolUse:
    """A job's tool use in the gap. Several tool calls count as one: the slowest.

    Attributes:
        path: names from the general to the particular: the tool, its subcommand, the command with
            numbers, paths and strings masked, as ("bash", "git clone", "git clone <url>"). A model
            wrote the text: it is short, but may contain any characters.
        command: the slowest shell command, or an empty string.
        rule: prior of its duration; None if unknown.
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
"""A turn that ended without a tool call: a person, or another program, is next."""


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """A turn that just finished.

    Attributes:
        job: identity of its job; None if unknown.
        turn: number of the turn in its job, from 1.
        is_last_step: True if the client declared that no turn follows.
        aborted: True if the client went away or cancelled.
        context_tokens: tokens whose KV exists now.
        new_tokens: tokens of the prompt that the job's last turn did not have.
        output_tokens: tokens of the answer.
        tool: the tool use that follows; None while unknown.
        ended_at: time of its end, seconds on any monotonic clock.
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
    """Costs of having this turn's KV elsewhere, as measured on this machine.

    Attributes:
        recompute_s: time to prefill the context again, seconds.
        cpu_s: time to restore it from CPU memory, seconds; None if it cannot be there.
        tiers_s: time to bring it up from each tier below CPU memory and restore it, seconds.
        queue_s: T, mean time that a turn whose KV had left VRAM waited for admission, seconds.
        memoryfulness: η, share of T that a pin saves (1: a job that has waited does not wait
            again).
        vram_price: λ, seconds charged for a second in VRAM: 0 while no request needs the room, 1 in
            the cost of Continuum (arXiv 2511.02230).
        held_up: number of requests that lose B if the job returns and its KV has left VRAM.
        cpu_stay_s: time that a page currently stays in CPU memory before its eviction, seconds.
        survival: share of the KV outside VRAM that is still there when it is needed.
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
        """Time to restore from the fastest tier below CPU memory, seconds; None without one."""
        return min(self.tiers_s.values(), default=None)

    @property
    def restore_s(self) -> float:
        """R: expected time of the cheapest restore, seconds. KV that was lost meanwhile is
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
        """Time that all requests lose without a pin, seconds. T η is left out: a job that does
        not queue makes another one queue."""
        return max(0.0, self.benefit_s * self.held_up - self.queue_s * self.memoryfulness)


@dataclass(frozen=True, slots=True)
class Decision:
    """The tier of a turn's KV, and how long it stays there.

    Attributes:
        ttl_s: longest time of the pin, seconds; 0 without a pin.
        gap_class: class of the gap; None from policies without classes.
        forecast: forecast of the gap; None from policies without one.
        back_s: time after the turn's end at which KV below CPU memory should be up again, seconds;
            None to wait for the next turn.
    """

    tier: Tier
    ttl_s: float = 0.0
    gap_class: GapClass | None = None
    forecast: Forecast | None = None
    back_s: float | None = None


class TurnPolicy(Protocol):
    """A policy, which decides at the end of every turn. No I/O, no clock, no threads;
    deterministic.

    ``decide`` does not mutate and takes under 100 µs. It runs on the scheduler thread: once when
    the turn ends, before its tool call is read, and again when the tool is known.

    Attributes:
        reads_tools: True if decisions depend on a turn's tool.
    """

    @property
    def reads_tools(self) -> bool: ...

    def decide(self, turn: TurnEnd, costs: Costs) -> Decision: ...

    def observe(self, turn: TurnEnd, gap_s: float, *, ended: bool) -> None:
        """Learn from a gap: the job's next turn came ``gap_s`` seconds after this one ended. If
        not ``ended``, it had not come by then and is no longer expected (a right-censored gap)."""

    def dump(self) -> dict[str, object]:
        """Return the learned state as JSON; empty for a policy that never learns."""

    def load(self, learned: Mapping[str, object]) -> None:
        """Restore a state that ``dump`` returned, perhaps in another process.

        Raises:
            ValueError: the state is malformed; the policy is unchanged.
        """

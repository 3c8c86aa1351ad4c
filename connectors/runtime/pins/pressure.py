"""Memory pressure: pins are released before a request is refused, preempted or left waiting. Before
any request is preempted, saves in flight are awaited, because they hold blocks.

While another request runs, a turn waits for a pin that is worth the wait. In job order, turns of
older jobs wait only for the most valuable pins. A turn that took the pin's blocks instead would be
the next to lose its KV to the returning job, or would recompute its KV while that job runs.

vLLM's step runs out of blocks in three places, in this order: a running request cannot grow
(``for_running``), a waiting request cannot be admitted (``for_waiting``), a restored request cannot
be scheduled and does not query the connector again (``for_restored``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import partial

from tiered_kv.connectors.runtime.engine_state import EngineState
from tiered_kv.connectors.runtime.fairness import Fairness
from tiered_kv.connectors.runtime.pages.saves import Saves
from tiered_kv.connectors.runtime.turn import Turn, job_started_at
from tiered_kv.orders import RestoreMode
from tiered_kv.page_group import CONTEXT
from tiered_kv.policies.base import JobKey

from .boundary_blocks import BoundaryBlocks
from .pin_table import PinTable

SAVES_PATIENCE_S = 1.0
"""Time that a running request waits for saves while no save finishes, before other requests are
preempted for it, seconds. The wait is bounded because a failed worker never reports."""


def waiter_started_at(
    job_started_at: float,
    *,
    goes_first: bool,
    somebody_runs: bool,
    in_job_order: bool,
    new: bool,
) -> float | None:
    """Return the start of a waiting turn's job, seconds, if the turn should wait for some pins
    rather than release them; None if any pin may be released for the turn. ``release_order``
    expects this value.

    A turn does not wait if no running request would free blocks, or if the turn precedes the turns
    for which the pins are held. If requests are admitted in the order of their jobs, every other
    turn waits. In any other order, only the turn of a new job waits, because an older job's turn
    may be queued behind the waiting turn.

    Args:
        job_started_at: start of the turn's job, seconds.
        goes_first: True if the turn was preempted, is overdue, or is admitted by arrival time.
        somebody_runs: True if some request has been allocated blocks.
        in_job_order: True if requests are admitted in the order of their jobs.
        new: True if no turn of the turn's job has been allocated blocks.
    """
    if goes_first or not somebody_runs:
        return None
    return job_started_at if in_job_order or new else None


def worth_waiting_for_saves(stalled_s: float) -> bool:
    """True if a running request should wait for blocks that are being saved.

    Args:
        stalled_s: time since a save finished, or since the request started to wait, seconds.
    """
    return stalled_s < SAVES_PATIENCE_S


def needs_one_more(
    mode: RestoreMode | None, *, refused: bool, released: int, stuck: bool = False
) -> bool:
    """True if a pin should be released for a turn although enough blocks seem to be free.

    The engine refused the turn in the previous step anyway. Either an async restore must leave
    blocks that running prefills still need, or the next chunk of a prompt takes more window and
    state blocks than the end of the prompt. The engine does not report how many blocks are missing,
    so pins are released one by one.

    Args:
        mode: mode of the restore offered to the turn; None without a restore.
        refused: True if the turn was refused in the previous step although enough blocks seemed to
            be free.
        released: number of pins just released for the turn.
        stuck: True if nothing runs, and the model has sliding windows or recurrent states.
    """
    return refused and not released and (stuck or mode is RestoreMode.ASYNC)


class PinPressure:
    """Releases pins when blocks are short.

    Args:
        fairness: bounds waits and divides VRAM among clients.
        saves: orders saves. Saves in flight hold blocks, which are free once the saves finish.

    Attributes:
        in_job_order: True if the engine admits waiting requests in the order of their jobs. Written
            by ``scheduler``.
    """

    def __init__(
        self,
        engine: EngineState,
        pins: PinTable,
        fairness: Fairness,
        boundaries: BoundaryBlocks,
        saves: Saves,
    ) -> None:
        self.in_job_order = False
        self._facts = engine.facts
        self._pins = pins
        self._fairness = fairness
        self._boundaries = boundaries
        self._saves = saves
        self._pool = engine.pool
        self._clock = engine.clock
        self._deferred_at: int | None = None  # last step in which new requests were deferred
        self._coming = 0
        self._coming_at: int | None = None
        self._saves_over, self._waits_since = 0, 0.0
        self._waited_at: int | None = None
        self._holding: tuple[int, frozenset[Turn]] | None = None
        self._held_back = 0  # blocks that these turns still need

    def on_ended(self, turn: Turn, step: int) -> None:
        """Count the blocks of a finished turn, if a step that is still in flight computes it."""
        if self._facts.ahead and turn.request.num_in_flight_tokens > 0:
            own = self._pool.blocks_of(turn.request_id)
            late = sum(block.ref_cnt == 1 and not block.is_null for block in own)
            self.freed_late(late, step)

    def freed_late(self, blocks: int, step: int) -> None:
        """Count blocks of a finished turn that become free only when the step in flight finishes.
        During this ``step``, no pin needs to be released for lack of these blocks."""
        self._coming = blocks + self._late(step)
        self._coming_at = step

    def _late(self, step: int) -> int:
        """Return the number of blocks that become free by the next step."""
        return self._coming if self._coming_at == step else 0

    def _free(self, step: int) -> int:
        """Return the number of blocks that are free by the next step."""
        free = self._pool.num_free()
        return free + self._late(step)

    def for_running(self, step: int) -> bool:
        """Release a pin that frees a block or, without such a pin, all boundary blocks, unless
        blocks are about to become free. Returns False if nothing was freed, so that vLLM preempts a
        request.

        After a preemption, vLLM calls this method again if the preempted request's blocks are not
        free yet, because they are being saved. vLLM must not preempt further requests for blocks
        that are about to become free.
        """
        freed = self._late(step) > 0 or self._waits_for_saves(step) or self._release_one(None)
        # Blocks of the released pin may be in a save as well.
        freed = freed or self._waits_for_saves(step) or self._boundaries.release_all()
        if freed:
            self._deferred_at = step
        return freed

    def defers_new(self, step: int) -> bool:
        """True if blocks were or will be freed for running requests in this step. vLLM has finished
        its loop over running requests, and its loop over waiting requests must not take these
        blocks."""
        return self._deferred_at == step

    def _waits_for_saves(self, step: int) -> bool:
        """Return True if saves in flight will free blocks, and saves keep finishing."""
        if not self._saves.free_some():
            return False
        now = self._clock()
        goes_on = self._waited_at in (step - 1, step)
        if self._saves.over != self._saves_over or not goes_on:
            self._saves_over, self._waits_since = self._saves.over, now
        self._waited_at = step
        return worth_waiting_for_saves(now - self._waits_since)

    def for_waiting(self, turn: Turn, num_computed: int, step: int) -> None:
        """Release pins, the least valuable first, until the request can be admitted or the
        remaining pins are worth more than the request's wait."""
        wanted = self._wanted(turn, num_computed)
        # False if vLLM may refuse the request once, because blocks become free only later.
        sure = not self._late(step) or self._pool.num_free() >= wanted
        asked_before = sure and turn.pressure.asked_at == step - 1
        turn.pressure.asked_at = step if sure else None
        enough = partial(self.fits, turn, num_computed, step, exact=asked_before)
        if not len(self._pins) or (not asked_before and enough()):
            return
        spare = turn.job.key if turn.job else None
        somebody_runs = any(self._pool.tables[CONTEXT].values())
        goes_first = self._fairness.seats_short or self._fairness.is_overdue(turn.request_id)
        waiter = waiter_started_at(
            job_started_at(turn),
            goes_first=goes_first or turn.request.num_preemptions > 0,
            somebody_runs=somebody_runs,
            in_job_order=self.in_job_order,
            new=turn.hold.new,
        )
        released = self._pins.make_room(enough, spare, waiter)
        if waiter is not None and not enough():
            greedy = self._fairness.salts_over_share(self._pins.blocks(), turn.request_id)
            released += self._pins.make_room(enough, spare, waiter, greedy=greedy)
        mode = turn.restore.hit.mode if turn.restore.hit is not None else None
        stuck = self._facts.narrow and not somebody_runs
        if needs_one_more(mode, refused=asked_before, released=released, stuck=stuck):
            self._release_one(spare, waiter)

    def fits(self, turn: Turn, num_computed: int, step: int, *, exact: bool = False) -> bool:
        """True if enough blocks are free to admit a waiting turn.

        Args:
            exact: False to assume that the engine finds the very blocks that the job's pin holds,
                and not copies of some of them.
        """
        lacks = self._wanted(turn, num_computed) - self._free(step)
        if lacks <= 0:
            return True
        found = sum(len(blocks) for _, blocks, _ in self._hits(num_computed))
        # Blocks are checked one by one only if that can change the result: this runs in every step.
        if lacks > found:
            return False
        if not exact and lacks <= self._pinned_hits(turn, num_computed):
            return True
        return lacks <= self._held_hits(turn, num_computed)

    def _wanted(self, turn: Turn, num_computed: int) -> int:
        return self._blocks(turn, num_computed) + self._pool.watermark

    def comes_behind(
        self, holding: Collection[Turn], turn: Turn, num_computed: int, step: int
    ) -> bool:
        """True if a turn's async restore must wait for other restored turns that hold blocks.

        vLLM reserves no blocks for these turns in window groups, and considers no request behind a
        request that lacks blocks. Two turns that wait for each other's blocks would wait forever.
        """
        hit, whole = turn.restore.hit, self._facts.blocks_on_the_way
        if hit is None or hit.mode is not RestoreMode.ASYNC:
            return False
        if not holding or not self._facts.narrow:
            return False
        now = step, frozenset(holding)
        if self._holding != now:  # many turns may ask in one step, and counting blocks takes time
            self._holding = now
            self._held_back = sum(
                max(0, whole(request.num_computed_tokens, request.num_tokens) - self._own(one))
                for one in holding
                for request in (one.request,)
            )
        wanted = whole(num_computed + hit.tokens, turn.request.num_tokens) + self._pool.watermark
        return wanted + self._held_back > self._free(step)

    def _own(self, turn: Turn) -> int:
        """Return the number of blocks that a turn has been allocated."""
        return sum(not block.is_null for block in self._pool.blocks_of(turn.request_id))

    def for_restored(self, turns: Sequence[Turn], step: int, *, idle: bool) -> None:
        """Release pins until each restored request has the blocks that it lacks.

        Args:
            idle: True if nothing was scheduled, so that requests restored earlier were refused.
        """
        for turn in turns:
            wanted = self._blocks(turn, turn.request.num_computed_tokens) - self._own(turn)
            released = self._pins.make_room(
                partial(self._are_free, wanted + self._pool.watermark, step)
            )
            refused = turn.pressure.restored_at == step - 1
            turn.pressure.restored_at = step if idle else None
            stuck = self._facts.narrow and idle
            if needs_one_more(None, refused=refused, released=released, stuck=stuck):
                self._release_one(None)

    def _are_free(self, wanted: int, step: int) -> bool:
        return self._free(step) >= wanted

    def _blocks(self, turn: Turn, computed: int) -> int:
        return self._facts.blocks_to_go_on(computed, turn.request.num_tokens)

    def _release_one(self, spare: JobKey | None, waiter: float | None = None) -> bool:
        before = self._pool.num_free()
        self._pins.make_room(
            lambda: self._pool.num_free() > before or self._saves.free_some(),
            spare,
            waiter,
        )
        return self._pool.num_free() > before

    def _pinned_hits(self, turn: Turn, num_computed: int) -> int:
        """Return the number of blocks that the job's pin holds, if the last of them is in the
        turn's VRAM prefix, which then begins with the same tokens; otherwise 0."""
        blocks = self._pins.prefix(turn.job.key) if turn.job is not None else ()
        end = len(blocks) * self._facts.block_size
        if not 0 < end <= num_computed or self._facts.narrow:
            return 0
        last = turn.request.block_hashes[end // self._facts.hash_tokens - 1]
        return len(blocks) if self._pool.cached(last, CONTEXT) is blocks[-1] else 0

    def _held_hits(self, turn: Turn, num_computed: int) -> int:
        """Return the number of referenced blocks in the turn's VRAM prefix. Admitting the turn
        takes no free block for them."""
        hashes, unit = turn.request.block_hashes, self._facts.hash_tokens
        held = 0
        for at, blocks, size in self._hits(num_computed):
            stride = size // unit
            own = hashes[(blocks.start + 1) * stride - 1 : blocks.stop * stride : stride]
            held += self._pool.num_in_use(own, at)
        return held

    def _hits(self, num_computed: int) -> Iterator[tuple[int, range, int]]:
        """Yield the blocks of a VRAM prefix for each group: the group, its blocks, and the tokens
        per block."""
        for at, group in enumerate(self._facts.groups):
            yield at, group.needs(num_computed), group.block_size
        if not self._facts.groups:
            size = self._facts.block_size
            yield CONTEXT, range(num_computed // size), size

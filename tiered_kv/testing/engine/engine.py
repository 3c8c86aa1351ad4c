"""A small inference engine: continuous batching over paged KV, with prefix caching.

A step has a token budget. Running requests are served first, then waiting requests are admitted. If
a request lacks a block, the youngest request is preempted and recomputes its tokens later. Other
requests can find blocks once they are computed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass

from .blocks import Blocks
from .model import PagedModel, Work
from .offload import Offload
from .requests import Outcome, Request, State


@dataclass(frozen=True, slots=True)
class EngineSize:
    """Size of an engine.

    Attributes:
        blocks: blocks of VRAM.
        block_size: tokens per block.
        max_batched_tokens: maximum number of tokens per step.
        device: torch device of the KV cache.
        events: True if the engine publishes KV events.
    """

    blocks: int = 63
    block_size: int = 16
    max_batched_tokens: int = 256
    device: str = "cpu"
    events: bool = False


class Engine:
    """A small inference engine. Not thread-safe.

    Args:
        clock: returns monotonic seconds.

    Attributes:
        offload: the connector's hooks. Set them before the first request.
        waiting, running: requests in the order in which they are scheduled.
        loading: requests whose blocks are being loaded, by id.
    """

    def __init__(self, size: EngineSize, clock: Callable[[], float]) -> None:
        self.size = size
        self.pool = Blocks(size.blocks)
        self.model = PagedModel(size.blocks, size.block_size, size.device)
        self.offload = Offload()
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.loading: dict[str, Request] = {}
        self._clock = clock

    @property
    def busy(self) -> bool:
        """True while a step has work to do."""
        return bool(self.waiting or self.running or self.loading) or self.offload.busy

    def submit(
        self,
        request_id: str,
        prompt: list[int],
        max_tokens: int,
        *,
        params: object = None,
        salt: str | None = None,
        stop_ids: Collection[int] = (),
    ) -> Request:
        """Queue a request.

        Args:
            params: the client's hints.
            salt: requests share KV only under the same salt.
            stop_ids: tokens that end the answer.

        Raises:
            ValueError: the request needs more blocks than the pool has.
        """
        if self._blocks(len(prompt) + max_tokens) > self.size.blocks:
            raise ValueError(f"{request_id} needs more blocks than the pool has")
        request = Request(
            request_id, prompt, max_tokens, self._clock(), params, salt, frozenset(stop_ids)
        )
        request.append(prompt, self.size.block_size)
        self.waiting.append(request)
        self.offload.arrived(request)
        return request

    def cancel(self, request: Request) -> None:
        """Abort a request, unless it has ended. A request that is being loaded keeps its blocks
        until the load finishes."""
        if request.state is State.ENDED:
            return
        loading = request.state is State.LOADING
        if request in self.waiting:
            self.waiting.remove(request)
        if request in self.running:
            self.running.remove(request)
        self._end(request, Outcome.CANCELLED, frees=not loading)

    def reset_cache(self) -> None:
        """Forget all computed KV. Running requests recompute their KV."""
        for request in reversed(self.running.copy()):
            self._preempt(request)
        for request in self.loading.values():
            request.unwanted = True
        self.offload.before_reset()
        self.pool.forget(range(self.size.blocks))

    def step(self) -> dict[str, int]:
        """Compute one batch. Returns the number of tokens computed for each request in the
        batch.
        """
        scheduled: dict[str, int] = {}
        if self._schedule_running(scheduled):
            self._admit(scheduled)
        batch = [request for request in self.running if request.request_id in scheduled]
        bad = self.offload.before_forward(scheduled)
        work = [self._work(request, scheduled[request.request_id]) for request in batch]
        sampled = self.model.forward(work, bad)
        loads = self.offload.after_forward()
        bad |= loads.bad
        for request in self.loading.values():  # a part of a load may fail long before the load ends
            self._rewind(request, bad)
        for request in batch:
            if self._rewind(request, bad):
                continue
            request.computed += scheduled[request.request_id]
            self._publish(request)
            if (token := sampled.get(request.request_id)) is not None:
                request.append([token], self.size.block_size)
                if outcome := request.verdict():
                    self.running.remove(request)
                    self._end(request, outcome)
        self.offload.step_over()
        for request_id in loads.requests:
            self._loaded(self.loading.pop(request_id), bad)
        return scheduled

    # -- who computes what --------------------------------------------------------

    def _schedule_running(self, scheduled: dict[str, int]) -> bool:
        """Schedule the running requests. Returns False if no other request may be admitted."""
        waiting = len(self.waiting)
        for request in self.running.copy():
            count = min(self._left(scheduled), len(request.tokens) - request.computed)
            if request.state is not State.RUNNING or not count:
                continue
            if not self._grow(request, request.computed + count):
                return False
            scheduled[request.request_id] = count
        return len(self.waiting) == waiting  # no request was preempted

    def _grow(self, request: Request, tokens: int) -> bool:
        """Allocate the blocks that a running request needs for that many tokens, and preempt
        requests if blocks are short. Returns False if the request must wait.
        """
        while (lack := self._blocks(tokens) - len(request.table)) > self.pool.num_free():
            if self.offload.lacks_block(request):
                return False
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        request.table += self.pool.take(max(0, lack))
        return True

    def _admit(self, scheduled: dict[str, int]) -> None:
        """Admit waiting requests in order of arrival while blocks are free."""
        skipped = []
        while self.waiting and self._left(scheduled):
            request = self.waiting.popleft()
            hits = self.pool.prefix(request.hashes)
            del hits[
                (len(request.tokens) - 1) // self.size.block_size :
            ]  # the last token is always computed
            computed = len(hits) * self.size.block_size
            loaded, beside = self.offload.match(request, computed)
            if loaded is None:
                skipped.append(request)
                continue
            unused = sum(not block.ref_cnt for block in hits)
            lack = self._blocks(len(request.tokens)) - len(hits)
            if lack > self.pool.num_free() - unused:
                skipped.append(request)
                break
            count = min(self._left(scheduled), len(request.tokens) - computed - loaded)
            count = 0 if loaded and beside else count
            self.pool.hold(hits)
            wanted = self._blocks(computed + loaded + count) - len(hits)
            request.table = [*hits, *self.pool.take(wanted)]
            self.pool.tables[request.request_id] = request.table
            self.offload.allocated(request, loaded)
            request.computed, request.published = computed + loaded, len(hits)
            if loaded and beside:
                request.state = State.LOADING
                self.loading[request.request_id] = request
                continue
            request.state = State.RUNNING
            self.running.append(request)
            scheduled[request.request_id] = count
        self.waiting.extendleft(reversed(skipped))

    def _left(self, scheduled: dict[str, int]) -> int:
        return self.size.max_batched_tokens - sum(scheduled.values())

    def _work(self, request: Request, count: int) -> Work:
        end = request.computed + count
        samples = end == len(request.tokens)
        ids, tokens = request.block_ids, request.tokens[:end]
        return Work(request.request_id, tokens, ids, request.computed, samples)

    # -- what becomes of a request ------------------------------------------------

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        request.preemptions += 1
        self._requeue(request)

    def _requeue(self, request: Request) -> None:
        self._free(request)
        request.state = State.WAITING
        self.waiting.appendleft(request)

    def _loaded(self, request: Request, bad: frozenset[int]) -> None:
        """Handle a finished async load: the request continues after the loaded tokens."""
        if request.state is State.ENDED:
            self._free(request)
            return
        self._rewind(request, bad)
        if request.unwanted or not request.computed:
            request.unwanted = False
            self._requeue(request)
            return
        request.state = State.RUNNING
        self.running.append(request)
        self._publish(request)
        self.offload.allocated(request, 0)

    def _rewind(self, request: Request, bad: frozenset[int]) -> bool:
        """Rewind a request to its first bad block. Returns False if no block is bad."""
        first = next((i for i, block in enumerate(request.table) if block.block_id in bad), None)
        if first is None:
            return False
        request.computed = min(request.computed, first * self.size.block_size)
        request.published = min(request.published, first)
        return True

    def _publish(self, request: Request) -> None:
        """Make the computed blocks of a request findable."""
        full = request.computed // self.size.block_size
        for i in range(request.published, full):
            self.pool.publish(request.table[i], request.hashes[i])
        request.published = max(request.published, full)

    def _end(self, request: Request, outcome: Outcome, *, frees: bool = True) -> None:
        request.state, request.outcome = State.ENDED, outcome
        self.offload.ended(request)
        self.model.forget(request.request_id)
        if frees:
            self._free(request)

    def _free(self, request: Request) -> None:
        self.pool.tables.pop(request.request_id, None)
        self.pool.release(reversed(request.table))
        request.table, request.computed, request.published = [], 0, 0

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.size.block_size)

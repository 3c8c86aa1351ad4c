"""Requests to an engine in this process, one at a time, with the sources of each prompt's KV."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.e2e.models.workers import (
    Digests,
    KvGroup,
    arm,
    digests,
    draft_layers,
    end_zeroing,
    keep,
    kv_groups,
    start_zeroing,
    watch,
)
from tiered_kv.bench.models.catalogue import IMAGE_TOKEN, VOCABULARY
from tiered_kv.bench.servers.engines import Engine
from tiered_kv.policies.pricing.estimators import PrefillFit

FIRST_WORD = 5
"""First ordinary token id. Lower ids are special tokens."""
TOOL_S = 300.0
"""Seconds that every turn announces for its tool: long enough that a pin outlasts the test."""


def text(tokens: int, seed: int) -> list[int]:
    """Return a text of random words."""
    return random.Random(seed).choices(range(FIRST_WORD, VOCABULARY), k=tokens)


@dataclass(slots=True)
class Source:
    """Sources of one request's prompt, in tokens, as counted by vLLM's scheduler.

    Attributes:
        prompt: length of the prompt.
        local: tokens found in VRAM.
        computed: tokens scheduled before the first token of the answer. Exceeds the rest of the
            prompt if a restore failed.
        steps: number of steps after the first token of the answer.
        drafted: number of draft tokens that these steps verified.
    """

    prompt: int
    local: int = 0
    computed: int = 0
    steps: int = 0
    drafted: int = 0

    @property
    def found(self) -> int:
        """Tokens that were not computed."""
        return max(0, self.prompt - self.computed)

    @property
    def restored(self) -> int:
        """Tokens that came from the connector and were used."""
        return max(0, self.found - self.local)


@dataclass(frozen=True, slots=True)
class Turn:
    """A prompt, its answer, and the sources of the prompt's KV.

    Attributes:
        number: identifies the turn among all turns of the engine.
        logprobs: log probability of each token of the answer.
        found: digests, by rank, of the KV in VRAM that the hit needs, taken when the turn's first
            tokens were computed.
    """

    number: int
    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    source: Source
    found: Sequence[Digests]

    @property
    def acceptance(self) -> float | None:
        """Fraction of draft tokens that were accepted; None without draft tokens. The end of the
        answer may cut off accepted tokens of the last step."""
        source = self.source
        right = len(self.tokens) - 1 - source.steps
        return right / source.drafted if source.drafted else None

    @property
    def context(self) -> list[int]:
        """Tokens of the prompt and the answer."""
        return self.prompt + self.tokens

    def recomputed(self, after: Turn) -> int:
        """Return how many tokens the turn ``after`` recomputed that had KV at the end of this turn.
        The last token of the answer has none."""
        return max(0, self.source.prompt + len(self.tokens) - 1 - after.source.found)

    def says_the_same(self, other: Turn) -> bool:
        """Return True if tokens and logprobs are equal bit for bit."""
        return self.tokens == other.tokens and self.logprobs == other.logprobs


class SlowPrefills(PrefillFit):
    """Prefill estimates that make every restore worthwhile. With a tiny model, a fast core would
    otherwise recompute a context before a disk has read its pages."""

    def __init__(self) -> None:
        super().__init__()
        self.measured = True

    def seconds(self, behind: int, tokens: int) -> float:
        return float(tokens)


@dataclass(slots=True)
class Asker:
    """An engine that answers one request at a time.

    Attributes:
        image: image at the start of every prompt, or None.
        image_tokens: number of tokens of the image.
        options: further arguments of every request.
        groups: the engine's KV groups, as the scheduler lists them.
    """

    engine: Engine
    image: Any = None
    image_tokens: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    groups: list[KvGroup] = field(init=False)
    _sources: dict[str, Source] = field(init=False, default_factory=dict)
    _turns: int = field(init=False, default=0)
    _zeroed_layers: list[str] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.groups = kv_groups(self.scheduler.kv_cache_config)
        self._watch_steps()
        self._workers(watch)
        if self.scheduler.connector is not None:
            self._watch_ends()
            self.engine.half.gaps.prefills.fit = SlowPrefills()

    @property
    def scheduler(self) -> Any:
        return self.engine.core.scheduler

    @property
    def alignment(self) -> int:
        """A number of tokens: the length of every prefix hit in VRAM is a multiple of it."""
        managers = self.scheduler.kv_cache_manager.coordinator.single_type_managers
        return max(int(manager.cache_hit_alignment_tokens) for manager in managers)

    @property
    def dropped(self) -> int:
        """Number of tokens at the end of a hit that vLLM recomputes, because the draft model's KV
        of the last token depends on the token that follows."""
        drafts = self.scheduler.vllm_config.speculative_config
        return self.alignment if drafts is not None and drafts.use_eagle() else 0

    @property
    def offloaded_groups(self) -> list[KvGroup]:
        """Groups that the connector copies, in the connector's order."""
        by_index = {group.index: group for group in self.groups}
        return [by_index[group.index] for group in self.engine.half.facts.groups]

    @property
    def draft_layers(self) -> list[str]:
        """Names of the draft model's layers."""
        return sorted({name for names in self._workers(draft_layers) for name in names})

    def text(self, tokens: int, seed: int) -> list[int]:
        """Return a prompt of random words with ``tokens`` tokens, including the image at its
        start."""
        if self.image is None:
            return text(tokens, seed)
        return [IMAGE_TOKEN, *text(tokens - self.image_tokens, seed)]

    def ask(
        self,
        prompt: Sequence[int],
        name: str,
        max_tokens: int,
        *,
        stop: str | None = None,
        last: bool = False,
    ) -> Turn:
        """Run one turn, and wait for all copies that it caused.

        Args:
            name: name of the job. Jobs of different names share no KV.
            stop: string that ends the answer.
            last: True if this is the job's last turn.
        """
        from vllm import SamplingParams

        self._sources.clear()
        self._turns += 1
        hints = {"job_id": name, "is_last_step": last, "expected_tool_s": TOOL_S}
        params = SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            ignore_eos=True,
            logprobs=1,
            stop=[stop] if stop is not None else None,
            extra_args={"kv_transfer_params": hints},
        )
        asked: dict[str, Any] = {"prompt_token_ids": list(prompt), "cache_salt": name}
        if self.image is not None:
            asked["multi_modal_data"] = {"image": self.image}
        (output,) = self.engine.llm.generate([asked], params, use_tqdm=False, **self.options)
        self.engine.settle()
        source = next(iter(self._sources.values()))  # later entries are the requests of idle steps
        answer = output.outputs[0]
        steps = zip(answer.token_ids, answer.logprobs, strict=False)
        return Turn(
            self._turns,
            list(prompt),
            list(answer.token_ids),
            [step[token].logprob for token, step in steps],
            source,
            self._workers(digests, f"{self._turns} started", source.found),
        )

    def started(self, turn: Turn, tokens: int) -> Sequence[Digests]:
        """Return digests, by rank, of the KV that a hit of ``tokens`` needs, as the turn found
        it."""
        found: Sequence[Digests] = self._workers(digests, f"{turn.number} started", tokens)
        return found

    def ended(self, turn: Turn, tokens: int) -> Sequence[Digests]:
        """Return digests, by rank, of the KV that a hit of ``tokens`` needs, as the turn left
        it."""
        found: Sequence[Digests] = self._workers(digests, f"{turn.number} ended", tokens)
        return found

    def rivals(self, tokens: int, seed: int) -> None:
        """Fill every free block of VRAM with other prompts."""
        pool, taken, round_ = self.scheduler.kv_cache_manager.block_pool, 0, 0
        while taken < 1.25 * pool.num_gpu_blocks:
            self.ask(self.text(tokens, seed + round_), f"rival {seed + round_}", 1, last=True)
            taken += sum(len(group.needs(tokens)) for group in self.groups)
            round_ += 1

    def evict_vram(self) -> None:
        """Remove every block of VRAM from the prefix cache. Lower tiers keep their pages."""
        self.engine.settle()
        pool = self.scheduler.kv_cache_manager.block_pool
        pool.evict_blocks(set(range(pool.num_gpu_blocks)))

    def move_to_ssd(self) -> None:
        """Write all pages to SSD, and drop their copies in CPU memory."""
        pages = self.engine.half.pages
        self.engine.settle()
        pages.tiers.send_down(list(pages.index.least_valuable(pages.index.num_slots)), None)
        self.engine.settle()
        pages.index.clear()

    @contextmanager
    def zeroed(self, position: int) -> Iterator[Callable[[], int]]:
        """Zero a group's pages before they are restored, until the block ends. Yields a function
        that returns the number of zeroed pages once the block has ended."""
        struck = list[int]()
        self._workers(start_zeroing, position)
        try:
            yield lambda: sum(struck)
        finally:
            struck += self._workers(end_zeroing)

    @contextmanager
    def zeroed_layers(self, layers: list[str]) -> Iterator[None]:
        """Zero the KV that requests find for these layers, until the block ends."""
        self._zeroed_layers = layers
        try:
            yield
        finally:
            self._zeroed_layers = []

    def _workers(self, method: Callable[..., Any], *args: Any) -> Any:
        """Call a method on every worker. Returns the results by rank."""
        return self.engine.llm.collective_rpc(method, args=args)

    def _watch_steps(self) -> None:
        """Count each request's tokens as they are scheduled, and copy the KV that it found just
        before its first forward pass."""
        scheduler, schedule = self.scheduler, self.scheduler.schedule

        def scheduled(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            for request_id, tokens in output.num_scheduled_tokens.items():
                request = scheduler.requests[request_id]
                drafted = len(output.scheduled_spec_decode_tokens.get(request_id, ()))
                if request_id not in self._sources:
                    self._sources[request_id] = Source(request.num_prompt_tokens)
                    tables = scheduler.kv_cache_manager.get_block_ids(request_id)
                    found = request.num_computed_tokens - tokens
                    label = f"{self._turns} started"
                    self._workers(arm, label, tables, found, self._zeroed_layers)
                source = self._sources[request_id]
                if request.num_output_tokens:
                    source.steps += 1
                    source.drafted += drafted
                    continue
                if request.prefill_stats is not None:
                    source.local = request.prefill_stats.num_local_cached_tokens
                source.computed += tokens - drafted
            return output

        scheduler.schedule = scheduled

    def _watch_ends(self) -> None:
        """Copy the KV that a turn leaves in VRAM."""
        connector = self.scheduler.connector
        finish: Callable[..., Any] = connector.request_finished_all_groups

        def finished(request: Any, block_ids: tuple[list[int], ...]) -> Any:
            done = request.num_computed_tokens - request.num_in_flight_tokens
            kept = min(done, request.num_tokens - 1)
            self._workers(keep, f"{self._turns} ended", block_ids, kept)
            return finish(request, block_ids)

        connector.request_finished_all_groups = finished

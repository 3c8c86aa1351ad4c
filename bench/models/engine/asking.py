"""Questions to an engine in this process, one at a time, with the sources of each prompt."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tiered_kv.bench.models.catalogue import IMAGE_TOKEN
from tiered_kv.bench.servers.engines import Engine
from tiered_kv.policies.pricing.estimators import PrefillFit

from .control import begin_to_zero, end_zeroing
from .kv_groups import KvGroup, kv_groups
from .sources import Source, SourceWatch
from .vram import Digests, arm, digests, draft_layers, keep, watch

FIRST_WORD = 5
"""Tokens before it have a meaning for the tokenizer."""
TOOL_S = 300.0
"""Seconds that every turn says its tool takes: long enough for a pin to outlast a test."""


def text(tokens: int, seed: int, vocabulary: int) -> list[int]:
    """A text of random words."""
    words = range(FIRST_WORD, vocabulary)
    return random.Random(seed).choices(words, k=tokens)


@dataclass(frozen=True, slots=True)
class Turn:
    """A prompt, its answer, and where the prompt's KV came from.

    Attributes:
        number: names it among the turns of an engine.
        logprobs: of each token of the answer.
        found: digests of the bytes in VRAM that its hit needs, by rank, as they were when its
            first tokens were computed.
    """

    number: int
    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    source: Source
    found: Sequence[Digests]

    @property
    def acceptance(self) -> float | None:
        """Share of the guesses of a drafter that were right; None without any."""
        return self.source.acceptance(len(self.tokens))

    @property
    def context(self) -> list[int]:
        """Prompt and answer."""
        return self.prompt + self.tokens

    @property
    def with_kv(self) -> int:
        """Tokens of both that had KV when the turn ended: all but the last one."""
        return self.source.prompt + len(self.tokens) - 1

    def says_the_same(self, other: Turn) -> bool:
        """True if tokens and logprobs are equal bit for bit."""
        return self.tokens == other.tokens and self.logprobs == other.logprobs


class SlowPrefills(PrefillFit):
    """Prefills that are worth any restore: a fast core computes a tiny model's before a disk has
    read its pages."""

    def __init__(self) -> None:
        super().__init__()
        self.measured = True

    def seconds(self, behind: int, tokens: int) -> float:
        return float(tokens)


@dataclass(slots=True)
class Asker:
    """An engine that is asked.

    Attributes:
        image: an image that every prompt begins with; None for none.
        image_tokens: tokens that it takes.
        options: further arguments of every question.
        groups: its KV groups, as the scheduler knows them.
    """

    engine: Engine
    vocabulary: int
    image: Any = None
    image_tokens: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    groups: list[KvGroup] = field(init=False)
    _watch: SourceWatch = field(init=False)
    _turns: int = field(init=False, default=0)
    _zeroed_layers: list[str] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.groups = kv_groups(self.scheduler.kv_cache_config)
        self._watch = SourceWatch(self.scheduler, self._on_start)
        self._look_at_ends()
        self._workers(watch)
        if self.scheduler.connector is not None:
            self.engine.half.gaps.prefills.fit = SlowPrefills()

    @property
    def scheduler(self) -> Any:
        return self.engine.core.scheduler

    @property
    def alignment(self) -> int:
        """Tokens at whose multiples a prefix is found in VRAM."""
        managers = self.scheduler.kv_cache_manager.coordinator.single_type_managers
        return max(int(manager.cache_hit_alignment_tokens) for manager in managers)

    @property
    def dropped(self) -> int:
        """Tokens at the end of a hit that vLLM computes again, since a drafter's KV of the last one
        depends on what follows."""
        drafts = self.scheduler.vllm_config.speculative_config
        return self.alignment if drafts is not None and drafts.use_eagle() else 0

    @property
    def pinned_blocks(self) -> int:
        """Blocks of VRAM that the connector holds for jobs between turns."""
        return int(self.engine.half.admission.pins.held_blocks)

    def text(self, tokens: int, seed: int) -> list[int]:
        """A text of random words, that many tokens long with the image that it begins with."""
        if self.image is None:
            return text(tokens, seed, self.vocabulary)
        return [IMAGE_TOKEN, *text(tokens - self.image_tokens, seed, self.vocabulary)]

    def ask(
        self,
        prompt: Sequence[int],
        name: str,
        max_tokens: int,
        *,
        stop: str | None = None,
        last: bool = False,
    ) -> Turn:
        """Ask one prompt, and wait until all copies that it caused are done.

        Args:
            name: name of the job. Jobs of other names share no KV with it.
            stop: a string that ends the answer.
            last: True if no turn of that job follows.
        """
        self._watch.sources.clear()
        self._turns += 1
        output = self._generate(list(prompt), name, max_tokens, stop=stop, last=last)
        self.engine.settle()
        source = next(iter(self._watch.sources.values()))
        answer = output.outputs[0]
        steps = zip(answer.token_ids, answer.logprobs, strict=False)
        return Turn(
            self._turns,
            list(prompt),
            list(answer.token_ids),
            [step[token].logprob for token, step in steps],
            source,
            self._workers(digests, _began(self._turns), source.found),
        )

    def ended(self, turn: Turn, tokens: int) -> Sequence[Digests]:
        """Digests of the bytes that a hit of ``tokens`` needs, by rank, as the turn left them."""
        found: Sequence[Digests] = self._workers(digests, _ended(turn.number), tokens)
        return found

    def began(self, turn: Turn, tokens: int) -> Sequence[Digests]:
        """Digests of the bytes that a hit of ``tokens`` needs, by rank, as the turn found them."""
        found: Sequence[Digests] = self._workers(digests, _began(turn.number), tokens)
        return found

    def rivals(self, tokens: int, seed: int) -> None:
        """Have other prompts take every block of VRAM that can be had."""
        pool, taken, round_ = self.scheduler.kv_cache_manager.block_pool, 0, 0
        while taken < 1.25 * pool.num_gpu_blocks:
            self.ask(self.text(tokens, seed + round_), f"rival {seed + round_}", 1, last=True)
            taken += sum(len(group.needs(tokens)) for group in self.groups)
            round_ += 1

    def evict_vram(self) -> None:
        """Make every block of VRAM unfindable; pages elsewhere stay what they are."""
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
        """Have pages of a group zeroed before they are restored, until the block ends. What it
        gives tells how many were, once it has ended."""
        struck = list[int]()
        self._workers(begin_to_zero, position)
        try:
            yield lambda: sum(struck)
        finally:
            struck += self._workers(end_zeroing)

    @contextmanager
    def zeroed_layers(self, layers: list[str]) -> Iterator[None]:
        """Have the KV that a request finds of these layers zeroed, until the block ends."""
        self._zeroed_layers = layers
        try:
            yield
        finally:
            self._zeroed_layers = []

    def offloaded_groups(self) -> list[KvGroup]:
        """The groups that the connector copies, in its own order."""
        by_index = {group.index: group for group in self.groups}
        return [by_index[group.index] for group in self.engine.half.facts.groups]

    def _generate(
        self, prompt: list[int], name: str, max_tokens: int, *, stop: str | None, last: bool
    ) -> Any:
        from vllm import SamplingParams

        hints = {"job_id": name, "is_last_step": last, "expected_tool_s": TOOL_S}
        params = SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            ignore_eos=True,
            logprobs=1,
            stop=[stop] if stop is not None else None,
            extra_args={"kv_transfer_params": hints},
        )
        asked: dict[str, Any] = {"prompt_token_ids": prompt, "cache_salt": name}
        if self.image is not None:
            asked["multi_modal_data"] = {"image": self.image}
        return self.engine.llm.generate([asked], params, use_tqdm=False, **self.options)[0]

    def draft_layers(self) -> list[str]:
        """Names of the layers that are a drafter's."""
        return sorted({name for names in self._workers(draft_layers) for name in names})

    def _workers(self, method: Callable[..., Any], *args: Any) -> Any:
        """Answers of every worker, by rank."""
        return self.engine.llm.collective_rpc(method, args=args)

    def _look_at_ends(self) -> None:
        connector = self.scheduler.connector
        if connector is None:
            return
        finish: Callable[..., Any] = connector.request_finished_all_groups

        def finished(request: Any, block_ids: tuple[list[int], ...]) -> Any:
            done = request.num_computed_tokens - request.num_in_flight_tokens
            kept = min(done, request.num_tokens - 1)
            self._workers(keep, _ended(self._turns), block_ids, kept)
            return finish(request, block_ids)

        connector.request_finished_all_groups = finished

    def _on_start(self, request_id: str, tokens: int) -> None:
        tables = self.scheduler.kv_cache_manager.get_block_ids(request_id)
        self._workers(arm, _began(self._turns), tables, tokens, self._zeroed_layers)


def _began(turn: int) -> str:
    return f"{turn} began"


def _ended(turn: int) -> str:
    return f"{turn} ended"

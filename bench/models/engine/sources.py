"""Sources of a prompt's tokens, as vLLM's scheduler counts them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Source:
    """Sources of one request's prompt, in tokens.

    Attributes:
        prompt: its length.
        local: found in VRAM.
        external: taken from the connector.
        computed: scheduled to be computed before the first token of the answer. It is more than
            the rest if a restore failed.
        steps: steps after that token.
        drafted: guesses that these verified.
    """

    prompt: int
    local: int = 0
    external: int = 0
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

    def acceptance(self, answer: int) -> float | None:
        """Share of the guesses that were right, of an answer of so many tokens; None without any.

        The last step's may be cut off by the answer's end.
        """
        return (answer - 1 - self.steps) / self.drafted if self.drafted else None


class SourceWatch:
    """Watches an engine's scheduler. One thread, the engine's.

    Args:
        on_start: told of a request whose first tokens the next forward pass computes, and of the
            number of tokens before them.

    Attributes:
        sources: those of the requests since they were last cleared.
    """

    def __init__(self, scheduler: Any, on_start: Callable[[str, int], None]) -> None:
        self.sources: dict[str, Source] = {}
        self._on_start = on_start
        self._scheduler = scheduler
        self._schedule: Callable[..., Any] = scheduler.schedule
        scheduler.schedule = self._scheduled

    def _scheduled(self, *args: Any, **kwargs: Any) -> Any:
        output = self._schedule(*args, **kwargs)
        for request_id, tokens in output.num_scheduled_tokens.items():
            request = self._scheduler.requests[request_id]
            drafted = len(output.scheduled_spec_decode_tokens.get(request_id, ()))
            if request_id not in self.sources:
                self.sources[request_id] = Source(request.num_prompt_tokens)
                self._on_start(request_id, request.num_computed_tokens - tokens)
            source = self.sources[request_id]
            if request.num_output_tokens:
                source.steps += 1
                source.drafted += drafted
                continue
            if request.prefill_stats is not None:
                source.local = request.prefill_stats.num_local_cached_tokens
                source.external = request.prefill_stats.num_external_cached_tokens
            source.computed += tokens - drafted
        return output

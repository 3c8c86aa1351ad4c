"""Answers of a server with token ids, logprobs and the time of every token."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from tiered_kv.bench.servers.vllm_server import MODEL_NAME


@dataclass(slots=True)
class Answer:
    """An answer so far.

    Attributes:
        token_ids, logprobs: of each token.
        times: when each was there, seconds.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    @property
    def gaps_ms(self) -> list[float]:
        """Milliseconds between two tokens."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return [1e3 * (later - earlier) for earlier, later in pairs]


class Client:
    """A client of a server with snapshots.

    Args:
        url: the server's address.
    """

    def __init__(self, url: str) -> None:
        self.http = httpx.Client(base_url=url, timeout=600)

    def close(self) -> None:
        """Close the connection."""
        self.http.close()

    def ask(
        self,
        prompt: Sequence[int],
        tokens: int,
        job: str,
        salt: str | None = None,
        on_token: Callable[[Answer], None] = lambda _: None,
    ) -> Answer:
        """Ask for so many tokens, greedily.

        Args:
            on_token: told of the answer with each new token.
        """
        body: dict[str, Any] = {
            "model": MODEL_NAME,
            "prompt": list(prompt),
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 1,
            "return_token_ids": True,
            "stream": True,
            "kv_transfer_params": {"job_id": job},
        }
        if salt is not None:
            body["cache_salt"] = salt
        answer = Answer()
        with self.http.stream("POST", "/v1/completions", json=body) as response:
            if response.is_error:
                response.read()
                raise RuntimeError(f"the server refuses: {response.text}")
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                choice = json.loads(line.removeprefix("data: "))["choices"][0]
                fresh = choice.get("token_ids") or []
                if fresh:
                    answer.token_ids += fresh
                    answer.logprobs += choice["logprobs"]["token_logprobs"]
                    answer.times += [time.perf_counter()] * len(fresh)
                    on_token(answer)
        return answer

    def post(self, what: str, **asked: object) -> dict[str, Any]:
        """Ask for something of snapshots.

        Raises:
            RuntimeError: it is refused.
        """
        response = self.http.post(f"/tiered_kv/{what}", json=asked)
        if response.is_error:
            raise RuntimeError(f"the server refuses: {response.text}")
        found: dict[str, Any] = response.json()
        return found

    def metrics(self) -> str:
        """The server's metrics."""
        return self.http.get("/metrics").text

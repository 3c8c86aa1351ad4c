"""A client of a server with snapshots: for turns, and for the routes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import httpx

from tiered_kv.bench.agents.client import Answer, Ask, Reading, ask_over
from tiered_kv.bench.servers.vllm_server import MODEL_NAME


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
        on_token: Callable[[Reading], None] = lambda _: None,
    ) -> Answer:
        """Have ``tokens`` tokens answered, greedily.

        Args:
            on_token: called with the answer so far after each token.
        """
        hints = {"kv_transfer_params": {"job_id": job}}
        ask = Ask(prompt=prompt, max_tokens=tokens, salt=salt, logprobs=1, extra=hints)
        return ask_over(self.http, MODEL_NAME, ask, on_token=on_token)

    def post(self, what: str, **asked: object) -> dict[str, Any]:
        """Call a route of snapshots.

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

"""Turns of jobs, asked on one replica or another, and what came of each."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import httpx

from tiered_kv.bench.servers.vllm_server import MODEL_NAME
from tiered_kv.doctor.running_server import events

SETTLE_S = 60.0
QUIET_LOOKS = 10
"""Looks in a row that find nothing new, one in 0.3 s or so. A write that was not answered is tried
again after a second."""
WARM_UP = tuple(range(100, 400))


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer.

    Attributes:
        ms: time until all of it was there.
        sources: tokens of the prompt by where their KV came from, as the connector names them;
            empty without it.
        tokens: the answer, as the server writes token ids.
        logprobs: of these tokens.
    """

    ms: float
    sources: Mapping[str, int]
    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]


def ask(
    client: httpx.Client,
    job: str,
    prompt: Sequence[int],
    *,
    answer: int = 1,
    salt: str | None = None,
) -> Answer:
    """Ask a turn of a job for so many tokens.

    Args:
        salt: of the caches, within which alone anything is found again.

    Raises:
        httpx.HTTPError: it was not answered.
    """
    body = {
        "model": MODEL_NAME,
        "prompt": list(prompt),
        "max_tokens": answer,
        "ignore_eos": True,
        "temperature": 0,
        "logprobs": 1,
        "return_tokens_as_token_ids": True,
        "kv_transfer_params": {"job_id": job},
        **({"cache_salt": salt} if salt is not None else {}),
    }
    began = time.perf_counter()
    response = client.post("/v1/completions", json=body).raise_for_status().json()
    ms = (time.perf_counter() - began) * 1e3
    said = (response.get("kv_transfer_params") or {}).get("tiered_kv") or {}
    found = response["choices"][0]["logprobs"]
    return Answer(ms, said, tuple(found["tokens"]), tuple(found["token_logprobs"]))


def shared_pages(client: httpx.Client) -> int:
    """Pages that a replica has left for others, once it leaves no more.

    Raises:
        TimeoutError: it leaves more and more.
    """
    until, before, quiet = time.monotonic() + SETTLE_S, (-1, -1), 0
    while time.monotonic() < until:
        ask(client, "warm-up", WARM_UP)  # an idle engine tells nothing
        found = events(client.get("/metrics").text)
        # Many pages count at once, when the last of them is written; their bytes, as they go.
        now = (int(found.get("pages_shared", 0)), int(found.get("remote_bytes_written", 0)))
        quiet = quiet + 1 if now == before else 0
        if quiet == QUIET_LOOKS:
            return now[0]
        before = now
        time.sleep(0.2)
    raise TimeoutError("pages are written to the store for ever")

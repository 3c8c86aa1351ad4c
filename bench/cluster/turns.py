"""Turns of jobs on one replica or another."""

from __future__ import annotations

import time
from collections.abc import Sequence

import httpx

from tiered_kv.bench.agents.client import Answer, Ask, ask_over
from tiered_kv.bench.servers.vllm_server import MODEL_NAME
from tiered_kv.doctor.running_server import events

SETTLE_S = 60.0
QUIET_POLLS = 10
"""Polls in a row that find nothing new, one in 0.3 s or so. A write that was not answered is tried
again after a second."""
WARM_UP = tuple(range(100, 400))


def ask(
    client: httpx.Client,
    job: str,
    prompt: Sequence[int],
    *,
    answer: int = 1,
    salt: str | None = None,
) -> Answer:
    """Send a turn of a job, for an answer of ``answer`` tokens, and wait for all of it.

    Args:
        salt: of the caches: nothing is found under another one.

    Raises:
        httpx.HTTPError: it was not answered.
    """
    hints = {"kv_transfer_params": {"job_id": job}}
    turn = Ask(prompt=prompt, max_tokens=answer, salt=salt, logprobs=1, extra=hints)
    return ask_over(client, MODEL_NAME, turn)


def shared_pages(client: httpx.Client) -> int:
    """Pages that a replica has left for others, once it leaves no more.

    Raises:
        TimeoutError: it leaves more and more.
    """
    until, before, quiet = time.monotonic() + SETTLE_S, (-1, -1), 0
    while time.monotonic() < until:
        ask(client, "warm-up", WARM_UP)  # an idle engine reports nothing
        found = events(client.get("/metrics").text)
        # Many pages count together, when the last of them is written; their bytes, as they go.
        now = (int(found.get("pages_shared", 0)), int(found.get("remote_bytes_written", 0)))
        quiet = quiet + 1 if now == before else 0
        if quiet == QUIET_POLLS:
            return now[0]
        before = now
        time.sleep(0.2)
    raise TimeoutError("pages are written to the store without end")

"""A reinforcement-learning loop that alternates between rollouts of several turns and new weights.

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --host 127.0.0.1 --kv-transfer-config …
    python examples/rl_loop.py http://127.0.0.1:8000

Each policy version has its own cache salt. The rollouts of one prompt share its KV, and each
rollout keeps its own KV between turns. Call your trainer in ``update_weights``. The reset that it
calls needs vLLM's development mode, whose routes have no access control: keep them on loopback.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import httpx

VERSIONS, ROLLOUTS, TURNS, ANSWER_TOKENS = 3, 4, 3, 256
PROMPTS = ("Compute 17 * 23 with the calculator.", "Which day follows the 28th of February 2028?")
Report = dict[str, int]


def rollout(server: httpx.Client, model: str, version: int, number: int) -> list[Report]:
    """Play a rollout of a policy. Returns tiered-kv's report of each turn, which counts tokens by
    tier.
    """
    chat = [{"role": "user", "content": PROMPTS[number // ROLLOUTS]}]
    found = []
    for turn in range(1, TURNS + 1):
        body = {
            "model": model,
            "messages": chat,
            "max_tokens": ANSWER_TOKENS,
            "cache_salt": f"policy-{version}",
            "kv_transfer_params": {
                "job_id": f"policy-{version}/rollout-{number}",
                "is_last_step": turn == TURNS,
                "tool_name": "calculator",
            },
        }
        answer = server.post("/v1/chat/completions", json=body).raise_for_status().json()
        found.append(answer["kv_transfer_params"]["tiered_kv"])
        text = answer["choices"][0]["message"]["content"]
        chat += [{"role": "assistant", "content": text}]
        chat += [{"role": "user", "content": "The calculator returned 391. Continue."}]
    return found


def update_weights(server: httpx.Client, version: int) -> None:
    """Load the weights of a new policy version into the engine. In this example, only resets the
    cache.

    vLLM's weight transfer, ``collective_rpc`` and ``set_weight_version`` make tiered-kv drop all
    earlier KV by themselves. Only weights that are written without a call through the engine, for
    example by a Ray actor that calls the worker, need this reset afterwards.
    """
    server.post("/reset_prefix_cache").raise_for_status()


def train(url: str) -> list[list[list[Report]]]:
    """Run the loop. Returns the reports by version, rollout and turn."""
    reports = []
    with httpx.Client(base_url=url, timeout=600) as server, ThreadPoolExecutor() as pool:
        model = server.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        for version in range(VERSIONS):
            numbers = range(len(PROMPTS) * ROLLOUTS)
            played = list(pool.map(lambda n, v=version: rollout(server, model, v, n), numbers))
            for turn in range(TURNS):
                tokens = sum(one[turn]["prompt_tokens"] for one in played)
                computed = sum(one[turn]["recomputed_tokens"] for one in played)
                print(f"policy {version}, turn {turn + 1}: {computed:,} of {tokens:,} computed")
            reports.append(played)
            update_weights(server, version + 1)
    return reports


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    train(sys.argv[1])

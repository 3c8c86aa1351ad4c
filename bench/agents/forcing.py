"""Request field, server arguments and server environment for forced outputs.

Imports neither vLLM nor torch.
"""

from __future__ import annotations

import os
from pathlib import Path

import tiered_kv

XARG = "forced_tokens"
"""Key in ``vllm_xargs`` for the ids, a JSON list of integers."""

SERVER_ARGS = ("--logits-processors", "tiered_kv.bench.agents.forced:ForcedTokens")
"""Arguments of a server that forces outputs. ``--logprobs-mode`` must keep vLLM's default,
``raw_logprobs``."""


def server_env() -> dict[str, str]:
    """Return the environment of a server that forces outputs. It lets the server import this
    package from any folder, and selects the model runner whose interface the processor implements
    (the only runner on CPUs).
    """
    path = os.environ.get("PYTHONPATH")
    ours = str(Path(tiered_kv.__file__).parents[1])
    return {
        "PYTHONPATH": f"{ours}{os.pathsep}{path}" if path else ours,
        "VLLM_USE_V2_MODEL_RUNNER": "0",
    }

"""Versions of vLLM that the connector supports, and a defect that all of them have."""

from __future__ import annotations

import re

OLDEST = (0, 30)
NEWEST_TESTED = (0, 33)

SPECULATED_STATES = (
    "vLLM's own output can then be wrong, with or without a connector (vllm-project/vllm#53912): "
    "remove --speculative-config. To keep speculative decoding, remove --kv-transfer-config and "
    "add --no-enable-prefix-caching."
)
"""Advice on speculative decoding with prefix caching of states (Mamba, linear attention)."""


def parse_version(version: str) -> tuple[int, int] | None:
    """Return the first two numbers of a version; None if the text is not a version."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match is not None else None

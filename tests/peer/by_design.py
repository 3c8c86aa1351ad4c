"""Tests of vLLM's that pass on stock and not with ours, on purpose: by mode, with the reason."""

from __future__ import annotations

from tests.peer.peer_plugin import CONNECTOR, SCHEDULER

BY_DESIGN: dict[str, dict[str, str]] = {SCHEDULER: {}, CONNECTOR: {}}

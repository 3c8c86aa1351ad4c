"""The method that tiered-kv adds to vLLM's engine core. It answers queries from the API server.

The API server calls it by name, through vLLM's own ``call_utility_async``. It runs on the
scheduler's thread between two steps, and also in an idle engine.
"""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiered_kv.connectors.runtime.scheduler import SchedulerHalf

logger = logging.getLogger(__name__)

METHOD = "tiered_kv_answer"
"""Name of the method that is added to vLLM's engine core."""
NO_CONNECTOR, FAILED = "no connector", "failed"
"""Values of ``error`` in the reply of an engine that runs without tiered-kv's connector, or that
failed to answer."""

_failures: set[str] = set()
"""Types of exceptions that were logged in this process."""


def install() -> None:
    """Add the method to vLLM's class of engine cores, once. Existing engine cores have it too."""
    from vllm.v1.engine.core import EngineCore

    setattr(EngineCore, METHOD, _answer)


def _answer(core: Any, question: Any) -> str:
    """Answer a query (``runtime.views.questions``). Never raises.

    Returns:
        A JSON object in ASCII, which vLLM can transport whatever characters a client has used in
        its names.
    """
    half = None
    try:
        # Imported late, because plugins are also loaded in processes without an engine.
        from tiered_kv.connectors.runtime.views.questions import answer

        half = half_of(core)
        said = {"error": NO_CONNECTOR} if half is None else answer(half, question)
        return json.dumps(said, allow_nan=False)
    except Exception as error:
        kind = type(error).__name__
        if kind not in _failures:
            _failures.add(kind)
            logger.exception("a query about the engine failed (logged once)")
        if half is not None:
            half.counters.add("hook_errors")
        return json.dumps({"error": FAILED})


def half_of(core: Any) -> SchedulerHalf | None:
    """Return the scheduler half of an engine core, also inside vLLM's ``MultiConnector``; None if
    the engine has none."""
    connector = core.scheduler.get_kv_connector()
    for one in (connector, *getattr(connector, "_connectors", ())):
        half: SchedulerHalf | None = getattr(one, "scheduler_half", None)
        if half is not None:
            return half
    return None

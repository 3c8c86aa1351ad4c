"""Entry point of the group ``vllm.general_plugins``: makes the connector known by name.

vLLM calls it in the API server, the engine core and every worker, and may call it twice
in one process.
"""

import logging
import os

NAME = "TieredContinuumConnector"
MODULE = "tiered_kv.connectors.vllm.connector"

CORES = frozenset(os.sched_getaffinity(0))
"""What this process may run on. Asked here, since vLLM imports this before its CPU worker
binds the main thread to a single core, and every thread started later with it."""


def share_logging() -> None:
    """Log where vLLM logs: it sets up its own logger only, and INFO of others would be lost."""
    ours, theirs = logging.getLogger("tiered_kv"), logging.getLogger("vllm")
    if theirs.handlers and not ours.handlers:
        ours.setLevel(theirs.level)
        for handler in theirs.handlers:
            ours.addHandler(handler)


def register() -> None:
    """Register the connector with vLLM's factory, once."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, MODULE, NAME)

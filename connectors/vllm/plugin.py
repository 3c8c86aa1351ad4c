"""Entry point of the group ``vllm.general_plugins``: registers the connector by name.

vLLM calls it in the API server, the engine core and every worker, possibly twice in one process.
"""

import logging

# Imported here, since vLLM imports this before its CPU worker binds its main thread.
from tiered_kv.machine import affinity  # noqa: F401

NAME = "TieredContinuumConnector"
MODULE = "tiered_kv.connectors.vllm.connector"


def share_logging() -> None:
    """Send our log to vLLM's handlers: vLLM configures only its own logger, and our INFO would
    be lost."""
    ours, theirs = logging.getLogger("tiered_kv"), logging.getLogger("vllm")
    if theirs.handlers and not ours.handlers:
        ours.setLevel(theirs.level)
        for handler in theirs.handlers:
            ours.addHandler(handler)


def register() -> None:
    """Register the connector with vLLM's factory, once."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:  # noqa: SLF001 - it raises for known names
        KVConnectorFactory.register_connector(NAME, MODULE, NAME)

"""Entry points that vLLM's plugin system calls.

vLLM calls ``register`` in the API server, the engine core and every worker, possibly twice per
process. It calls ``endpoints`` in the API server if ``VLLM_PLUGINS`` names it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

# Imported here, because ``machine`` reads the process's cores on import, and vLLM imports this
# module before its CPU worker binds its main thread.
from tiered_kv import machine  # noqa: F401
from tiered_kv.connectors.vllm.routes.core_method import install

from .weights import install as install_weight_calls

if TYPE_CHECKING:
    from tiered_kv.connectors.vllm.routes.endpoints import TieredEndpoints

NAME = "TieredContinuumConnector"
MODULE = "tiered_kv.connectors.vllm.connector"


def share_logging() -> None:
    """Pass tiered-kv's log messages to vLLM's handlers. vLLM configures only its own logger, so
    INFO messages would otherwise be lost."""
    ours, theirs = logging.getLogger("tiered_kv"), logging.getLogger("vllm")
    if theirs.handlers and not ours.handlers:
        ours.setLevel(theirs.level)
        for handler in theirs.handlers:
            ours.addHandler(handler)


def register() -> None:
    """Register the connector with vLLM's factory, once; add tiered-kv's method to the engine core;
    and intercept calls that may change weights."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:  # noqa: SLF001 - it raises for known names
        KVConnectorFactory.register_connector(NAME, MODULE, NAME)
    install()
    install_weight_calls()


def endpoints() -> TieredEndpoints:
    """Create the routes of tiered-kv for an API server."""
    from tiered_kv.connectors.vllm.routes.endpoints import TieredEndpoints

    share_logging()
    return TieredEndpoints()

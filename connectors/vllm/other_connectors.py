"""Refuses other connectors inside vLLM's ``MultiConnector`` that would corrupt pages.

``MultiConnector`` passes its blocks to each of its connectors, but does not report which connector
fills them and when. So a block that another connector is still filling looks ready to be saved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tiered_kv.errors import UnsupportedError

HANDSHAKE = (
    "get_handshake_metadata",
    "set_xfer_handshake_metadata",
    "set_xfer_handshake_metadata_pp_aware",
)


def connector_class(config: Mapping[str, Any]) -> type:
    """Return the class of a connector for its configuration."""
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    found: type = KVConnectorFactory.get_connector_class(KVTransferConfig(**config))
    return found


def refuse_company(ours: Any, whole: Any, class_of: Callable[[Mapping[str, Any]], type]) -> None:
    """Reject other connectors that conflict with tiered-kv.

    Args:
        ours: transfer configuration that tiered-kv's connector received.
        whole: the engine's transfer configuration; tiered-kv's configuration, or the configuration
            of the connector that contains it.
        class_of: returns the class of a connector for its configuration.

    Raises:
        UnsupportedError: the message says what to change.
    """
    if whole.kv_connector == ours.kv_connector:
        return
    outer = whole.kv_connector
    parts: Sequence[Mapping[str, Any]] = whole.kv_connector_extra_config.get("connectors", ())
    others = [part for part in parts if part.get("kv_connector") != ours.kv_connector]
    if len(parts) - len(others) > 1:
        raise UnsupportedError(
            f"{outer} contains {ours.kv_connector} more than once: remove all but one."
        )
    for other in others:
        name = other.get("kv_connector")
        if other.get("kv_role") != "kv_producer":
            raise UnsupportedError(
                f"{name} may load KV too, and {ours.kv_connector} would save blocks that {name} "
                f'has not filled yet: set "kv_role":"kv_producer" for {name}, or use only one '
                "of the two connectors."
            )
        if _shakes_hands(class_of(other)):
            raise UnsupportedError(
                f"{name} and {ours.kv_connector} both need vLLM's handshake with the workers, "
                f"and {outer} supports only one: use only one of the two connectors."
            )
    if whole.kv_role != "kv_both":
        raise UnsupportedError(
            f'with "kv_role":"{whole.kv_role}" for {outer}, vLLM frees blocks that '
            f'{ours.kv_connector} is still filling: set "kv_role":"kv_both" next to '
            f'"kv_connector":"{outer}".'
        )
    if getattr(whole, "kv_load_failure_policy", "fail") != "recompute":
        raise UnsupportedError(
            "by default vLLM fails a request if a page cannot be restored, and it reads "
            f'kv_load_failure_policy only for {outer}: add "kv_load_failure_policy":"recompute" '
            f'next to "kv_connector":"{outer}".'
        )


def _shakes_hands(connector: type) -> bool:
    """True if a connector takes part in the handshake. ``MultiConnector`` queries its connectors in
    order, and passes the first reply to all of them."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    return any(
        getattr(connector, name, None) is not getattr(KVConnectorBase_V1, name)
        for name in HANDSHAKE
    )

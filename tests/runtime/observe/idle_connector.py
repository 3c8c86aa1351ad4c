"""A connector that does nothing.

With any connector, vLLM frees the windows and states of a finished request in another order, and
under async scheduling it frees all blocks a step later. In these cases, an engine in observe mode
is compared with an engine with this connector.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)


class IdleConnector(KVConnectorBase_V1, SupportsHMA):
    """Finds no tokens, and keeps no blocks."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        return False, None

    def reset_cache(self) -> bool:
        return True

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass


def with_idle_connector(config: Any) -> None:
    """Configure vLLM to create an IdleConnector."""
    from vllm.config import KVTransferConfig

    config.kv_transfer_config = KVTransferConfig(
        kv_connector="IdleConnector", kv_connector_module_path=__name__, kv_role="kv_both"
    )

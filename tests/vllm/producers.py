"""Connectors that tests configure next to TieredContinuumConnector in vLLM's ``MultiConnector``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    SupportsHMA,
)

from tiered_kv.testing.checked_kv import kv


class Nothing(KVConnectorMetadata):
    pass


class Producer(KVConnectorBase_V1, SupportsHMA):
    """A connector that only sends KV to other instances. It has no KV to load and sends nothing."""

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return Nothing()

    def request_finished_all_groups(
        self, request: Any, block_ids: Any
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass


class Talker(Producer):
    """A connector whose workers return handshake metadata for its scheduler side, as NIXL does."""

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata:
        return KVConnectorHandshakeMetadata()


@dataclass
class Transfer:
    tokens: list[int]
    blocks: list[int]
    start: int
    stop: int
    steps: int


class Receiver(Producer):
    """A connector that is declared a producer but also loads KV. It loads the full blocks of
    requests whose names start with "remote", a few steps after vLLM allocated the blocks."""

    STEPS = 3
    cells: NDArray[Any]  # KV cells of the engine, whose worker is in the same process
    under_way: dict[str, Transfer]

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        if not request.request_id.startswith("remote") or request.request_id in self.under_way:
            return 0, False
        found = (request.num_tokens - 1) // 16 * 16 - num_computed_tokens
        return max(0, found), found > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            stop = (request.num_tokens - 1) // 16 * 16
            self.under_way[request.request_id] = Transfer(
                list(request.prompt_token_ids),
                list(blocks.get_block_ids()[0]),
                stop - num_external_tokens,
                stop,
                self.STEPS,
            )

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        arrived = set()
        for request_id, one in self.under_way.items():
            one.steps -= 1
            if one.steps == 0:
                cells = kv(one.tokens)
                for position in range(one.start, one.stop):
                    self.cells[one.blocks[position // 16], position % 16] = cells[position]
                arrived.add(request_id)
        return KVConnectorTransferResults(finished_recving=arrived)

"""One model in a process of its own: stock vLLM, the connector, and the connector started again.

    python -m bench.models.child NAME FOLDER

Started by ``bench.models``. The row is written to ``row.json`` in the folder after every engine, so
that a process that dies has told what it saw.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tiered_kv.bench.models.additions import ADAPTER_RANK, write_adapter, write_drafter
from tiered_kv.bench.models.catalogue import BLOCK, EVERY, IMAGE_PIXELS, VOCABULARY, TinyModel
from tiered_kv.bench.models.dense import after_restart, before_restart
from tiered_kv.bench.models.engine.asking import Asker
from tiered_kv.bench.models.row import Row, in_a_line
from tiered_kv.bench.models.turns import stock_turns, turns
from tiered_kv.bench.models.weights import write_model
from tiered_kv.bench.servers.engines import engine

ROW = "row.json"
DTYPE = "bfloat16"
MAX_MODEL_LEN = 1024
POOL_BLOCKS = 48
CPU_GIB, SSD_GIB = 0.25, 1


class Engines:
    """Engines of one model, one after the other.

    Args:
        folder: a scratch folder.
    """

    def __init__(self, model: TinyModel, folder: Path) -> None:
        self._model = model
        self._folder = folder
        self._path = write_model(model, folder, DTYPE)
        self._adapter = write_adapter(self._path, folder, DTYPE) if model.adapter else None
        self._drafts = write_drafter(model.drafter, self._path, folder) if model.drafter else None

    @contextmanager
    def started(self, *, connector: bool, **options: Any) -> Iterator[Asker]:
        """An engine, ready to be asked; with the connector, on the same SSD each time."""
        settings: dict[str, Any] = {
            "dtype": DTYPE,
            "block_size": BLOCK,
            "max_model_len": MAX_MODEL_LEN,
            "num_gpu_blocks_override": POOL_BLOCKS,
            "enable_prefix_caching": True,
            **self._model.options,
            **options,
        }
        asked: dict[str, Any] = {}
        if self._adapter is not None:
            from vllm.lora.request import LoRARequest

            settings |= {"enable_lora": True, "max_lora_rank": ADAPTER_RANK}
            asked["lora_request"] = LoRARequest("adapter", 1, str(self._adapter))
        if self._drafts is not None:
            settings["speculative_config"] = self._drafts
        if connector:
            ssd = str(self._folder / "ssd")
            settings["extra"] = {"cpu_gib": CPU_GIB, "ssd_path": ssd, "ssd_gib": SSD_GIB}
        with engine(self._path, connector, **settings) as running:
            yield Asker(
                running,
                VOCABULARY,
                image=_image() if self._model.image_tokens else None,
                image_tokens=self._model.image_tokens,
                options=asked,
            )


def _image() -> Any:
    from PIL import Image

    return Image.linear_gradient("L").resize((IMAGE_PIXELS, IMAGE_PIXELS)).convert("RGB")


def measure(model: TinyModel, folder: Path) -> Row:
    """Everything that is to be seen of a model."""
    row, began = Row(model.name), time.monotonic()

    def tell(what: str) -> None:
        row.seconds = round(time.monotonic() - began, 1)
        (folder / ROW).write_text(json.dumps(row.as_json()))
        cpu = f"{row.seconds:.0f} s ({time.process_time():.0f} s of CPU)"
        print(f"{model.name}: {what} after {cpu}", file=sys.stderr, flush=True)

    row.cannot_start = "the process died under stock vLLM"
    tell("begins")
    try:
        engines = Engines(model, folder)
        with engines.started(connector=False) as stock:
            row.groups = [group.words for group in stock.groups]
            check_stock(stock, row)
            row.cannot_start = None
    except Exception as error:
        traceback.print_exc()
        row.cannot_start = in_a_line(error)
    tell("stock vLLM is over")
    if row.cannot_start is None:
        with row.noting("connector"):
            with engines.started(connector=True, prefix_cache_retention_interval=None) as asker:
                hit = before_restart(asker, row)
                tell("the aligned context is over")
            with engines.started(connector=True) as asker:
                after_restart(asker, row, hit)
                tell("the restart is over")
                turns(asker, row)
        tell("all is over")
    return row


def check_stock(stock: Asker, row: Row) -> None:
    """See whether stock vLLM runs the model, and what it finds in its pool.

    Raises:
        RuntimeError: it does not, in words.
    """
    config = stock.scheduler.vllm_config
    if not config.cache_config.enable_prefix_caching:
        why = " (MLA without AMX)" if config.model_config.use_mla else ""
        raise RuntimeError(f"vLLM turns prefix caching off for it on this CPU{why}")
    answer = stock_turns(stock, row)
    if max(answer) >= VOCABULARY:
        raise RuntimeError(f"it answers with token {max(answer)}, which the model does not have")


if __name__ == "__main__":
    measure(next(model for model in EVERY if model.name == sys.argv[1]), Path(sys.argv[2]))

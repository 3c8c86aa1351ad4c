"""Make PyTorch and vLLM detect a CPU without AVX-512 and AMX.

``scripts/avx2 COMMAND`` puts this folder on ``PYTHONPATH``, so that every Python process of the
command imports this module at startup. vLLM queries ``torch.cpu`` to choose its kernels. The script
sets the environment variables that PyTorch and oneDNN read.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType

TOLD = (
    "_is_avx512_supported",
    "_is_avx512_bf16_supported",
    "_is_amx_tile_supported",
    "_is_amx_fp16_supported",
    "_is_vnni_supported",
)


class WithoutAvx512(importlib.abc.MetaPathFinder):
    """An import hook that patches ``torch.cpu`` as soon as it is imported. Importing torch in this
    module would slow down every process."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch.cpu":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_change(module: ModuleType) -> None:
            load(module)
            for function in TOLD:
                setattr(module, function, lambda: False)

        spec.loader.exec_module = load_and_change  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, WithoutAvx512())

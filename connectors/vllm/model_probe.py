"""Program that queries vLLM about models on GPUs that this machine lacks. Run by ``tiered-kv
plan``.

The program reads a list of requests as JSON from standard input, and writes a line of JSON for each
request. vLLM's own model classes are built on torch's ``meta`` device, so without weights, for the
GPU that a request describes. Their layers report the KV that they keep, and vLLM groups the layers.
Parameters are counted on the transformers class of the model, or on vLLM's class if there is no
such class, or if that class interprets the file differently.

The program runs as a separate process, because it replaces everything that needs a GPU, and vLLM
keeps global state. Modules compiled for CUDA, which CPU builds of vLLM lack, are replaced by empty
modules.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import inspect
import json
import os
import re
import sys
import tempfile
import types
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COMPILED = re.compile(
    r"vllm\.(\w+\.)*_\w*C(_\w+)?|vllm\.third_party\.(flashmla|deep_gemm)\b.*|torchvision\b.*"
)
"""Modules that CPU builds of vLLM lack. Building a model calls none of them."""
SHAPING = re.compile(r"\w*(pattern|layer\w*freq|index|sparse|latent|compress)\w*")
"""Names of configuration fields that may change which KV or recurrent states the layers keep, or
the size of these."""
HARMLESS = re.compile(
    r"(img|image|video|vision|visual|audio|mm_)\w*|\w*(token|pad|ignore)\w*_index|"
    r"\w*(mtp|nextn)\w*|_\w*"
)
"""Exceptions to ``SHAPING``: fields of parts other than the language model, of drafters, and of
transformers itself."""
NEUTRAL = re.compile(r"\w*(eps|epsilon|dropout|theta|initializer_range)")
"""Names of constants that do not affect any size."""
SENSES = re.compile(r"(^|\.)(vision|visual|audio|image|mm_|multi_modal)")
"""Parts of a model through which text does not pass."""
FOR_KERNELS = re.compile(r"(cuda|cutlass|flashinfer|flashinfer_cubin)\b.*")
"""Packages that vLLM installs for CUDA, and that models import for their kernels. They are replaced
after vLLM is imported, because other packages test for them during the import."""
QUANTIZATION = ("quantization_config", "compression_config")
STATES = {
    "MAMBA1": "Mamba",
    "MAMBA2": "Mamba 2",
    "GDN_ATTN": "gated delta net",
    "SHORT_CONV": "short convolution",
    "LINEAR": "linear attention",
}
POOL_BYTES = 1 << 50
"""An arbitrary pool size, bytes, used to determine the block size."""

_reads: set[tuple[type, str]] | None = None
"""Fields read from each configuration class while a model is built; None otherwise."""


class UnknownModel(Exception):
    """A model that cannot be read. The message is shown to the user."""


@dataclass(frozen=True, slots=True)
class Built:
    """A model that was built on the ``meta`` device."""

    model: Any
    config: Any
    specs: Mapping[str, Any]
    layers: Mapping[str, Any]
    reads: Set[tuple[type, str]]


def main() -> None:
    """Answer the requests on standard input, each in a child process."""
    requests = json.load(sys.stdin)
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # keep library output out of the answers
    _pretend_gpu()
    for request in requests:
        read, write = os.pipe()
        child = os.fork()
        if not child:
            os.close(read)
            with os.fdopen(write, "w", encoding="utf-8") as end:
                json.dump(_answer(request), end)
            os._exit(0)
        os.close(write)
        with os.fdopen(read, encoding="utf-8") as end:
            text = end.read()
        os.waitpid(child, 0)
        out.write((text or json.dumps({"error": "vLLM's process ended without an answer"})) + "\n")
    out.close()


def _answer(request: Mapping[str, Any]) -> dict[str, Any]:
    try:
        with tempfile.TemporaryDirectory() as folder:
            return _read(request, Path(folder))
    except Exception as error:
        if "TIERED_KV_PROBE_TRACEBACK" in os.environ:
            import traceback

            traceback.print_exc()
        return {"error": _sentence(error)}


def _sentence(error: BaseException) -> str:
    """Return the first sentence of an exception; for pydantic, the message of its validator."""
    text = str(error)
    missing = re.search(r"'\w*Config' object has no attribute '(\w+)'", text)
    if missing or isinstance(error, KeyError):
        field = missing[1] if missing else text.strip("'")
        return f"the file has no {field}, which vLLM's class of the model reads"
    if found := re.search(r"\n(\w+).*\n *Input should be (.+) \[type=.*_value=(.+),", text):
        return f"{found[1]} is {found[3]}, but vLLM accepts {found[2]}"
    if found := re.search(r"Value error, (.+)", text):
        text = found[1]
    lines = [one.strip() for one in text.splitlines() if one.strip()] or [type(error).__name__]
    line = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    if found := re.match(r"(No valid attention backend).*kv_cache_dtype=(\w+)", text):
        line = f"{found[1]} for KV in {found[2]} on this GPU: try another --kv-dtype or --gpu"
    line = re.split(r"(?<=\w\w|.[`'\])])\. | \[type=|: dict_keys", line)[0].rstrip(". ")
    line = re.sub(r"\S*/(served|plain)\b\S*", "the folder", line)[:300]
    return (
        line if isinstance(error, (UnknownModel, ValueError)) else f"{type(error).__name__}: {line}"
    )


def _read(request: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    config, ranks = dict(request["config"]), int(request["ranks"])
    config.pop("auto_map", None)  # never run code from the model's folder
    _register(config)
    assumed: dict[str, Any] = {}
    beside = request["quantization"] and _complete(request["quantization"], assumed)
    for name in QUANTIZATION:
        if isinstance(config.get(name), dict):
            config[name] = _complete(config[name], assumed)
    served = _write(folder / "served", config, beside)
    _set_capability(request["capability"])
    built = _build_leniently(config, beside, served, request, assumed)
    model_config = built.config.model_config
    _refuse_unread(config, built)
    described = _described_quantization(config, beside)
    if described and model_config.quantization is None:
        raise UnknownModel(
            f"{model_config.architecture} is quantized in a way that vLLM does not recognize: "
            f"its quantization config has {', '.join(sorted(described))}, but no quant_method "
            "or producer that vLLM knows"
        )
    kinds, groups, block_bytes = _group(built, ranks)
    share = _chosen_share(built.model)
    element = model_config.dtype.itemsize
    weight_bytes = ranks * sum(one.numel() * one.element_size() for one in built.model.parameters())
    quantized = model_config.quantization is not None
    plain = _write(folder / "plain", _without_quantization(config), None)
    counted = _count(plain, request, None if quantized else weight_bytes / element)
    return {
        "architecture": model_config.architecture,
        "dtype": str(model_config.dtype).removeprefix("torch."),
        "kv_dtype": _kv_dtype(built.config),
        "max_len": model_config.max_model_len,
        "quantized": quantized,
        "element_bytes": element,
        "parameters": counted["total"],
        "active_parameters": counted["always"] + round(share * counted["experts"]),
        "counted_by": counted["by"],
        "weight_bytes": weight_bytes,
        "all_reduces": 2 * int(model_config.hf_text_config.num_hidden_layers),
        "kv": kinds,
        "groups": groups,
        "block_bytes": block_bytes,
        "assumed": assumed,
    }


class _Fields(dict[str, Any]):
    """Fields of a part of a model's configuration, accessible as attributes."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(f"'PlainConfig' object has no attribute '{name}'")


def _register(config: dict[str, Any]) -> None:
    """Let transformers read a model type for which it has no class, field by field.

    Fields have no defaults: vLLM's class of the model fails if the file lacks a field that it
    reads.

    Raises:
        UnknownModel: vLLM has no class for the model either.
    """
    import transformers
    import vllm
    from transformers import AutoConfig, PretrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from vllm.model_executor.models import ModelRegistry
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    kind = config.get("model_type")
    if not isinstance(kind, str) or kind in {*CONFIG_MAPPING, *_CONFIG_REGISTRY}:
        return
    named = config.get("architectures") or []
    if not {*named} & {*ModelRegistry.get_supported_archs()}:
        raise UnknownModel(
            f"vLLM {vllm.__version__} has no class {' or '.join(map(str, named)) or 'for it'}, and "
            f"transformers {transformers.__version__} has none for model_type {kind}"
        )

    class PlainConfig(PretrainedConfig):
        def __init__(self, **fields: Any) -> None:
            super().__init__(**{name: _as_fields(one) for name, one in fields.items()})

    for name, one in config.items():
        if isinstance(one, (int, float, str)):
            setattr(PlainConfig, name, one)
    AutoConfig.register(kind, PlainConfig)
    if config.get("use_sliding_window") is False:  # as all classes with this field do
        config.pop("sliding_window", None)


def _as_fields(value: Any) -> Any:
    """Make descriptions of layers, which are lists of objects, accessible by attribute."""
    if isinstance(value, list):
        return [_as_fields(one) for one in value]
    if isinstance(value, dict):
        return _Fields({name: _as_fields(one) for name, one in value.items()})
    return value


def _complete(described: Mapping[str, Any], assumed: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a quantization configuration, with the fields that vLLM's parsers require
    but published files omit. The values of these fields are added to ``assumed``."""

    def fill(part: dict[str, Any], name: str, value: Any) -> None:
        if name not in part:
            part[name] = assumed[name] = value

    made = dict(json.loads(json.dumps(described)))
    inner = made.get("quantization")
    if isinstance(inner, dict) and inner.get("quant_algo"):  # ModelOpt's own file
        fill(made, "producer", {"name": "modelopt"})
        fill(inner, "exclude_modules", ["lm_head"])
        if "FP4" in str(inner["quant_algo"]):
            fill(inner, "group_size", 16)
        inner.setdefault("kv_cache_quant_algo", None)
    elif made.get("quant_algo"):
        fill(made, "quant_method", "modelopt")
    if made.get("quant_method") == "compressed-tensors":
        for group in (made.get("config_groups") or {}).values():
            fill(group, "targets", ["Linear"])
    return made


def _write(folder: Path, config: Mapping[str, Any], quantization: Mapping[str, Any] | None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if quantization is not None:
        (folder / "hf_quant_config.json").write_text(json.dumps(quantization))
    return folder


def _described_quantization(
    config: Mapping[str, Any], beside: Mapping[str, Any] | None
) -> Mapping[str, Any]:
    parts = [config, *(one for one in config.values() if isinstance(one, dict))]
    found = [*(part.get(name) for part in parts for name in QUANTIZATION), beside]
    return next((one for one in found if isinstance(one, dict) and one), {})


def _without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _without_quantization(value) if isinstance(value, dict) else value
        for name, value in config.items()
        if name not in QUANTIZATION
    }


def _kv_dtype(config: Any) -> str:
    """Return the KV dtype by vLLM's name, with ``auto`` resolved."""
    name = str(config.cache_config.cache_dtype)
    return str(config.model_config.dtype).removeprefix("torch.") if name == "auto" else name


def _build_leniently(
    config: dict[str, Any],
    beside: Mapping[str, Any] | None,
    folder: Path,
    request: Mapping[str, Any],
    assumed: dict[str, Any],
) -> Built:
    """Build a model whose file may omit constants that do not affect sizes, and fields that window
    layers share with other layers."""
    while True:
        try:
            return _build(folder, request, int(request["ranks"]))
        except AttributeError as error:
            found = re.search(r"has no attribute '(\w+)'", str(error))
            if not found or found[1] in config:
                raise
            alike = found[1].removeprefix("swa_").replace("window_size", "window")
            if alike in config:
                value = config[alike]
            elif NEUTRAL.fullmatch(found[1]):
                value = 1e-6
            else:
                raise
            config[found[1]] = assumed[found[1]] = value
            _write(folder, config, beside)


def _build(folder: Path, request: Mapping[str, Any], ranks: int) -> Built:
    """Instantiate vLLM's model class on the ``meta`` device, as rank 0 of ``ranks`` tensor-parallel
    ranks."""
    global _reads
    import torch
    from vllm.config import get_layers_from_vllm_config, set_current_vllm_config
    from vllm.distributed import (
        destroy_distributed_environment,
        destroy_model_parallel,
        ensure_model_parallel_initialized,
        init_distributed_environment,
    )
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.platforms import current_platform
    from vllm.utils.torch_utils import set_default_torch_dtype
    from vllm.v1.worker.workspace import init_workspace_manager

    config = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        load_format="dummy",
        enforce_eager=True,
        dtype=request["dtype"],
        kv_cache_dtype=request["kv_dtype"],
        tensor_parallel_size=ranks,
        distributed_executor_backend="mp",
        disable_custom_all_reduce=True,
        enable_prefix_caching=True,
    ).create_engine_config()
    destroy_model_parallel()
    destroy_distributed_environment()
    with ExitStack() as stack:
        stack.enter_context(set_current_vllm_config(config))
        init_distributed_environment(ranks, 0, f"file://{folder}/ranks", 0, "fake")
        ensure_model_parallel_initialized(ranks, 1)
        init_workspace_manager(torch.device("meta"))
        stack.enter_context(set_default_torch_dtype(config.model_config.dtype))
        _reads = set()
        with torch.device("meta"), _on_meta():
            model = initialize_model(vllm_config=config)
        current_platform.update_block_size_for_backend(config)
        layers = get_layers_from_vllm_config(config, AttentionLayerBase)
        specs = {
            name: layer.get_kv_cache_spec(config)
            for name, layer in layers.items()
            if not getattr(layer, "kv_sharing_target_layer_name", None)
        }
        reads, _reads = _reads, None
    specs = {name: spec for name, spec in specs.items() if spec is not None}
    return Built(model, config, specs, layers, reads)


def _refuse_unread(fields: Mapping[str, Any], built: Built) -> None:
    """Refuse a model whose configuration has a field that may shape its layers and that nothing has
    read.

    Fields that the transformers class of the configuration declares or consumes count as read.

    Raises:
        UnknownModel: such a field exists.
    """
    from transformers import PretrainedConfig

    def unread(fields: Mapping[str, Any], config: Any) -> Iterator[str]:
        declared = {
            name
            for one in type(config).__mro__
            for name in (
                *getattr(one, "__annotations__", ()),
                *inspect.signature(one.__dict__.get("__init__", object.__init__)).parameters,
            )
        }
        read = {name for one, name in built.reads if one is type(config)}
        known = declared | read | {*config.attribute_map}
        for name, value in fields.items():
            part = config.__dict__.get(name)
            if isinstance(part, PretrainedConfig) and isinstance(value, dict):
                yield from unread(value, part)
            elif not value or not SHAPING.fullmatch(name) or HARMLESS.fullmatch(name):
                continue
            elif name in config.__dict__ and name not in known:
                yield name

    root = built.config.model_config.hf_config
    for name in unread(fields, root):
        raise UnknownModel(
            f"the config of {built.config.model_config.architecture} has {name}, which "
            "neither vLLM's model class nor transformers reads, so the KV size of its layers "
            "is unknown"
        )


def _group(built: Built, ranks: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]], int]:
    """Return the types of layers, the groups that share blocks, and the size of a block on one
    rank, bytes. Raises UnknownModel if the model has no KV, or KV that tiered-kv does not
    support."""
    from vllm.v1.attention.backends.utils import (
        get_supported_kv_cache_layouts,
        resolve_kv_cache_layout,
    )

    from .kv_groups import planning, read_reach

    if not built.specs:
        raise UnknownModel(f"{built.config.model_config.architecture} has no layers with KV")
    backends = {
        layer.get_attn_backend() for name, layer in built.layers.items() if name in built.specs
    }
    layouts = [one.name for one in get_supported_kv_cache_layouts(list(backends))]
    resolve_kv_cache_layout(built.config, [layouts], built.specs.values())
    found = planning().get_kv_cache_groups(built.config, dict(built.specs))
    pool = planning().get_kv_cache_config_from_groups(built.config, found, POOL_BYTES)
    kinds: Counter[tuple[Any, ...]] = Counter()
    groups = []
    for group in found:
        page, words, reaches = 0, list[str](), set()
        for name in group.layer_names:
            spec = getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(name, group.kv_cache_spec)
            reach = read_reach(spec)
            if isinstance(reach, str):
                raise UnknownModel(f"{built.config.model_config.architecture}: {reach}")
            own = built.specs[name]
            nbytes = int(own.real_page_size_bytes)
            is_state = hasattr(own, "shapes")
            kind = _words(built.layers[name], own)
            kinds[
                kind,
                (reach.kind.value, reach.span, reach.extra),
                0 if is_state else nbytes / own.block_size,
                nbytes if is_state else 0,
                0 if is_state else _pair_flops(built, name, own, ranks),
                0 if is_state else _sees(built, name, own),
            ] += 1
            page += nbytes if is_state else int(spec.real_page_size_bytes)
            reaches.add((reach.kind.value, reach.span, reach.extra))
            words += [kind] if kind not in words else []
        (reach_key,) = reaches
        groups.append(
            {
                "words": " and ".join(words),
                "reach": reach_key,
                "layers": len(group.layer_names),
                "block": int(group.kv_cache_spec.block_size),
                "page_bytes": page,
            }
        )
    names = ("words", "reach", "token_bytes", "state_bytes", "pair_flops", "sees")
    rows = [
        {**dict(zip(names, kind, strict=True)), "layers": count} for kind, count in kinds.items()
    ]
    return rows, groups, pool.kv_cache_tensors[0].size // pool.num_blocks


def _words(layer: Any, spec: Any) -> str:
    """Describe the type of a layer for display."""
    if hasattr(spec, "shapes"):
        name = spec.mamba_type.name
        return str(STATES.get(name, name.lower().replace("_", " ")))
    if "index" in type(layer).__name__.lower():
        words = "indexer"
    else:
        words = "MLA" if "MLA" in type(spec).__name__ else ""
    span = getattr(spec, "sliding_window", None)
    if chunk := getattr(spec, "attention_chunk_size", None):
        words = f"{words} chunks of {chunk:,}"
    elif span and "Sliding" in type(spec).__name__:
        words = f"{words} window of {span:,}"
    elif hasattr(getattr(layer, "impl", None), "topk_blocks"):
        words = "sparse attention"
    ratio = getattr(spec, "tokens_per_state", 1)
    return words.strip() + (f", 1 in {ratio}" if ratio != 1 else "") or "full attention"


def _pair_flops(built: Built, name: str, spec: Any, ranks: int) -> int:
    """Return the number of operations per (query, key) pair in an attention layer, over all
    ranks."""
    layer, text = built.layers[name], built.config.model_config.hf_text_config
    if (heads := getattr(layer, "num_heads", 0)) == 0:  # an indexer
        heads = getattr(text, "index_n_heads", None) or 1
        return int(2 * heads * spec.head_size)
    size = getattr(layer, "head_size", spec.head_size)
    keys = getattr(layer, "qk_nope_head_dim", 0) + getattr(layer, "qk_rope_head_dim", 0) or size
    values = getattr(layer, "v_head_dim", 0) or getattr(layer, "head_size_v", 0) or size
    return int(2 * heads * ranks * (keys + values))


def _sees(built: Built, name: str, spec: Any) -> int:
    """Return the number of tokens to which a sparse-attention query attends; 0 if it attends to all
    tokens."""
    layer, text = built.layers[name], built.config.model_config.hf_text_config
    if blocks := getattr(getattr(layer, "impl", None), "topk_blocks", 0):
        return int(blocks * layer.impl.block_size)
    is_sparse = getattr(layer, "use_sparse", False)
    return int(getattr(text, "index_topk", None) or 0) if is_sparse else 0


def _chosen_share(model: Any) -> float:
    """Return the fraction of the experts that each token uses."""
    for module in model.modules():
        if (config := getattr(module, "moe_config", None)) is not None:
            return min(1.0, float(config.experts_per_token / config.num_logical_experts))
    return 1.0


def _count(plain: Path, request: Mapping[str, Any], served: float | None) -> dict[str, Any]:
    """Count a model's parameters without quantization: in total, in experts, and in parts through
    which every text token passes. These parts include input embeddings only if the output layer
    shares them, because other input embeddings are looked up, not multiplied.

    Args:
        served: parameters of vLLM's class over all ranks; None if it was built with quantization.
            If transformers uses another default for a missing field, vLLM's class is counted.
    """
    model, by = _transformers_model(plain), "transformers"
    if model is not None and served is not None:
        total = sum(one.numel() for one in model.parameters())
        if not 0.9 < served / total < 1.1:
            model = None
    if model is None:
        model, by = _build(plain, request, 1).model, "vLLM"
    total = experts = always = 0
    tables, heads = 0, 0
    for name, one in model.named_parameters():
        total += one.numel()
        if re.search(r"\bexperts\.", name) and "shared" not in name:
            experts += one.numel()
        elif not SENSES.search(name):
            always += one.numel()
            tables += one.numel() * bool(
                re.search(r"embed_tokens|wte\b|word_embed|\bembeddings\.weight", name)
            )
            heads += one.numel() * bool(re.search(r"lm_head|embed_out", name))
    return {
        "total": total,
        "experts": experts,
        "always": always - (tables if heads else 0),
        "by": by,
    }


def _transformers_model(folder: Path) -> Any | None:
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    for auto in (
        transformers.AutoModelForCausalLM,
        transformers.AutoModelForImageTextToText,
        transformers.AutoModelForMultimodalLM,
    ):
        if type(config) in auto._model_mapping:  # noqa: SLF001 - there is no public query
            try:
                with torch.device("meta"):
                    return auto.from_config(config)
            except Exception:
                return None  # vLLM may accept a configuration that transformers rejects
    return None


# --- Simulated GPU ------------------------------------------------------------------------------


class _Anything(type):
    """Metaclass of classes that have every attribute. Each attribute is another such class."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(cls, name, _Anything(name, (_Idle,), {}))
        return getattr(cls, name)


class _Empty(types.ModuleType):
    """Module in which every name is a class that does nothing."""

    __version__ = "0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (_Idle,), {})


class _Compiled(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finder of modules that this build of vLLM lacks. It is consulted after all other finders."""

    def __init__(self, names: re.Pattern[str]) -> None:
        self._names = names

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if self._names.fullmatch(fullname):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class _Operator:
    """Stands in for a torch operator that the CPU build of vLLM lacks. Every call returns False,
    because models call such operators only to test for support."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Operator()

    def __call__(self, *args: object, **kwargs: object) -> bool:
        return False


class _Idle:
    """Stand-in for objects that only make sense on a GPU: CUDA streams, events, kernel names."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.device = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


def _replace(owner: Any, **values: Any) -> None:
    for name, value in values.items():
        setattr(owner, name, value)


def _pretend_gpu() -> None:
    """Import vLLM as on a machine with an NVIDIA GPU."""
    sys.meta_path.append(_Compiled(COMPILED))
    import torch
    import torch._ops
    import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"
    import transformers
    import vllm.platforms
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    class PlannedGpu(CudaPlatformBase):
        capability = DeviceCapability(9, 0)

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            return cls.capability

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "NVIDIA GPU"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return 1 << 50

        @classmethod
        def is_fully_connected(cls, device_ids: list[int]) -> bool:
            return True

        @classmethod
        def device_count(cls) -> int:
            return 1 << 10

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            return 128

        @classmethod
        def set_device(cls, device: Any) -> None:
            pass

        @classmethod
        def get_device_communicator_cls(cls) -> str:
            return "vllm.distributed.device_communicators.base_device_communicator." + (
                "DeviceCommunicatorBase"
            )

        @classmethod
        def import_kernels(cls) -> None:
            pass

    _replace(vllm.platforms, _current_platform=PlannedGpu())
    new_group = torch.distributed.new_group
    _replace(
        torch.distributed,
        new_group=lambda ranks=None, *args, **kwargs: new_group(ranks, backend="fake"),
    )
    device = types.SimpleNamespace(
        name="NVIDIA GPU", multi_processor_count=128, major=9, minor=0, total_memory=1 << 50
    )
    _replace(
        torch.cuda,
        Stream=_Idle,
        Event=_Idle,
        current_stream=lambda *args: _Idle(),
        current_device=lambda: 0,
        get_device_properties=lambda *args: device,
        _lazy_init=lambda: None,
        is_current_stream_capturing=lambda: False,
    )
    _replace(torch.accelerator, empty_cache=lambda: None)
    import vllm._custom_ops
    import vllm.triton_utils
    import vllm.utils.flashinfer
    import vllm.utils.import_utils

    namespace = torch._ops._OpNamespace  # noqa: SLF001
    get_operator = namespace.__getattr__

    def get(self: Any, name: str) -> Any:
        try:
            return get_operator(self, name)
        except AttributeError:
            if name.startswith("__") or not self.name.startswith("_"):
                raise
            return _Operator()

    _replace(namespace, __getattr__=get)
    _replace(vllm.utils.import_utils, has_deep_gemm=lambda: True)
    _replace(  # vLLM inspects FlashInfer's kernels, installed with CUDA only
        vllm.utils.flashinfer,
        has_flashinfer_sm90_nope_mla=lambda: True,
        has_flashinfer_sparse_mla_sm120=lambda: True,
        has_flashinfer_sparse_mla_sm120_config=lambda *args: True,
    )
    if not isinstance(vllm.triton_utils.triton.Config, type):  # without Triton
        vllm.triton_utils.triton.Config = _triton_config
    import vllm.model_executor.models.registry as registry

    _replace(
        registry,
        _run_in_subprocess=lambda function: function(),
        _try_inspect_model_cls=lambda name, model: model.inspect_model_cls(),
    )
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    _replace(MessageQueue, create_from_process_group=lambda *args, **kwargs: None)
    import vllm.engine.arg_utils
    import vllm.model_executor.model_loader.utils

    sys.meta_path.append(_Compiled(FOR_KERNELS))
    get_field = transformers.PretrainedConfig.__getattribute__

    @functools.wraps(get_field)
    def note(self: Any, name: str) -> Any:
        if _reads is not None:
            _reads.add((type(self), name))
        return get_field(self, name)

    _replace(transformers.PretrainedConfig, __getattribute__=note)


def _triton_config(kwargs: Any, num_warps: int = 4, num_stages: int = 1, **more: Any) -> Any:
    return types.SimpleNamespace(kwargs=kwargs, num_warps=num_warps, num_stages=num_stages, **more)


def _set_capability(capability: Any) -> None:
    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability

    type(current_platform).capability = DeviceCapability(*capability)


def _on_meta() -> Any:
    """Return a mode in which tensors that a model places on its GPU are created on the ``meta``
    device."""
    import torch
    from torch.overrides import TorchFunctionMode

    class OnMeta(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = dict(kwargs or {})
            device = kwargs.get("device")
            if device is not None and (
                isinstance(device, int) or torch.device(device).type == "cuda"
            ):
                kwargs["device"] = "meta"
            return func(*args, **kwargs)

    return OnMeta()


if __name__ == "__main__":
    main()

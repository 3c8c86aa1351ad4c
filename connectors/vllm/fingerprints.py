"""Fingerprints of the running engine: one for the base model, one for each adapter."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

from tiered_kv.connectors.runtime.base import EngineFacts
from tiered_kv.digests import WEIGHT_SUFFIXES, default_cache, digest_files, model_files
from tiered_kv.keys import DIGEST_BYTES, UNIDENTIFIED, Fingerprint, PageKey

logger = logging.getLogger(__name__)


class Fingerprints:
    """Fingerprints by request, 16 bytes each, for the current generation.

    Adapters are digested on a thread, since hashing files would block the scheduler. Until an
    adapter's digest is known, its requests are neither saved nor restored.
    """

    def __init__(self, base: Sequence[Fingerprint]) -> None:
        self._base = list(base)
        self._adapters: dict[tuple[int, str], Future[str]] = {}
        self._digests: dict[tuple[str, int], bytes] = {}
        self._groups: dict[bytes, int] = {}
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="tiered-kv-digest")

    def base(self, group: int) -> Fingerprint:
        """The base model's pages of a group, in this generation. It names the workers' stores:
        pages of adapters lie there under keys of their own."""
        return self._base[group]

    def group_of(self, key: PageKey) -> int | None:
        """The group of a page of this generation; None of others."""
        return self._groups.get(key[:DIGEST_BYTES])

    def next_generation(self) -> None:
        """Make every key so far unreachable."""
        generation = secrets.token_hex(8)
        self._base = [replace(one, generation=generation) for one in self._base]
        self._digests.clear()
        self._groups.clear()

    def of(self, adapter: Any | None, group: int) -> bytes | None:
        """Digest of a group's pages of requests with that adapter (vLLM's ``LoRARequest``); None
        while (or if) its files are unknown."""
        if adapter is None:
            return self._digest("", group)
        where = (adapter.lora_int_id, adapter.lora_path)
        if getattr(adapter, "load_inplace", False) or where not in self._adapters:
            path = Path(adapter.lora_path).expanduser()
            self._adapters[where] = self._threads.submit(_digest_adapter, path)
        digest = self._adapters[where]
        if not digest.done() or digest.exception() is not None:
            return None
        return self._digest(digest.result(), group)

    def drain(self) -> None:
        """Wait for the digests under way."""
        wait(self._adapters.values())

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _digest(self, adapter: str, group: int) -> bytes:
        digest = self._digests.get((adapter, group))
        if digest is None:
            digest = replace(self._base[group], adapter=adapter).digest()
            self._digests[adapter, group] = digest
            self._groups[digest] = group
        return digest


def base_fingerprints(vllm_config: Any, facts: EngineFacts) -> tuple[Fingerprint, ...]:
    """Fingerprints of the base model's pages, one for each group. Reads the model's files, unless
    cached."""
    if not facts.groups:
        return ()
    model, cache = vllm_config.model_config, vllm_config.cache_config
    config = _config(model)
    if len(facts.groups) > 1:  # a page of one group says nothing without those of the others
        config["groups"] = [
            f"{group.index} {group.block_size} {group.reach.describe()} {group.describe()}"
            for group in facts.groups
        ]
    digest = _weights_digest(model, vllm_config.load_config)
    if (drafter := _drafter(vllm_config)) is not None:
        config["drafter"] = drafter
        if drafter["weights"].startswith(UNIDENTIFIED):
            digest = drafter["weights"]
    stages = vllm_config.parallel_config.pipeline_parallel_size
    if stages > 1:  # ranks have unlike layers then
        config["stages"] = stages
    return tuple(
        Fingerprint(
            model=digest,
            adapter="",
            dtype=str(model.dtype),
            cache_dtype=str(cache.cache_dtype),
            kv_scales="checkpoint",
            config=config,
            group=group.index,
            block_size=group.block_size,
            layout=group.describe(),
            ranks=facts.ranks,
            hash_algorithm=_hash_algorithm(cache),
            generation="",
        )
        for group in facts.groups
    )


def _config(model: Any) -> dict[str, object]:
    """Return the text model's whole configuration, since ``--hf-overrides`` may change anything
    that no file records. Configurations of other parts, such as a vision model, are added only if
    overridden: the files cover them."""
    loaded = _loaded(model.hf_text_config)
    overrides: Any = model.hf_overrides
    beside = model.hf_config is not model.hf_text_config
    if overrides and beside and (callable(overrides) or set(overrides) - {"text_config"}):
        loaded["whole"] = _loaded(model.hf_config)
    return loaded


def _loaded(config: Any) -> dict[str, object]:
    items = config.to_dict().items()
    return {k: v for k, v in items if not k.startswith("_") and k != "transformers_version"}


def _drafter(vllm_config: Any) -> dict[str, Any] | None:
    """The drafter whose layers lie in the pages as well; None if there is none."""
    speculation = vllm_config.speculative_config
    if speculation is None or not speculation.uses_draft_kv_cache():
        return None
    model = speculation.draft_model_config
    weights = _weights_digest(model, vllm_config.load_config)
    return {"method": speculation.method, "weights": weights, "config": _loaded(model.hf_config)}


def _hash_algorithm(cache: Any) -> str:
    return f"{cache.prefix_caching_hash_algo}/{os.environ.get('PYTHONHASHSEED', '')}"


def _weights_digest(model: Any, load: Any) -> str:
    """Digest of the weights as served; random, and so never found again, for a model without
    files."""
    unknown = f"{UNIDENTIFIED}{secrets.token_hex(8)}"
    if str(load.load_format) == "dummy":
        return unknown
    try:
        folder = Path(model.model)
        if not folder.exists():
            from huggingface_hub import snapshot_download

            folder = Path(
                snapshot_download(model.model, revision=model.revision, local_files_only=True)
            )
        files = model_files(folder)
        # Of a model in object storage vLLM has the configuration here, and its weights elsewhere.
        if any(path.suffix in WEIGHT_SUFFIXES for path in files):
            return f"{digest_files(files, default_cache())}/{model.quantization}"
        reason = "no weight files found"
    except Exception as error:  # hub caches and remote loaders raise what they like
        reason = str(error)
    logger.warning(
        "the weights of %s cannot be told from others (%s): pages on SSD are not found again "
        "after a restart",
        model.model,
        reason,
    )
    return unknown


def _digest_adapter(path: Path) -> str:
    try:
        files = model_files(path)
        if not files:  # a name that the worker looks up on a hub, whatever is there today
            raise FileNotFoundError("it has no files here; load it by its local folder")
        return digest_files(files)
    except OSError as error:
        logger.warning("KV of adapter %s is neither saved nor restored: %s", path, error)
        raise

"""Fingerprints of the running engine: one for the base model, and one for each adapter."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from tiered_kv.connectors.runtime.base import EngineFacts
from tiered_kv.digests import WEIGHT_SUFFIXES, default_cache, digest_files, model_files
from tiered_kv.keys import DIGEST_BYTES, UNIDENTIFIED, UPDATED, Fingerprint, PageKey

logger = logging.getLogger(__name__)

Key = TypeVar("Key")
Value = TypeVar("Value")


Stamp = tuple[int, ...]
"""Inode, size, and modification times of a file."""

MOST_ADAPTERS = 4096
"""Maximum number of adapters tracked. If there are more, the adapter loaded longest ago is
forgotten."""


@dataclass(slots=True)
class _Load:
    """An adapter that vLLM has loaded.

    Attributes:
        path: folder of the adapter's files.
        stamps: stamps of these files when they were loaded; None if the files may differ from what
            was loaded.
        identity: text that identifies the adapter in its page keys: the digest of its files, or a
            random text. None if its pages get no keys.
        check: running comparison of the files with the stamps.
    """

    path: Path
    stamps: Mapping[str, Stamp] | None
    identity: Future[str] | None
    check: Future[None] | None = None

    def distrust(self) -> None:
        """Stop giving keys to the adapter's pages, because its weights are no longer known."""
        self.stamps = None
        if self.identity is not None:
            self.identity.cancel()
            self.identity = None


class Fingerprints:
    """Digests of fingerprints by adapter and page group, 16 bytes each, for the current generation.

    An adapter is identified by its files as they were when vLLM loaded it (:meth:`on_load`; at the
    first request, if no call loaded it). The files are digested once per load, on a thread, because
    reading them would block the scheduler. Until the digest is known, the KV of the adapter's
    requests is neither saved nor restored. The same applies once the files have changed, because
    vLLM may read the files again at any time, and it is then unknown which weights it uses. An
    adapter that was loaded in place is identified only by the load, so that no other engine shares
    its pages.

    Args:
        base: fingerprints of the base model's pages, by group.
        hashes_paths: True if vLLM's block hashes cover an adapter's path, False if only its name.
    """

    def __init__(self, base: Sequence[Fingerprint], *, hashes_paths: bool = True) -> None:
        self._base = list(base)
        self._hashes_paths = hashes_paths
        self._loads: dict[int, _Load] = {}
        self._hashed: dict[str, tuple[str, Mapping[str, Stamp] | None]] = {}
        self._digests: dict[tuple[str, int], bytes] = {}
        self._groups: dict[bytes, int] = {}
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="tiered-kv-digest")

    def base(self, group: int) -> Fingerprint:
        """Return the fingerprint of the base model's pages in a group, for this generation. The
        workers' stores are named after it. They also contain pages of adapters, under different
        keys."""
        return self._base[group]

    def group_of(self, key: PageKey) -> int | None:
        """Return the group of a page of this generation; None for other pages."""
        return self._groups.get(key[:DIGEST_BYTES])

    def next_generation(self) -> None:
        """Invalidate all existing keys."""
        generation = secrets.token_hex(8)
        self._base = [replace(one, generation=generation) for one in self._base]
        self._digests.clear()
        self._groups.clear()

    def forget_weights(self) -> None:
        """Invalidate all existing keys, because the base model's weights may no longer match its
        files."""
        model = f"{UPDATED}{secrets.token_hex(8)}"
        self._base = [replace(one, model=model) for one in self._base]
        self.next_generation()

    def on_load(self, adapter: Any) -> bool:
        """Record that vLLM is about to load an adapter (vLLM's ``LoRARequest``). Checks the
        adapter's files without reading them.

        Returns:
            True if vLLM's cache may have KV of other weights under the same hashes.
        """
        loaded_before = adapter.lora_int_id in self._loads
        in_place = bool(getattr(adapter, "load_inplace", False))
        return self._load(adapter) or (in_place and loaded_before)

    def _load(self, adapter: Any) -> bool:
        """Record a load. Returns True if other weights with the same block hashes were loaded
        before."""
        number, path = adapter.lora_int_id, Path(adapter.lora_path).expanduser()
        stamps = _stamps(path)
        hashed = adapter.lora_path if self._hashes_paths else adapter.lora_name
        before = self._hashed.get(hashed)
        self._remember(self._hashed, hashed, (adapter.lora_path, stamps))
        changed = before not in (None, (adapter.lora_path, stamps))
        in_place = bool(getattr(adapter, "load_inplace", False)) and stamps is not None
        if (known := self._loads.get(number)) is not None:
            if not in_place:  # vLLM keeps the adapter, or reads its files again
                if known.path != path or known.stamps != stamps:
                    known.distrust()
                return changed
            known.distrust()
        if in_place:
            identity = Future[str]()
            identity.set_result(f"loaded in place {secrets.token_hex(8)}")
        else:
            identity = self._threads.submit(_digest_adapter, path, stamps)
        self._remember(self._loads, number, _Load(path, stamps, identity))
        return changed

    def on_unload(self, number: int) -> None:
        """Record that vLLM unloads an adapter."""
        if (load := self._loads.pop(number, None)) is not None:
            load.distrust()

    def of(self, adapter: Any | None, group: int) -> bytes | None:
        """Return the digest for a group's pages of requests with that adapter (vLLM's
        ``LoRARequest``); None while the weights of their KV are unknown."""
        if adapter is None:
            return self._digest("", group)
        load = self._loads.get(adapter.lora_int_id)
        if load is None or load.path != Path(adapter.lora_path).expanduser():
            if self._load(adapter):  # its weights changed, but no new generation started
                self._loads[adapter.lora_int_id].distrust()
            load = self._loads[adapter.lora_int_id]
        self._check(load)
        identity = load.identity
        if identity is None or not identity.done() or identity.exception() is not None:
            return None
        return self._digest(identity.result(), group)

    def drain(self) -> None:
        """Wait until the file work in progress has finished."""
        self._threads.submit(int).result()

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _check(self, load: _Load) -> None:
        """Start to compare an adapter's files with the files that were loaded, on the thread, and
        handle the result of the last comparison. At most one comparison per adapter runs at a
        time."""
        if load.check is not None and load.check.done():
            if load.check.exception() is not None and load.identity is not None:
                logger.warning(
                    "KV of adapter %s is neither saved nor restored: %s",
                    load.path,
                    load.check.exception(),
                )
                load.distrust()
            load.check = None
        if load.check is None and load.identity is not None:
            load.check = self._threads.submit(_compare, load.path, load.stamps)

    @staticmethod
    def _remember(known: dict[Key, Value], key: Key, value: Value) -> None:
        known.pop(key, None)
        known[key] = value
        if len(known) > MOST_ADAPTERS:
            del known[next(iter(known))]

    def _digest(self, adapter: str, group: int) -> bytes:
        digest = self._digests.get((adapter, group))
        if digest is None:
            digest = replace(self._base[group], adapter=adapter).digest()
            self._digests[adapter, group] = digest
            self._groups[digest] = group
        return digest


def base_fingerprints(vllm_config: Any, facts: EngineFacts) -> tuple[Fingerprint, ...]:
    """Return the fingerprints of the base model's pages, one per group. Reads the model's files,
    unless their digests are cached."""
    if not facts.groups:
        return ()
    model, cache = vllm_config.model_config, vllm_config.cache_config
    config = _config(model)
    if len(facts.groups) > 1:  # a page is only usable with the pages of the other groups
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
    if stages > 1:  # ranks have different layers then
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
    """Return the text model's whole configuration, because ``--hf-overrides`` may change fields
    that no file records. Configurations of other parts, such as a vision model, are added only if
    overridden, because otherwise the model's files determine them."""
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
    """Return a description of the drafter whose layers are also in the pages; None if there is
    none."""
    speculation = vllm_config.speculative_config
    if speculation is None or not speculation.uses_draft_kv_cache():
        return None
    model = speculation.draft_model_config
    weights = _weights_digest(model, vllm_config.load_config)
    return {"method": speculation.method, "weights": weights, "config": _loaded(model.hf_config)}


def _hash_algorithm(cache: Any) -> str:
    return f"{cache.prefix_caching_hash_algo}/{os.environ.get('PYTHONHASHSEED', '')}"


def _weights_digest(model: Any, load: Any) -> str:
    """Return the digest of the served weights. For a model without files, the digest is random, so
    that no other engine finds its pages."""
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
        # For a model in object storage, vLLM has only the configuration here.
        if any(path.suffix in WEIGHT_SUFFIXES for path in files):
            return f"{digest_files(files, default_cache())}/{model.quantization}"
        reason = "no weight files found"
    except Exception as error:  # hub caches and remote loaders raise anything
        reason = str(error)
    logger.warning(
        "the weights of %s cannot be identified (%s): a restarted server cannot reuse this "
        "server's pages",
        model.model,
        reason,
    )
    return unknown


def _stamps(path: Path) -> Mapping[str, Stamp] | None:
    """Return the stamps of an adapter's files; None if the adapter has no local files."""
    try:
        found = {}
        for file in model_files(path):
            it = file.stat()
            found[str(file)] = (it.st_ino, it.st_size, it.st_mtime_ns, it.st_ctime_ns)
        return found or None
    except OSError:
        return None


def _compare(path: Path, stamps: Mapping[str, Stamp] | None) -> None:
    """Check that an adapter's files are the files that were loaded.

    Raises:
        OSError: the files have changed.
    """
    if _stamps(path) != stamps:
        raise OSError("the adapter's files changed after they were loaded. Load the adapter again")


def _digest_adapter(path: Path, stamps: Mapping[str, Stamp] | None) -> str:
    try:
        files = model_files(path)
        if not files:  # a name that the worker resolves on a hub
            raise FileNotFoundError("the adapter has no local files. Load it from a local folder")
        digest = digest_files(files)
        _compare(path, stamps)
        return digest
    except OSError as error:
        logger.warning("KV of adapter %s is neither saved nor restored: %s", path, error)
        raise

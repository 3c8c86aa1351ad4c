"""Digests of files, which identify the weights that computed a KV cache.

Hashing tens of gigabytes at every start would take noticeable time, so digests of large files are
cached by path, size and mtime. xxh3-128 is sufficient: it protects against mistakes, not against
an attacker, who could also change the cache.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import xxhash

from .json_fields import MOST_BYTES, mapping, read_json
from .plain_files import read_own, replace_file

logger = logging.getLogger(__name__)

CACHED_BYTES = 16 << 20
"""Minimum size of a file whose digest is cached, bytes. Smaller files are read within
milliseconds."""
CHUNK_BYTES = 8 << 20
"""Size of one read, bytes."""
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_CONFIG_NAMES = ("config.json", "adapter_config.json", "hf_quant_config.json")


def model_files(folder: Path) -> list[Path]:
    """Return the files of a model or adapter that determine its KV: weights and configuration.

    ``folder`` may be a single weight file.
    """
    if folder.is_file():
        return [folder]
    found = (path for path in folder.rglob("*") if path.is_file())
    return sorted(p for p in found if p.suffix in WEIGHT_SUFFIXES or p.name in _CONFIG_NAMES)


def digest_files(paths: Sequence[Path], cache: Path | None = None) -> str:
    """Return the hex digest of the names and contents of ``paths``. Their folders do not matter.

    Args:
        paths: files, in a deterministic order.
        cache: JSON file of earlier digests of large files; None reads every byte.

    Raises:
        OSError: a file cannot be read.
    """
    stats = [path.stat() for path in paths]
    large = any(stat.st_size >= CACHED_BYTES for stat in stats)
    known = _read_cache(cache) if large else {}
    fresh: dict[str, list[object]] = {}
    whole = xxhash.xxh3_128()
    for path, stat in zip(paths, stats, strict=True):
        signature = [stat.st_size, stat.st_mtime_ns]
        where = str(path.resolve())
        entry = known.get(where)
        if entry is not None and entry[:2] == signature:
            digest = str(entry[2])
        else:
            digest = digest_file(path)
            if stat.st_size >= CACHED_BYTES:
                fresh[where] = [*signature, digest]
        whole.update(f"{path.name}:{digest}\n".encode())
    if cache is not None and fresh:
        there = {where: entry for where, entry in known.items() if Path(where).exists()}
        _write_cache(cache, {**there, **fresh})
    return whole.hexdigest()


def default_cache() -> Path:
    """Path of the digest cache: ``$XDG_CACHE_HOME/tiered-kv/digests.json``, or
    ``~/.cache/tiered-kv/digests.json`` if the variable is not set."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "tiered-kv" / "digests.json"


def digest_file(path: Path) -> str:
    """Return the hex digest of a file's contents. Raises OSError if the file cannot be read."""
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _read_cache(cache: Path | None) -> dict[str, list[object]]:
    if cache is None:
        return {}
    try:
        entries = mapping(read_json(read_own(cache, MOST_BYTES)))
    except (OSError, ValueError):
        return {}
    return dict(_valid_entries(entries.items()))


def _valid_entries(items: Iterable[tuple[str, object]]) -> Iterable[tuple[str, list[object]]]:
    for where, entry in items:
        if isinstance(entry, list) and len(entry) == 3 and isinstance(entry[2], str):
            yield where, entry


def _write_cache(cache: Path, entries: dict[str, list[object]]) -> None:
    """Replace the whole cache file. A failure is only logged, because it only costs time."""
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        os.close(replace_file(cache, json.dumps(entries).encode(), durable=False))
    except OSError as error:
        logger.info(
            "the digest cache %s cannot be written, so the weight files are hashed again at the "
            "next start: %s",
            cache,
            error,
        )

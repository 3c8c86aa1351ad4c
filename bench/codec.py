"""Size of KV pages on the SSD and its cost: the centred codec and zstd.

    python -m bench.codec --json

Pages are those of the small real model, as the worker keeps them in its CPU pool. The codec is
trained on source code and measured on prose that it has not seen. bf16 and fp16 pages each come
from an engine of that dtype (cast from bf16, fp16 would have three mantissa bits that are always
zero). fp8 pages are the bf16 ones cast with scale 1, which vLLM uses when none was calibrated.

``ratio`` is raw over stored bytes. ``*_mbs`` is MB of raw pages per second of CPU time of one core,
the best of many rounds in which all contestants take turns; ``*_vs_zstd1`` is that over zstd level
1 on the same pages in the same rounds. ``entropy_bound`` is the ratio at the order-0 entropy of the
symbols of the measured pages, centred by these pages' own centres, with one static code for all and
the rest stored uncompressed: no static code and no training text can exceed it. ``zipnn_ratio`` is
null where zipnn is not installed or has no such dtype.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from tiered_kv.bench.output import AsJson, ModelFolder, benchmark, run_benchmark
from tiered_kv.bench.servers.engines import Engine, engine, real_texts
from tiered_kv.bench.servers.model import small_model
from tiered_kv.codecs.base import Bytes, Codec, ElementType, PageFormat
from tiered_kv.codecs.centred import CentredCodec
from tiered_kv.codecs.zstd import ZstdCodec

PAGE_TOKENS = 32
TRAINING_PAGES, HELD_OUT_PAGES = 24, 8
ROUNDS = 100
ZIPNN_DTYPES = {ElementType.BF16: "bfloat16", ElementType.FP16: "float16"}

Tick = Callable[[str], None]
Result = dict[str, float | None]


def prose(model: Path, tokens: int) -> list[int]:
    """Token ids of Python's reference manual, which every Python carries for ``help()``."""
    from pydoc_data.topics import topics

    from transformers import AutoTokenizer

    text = "\n".join(topics[name] for name in sorted(topics))
    ids = AutoTokenizer.from_pretrained(str(model))(text[: tokens * 8])["input_ids"]
    return [int(token) for token in ids[:tokens]]


def saved_pages(running: Engine, prompt: list[int]) -> list[Bytes]:
    """Run a prompt; the pages that it adds to the CPU pool.

    Raises:
        RuntimeError: the prompt fills another number of pages.
    """
    slots = running.worker.pool.slots
    before = slots.any(axis=1)
    running.generate([prompt], max_tokens=1)
    running.settle()
    pages = [slot.copy() for slot in slots[slots.any(axis=1) & ~before]]
    if len(pages) != len(prompt) // PAGE_TOKENS:
        raise RuntimeError(f"{len(pages)} pages were saved of a prompt of {len(prompt)} tokens")
    return pages


def real_pages(model: Path, dtype: str) -> tuple[list[Bytes], list[Bytes]]:
    """Pages to train on and pages held out, of an engine of that dtype."""
    code = real_texts(model, [TRAINING_PAGES * PAGE_TOKENS])[0]
    options = {"dtype": dtype, "block_size": PAGE_TOKENS}
    with engine(model, connector=True, extra={"cpu_gib": 0.1}, **options) as running:
        training = saved_pages(running, code)
        return training, saved_pages(running, prose(model, HELD_OUT_PAGES * PAGE_TOKENS))


def cast(pages: Sequence[Bytes], dtype: str) -> list[Bytes]:
    """bf16 pages as pages of another torch dtype, with scale 1."""
    import torch

    to = getattr(torch, dtype)
    cast_pages = []
    for page in pages:
        values = torch.from_numpy(page).view(torch.bfloat16).to(torch.float32)
        cast_pages.append(values.to(to).view(torch.uint8).numpy())
    return cast_pages


def entropy_bits(symbols: NDArray[np.uint8]) -> float:
    """Order-0 entropy, bits per symbol."""
    counts = np.bincount(symbols.reshape(-1), minlength=256)
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log2(shares)).sum())


def entropy_bound(pages: Sequence[Bytes], page_format: PageFormat) -> float:
    """The best ratio of a static code, with the best centres: see the module."""
    codec = CentredCodec(page_format).trained(list(pages))
    encoded = [codec.encode(page) for page in pages]
    unpack = zstandard.ZstdDecompressor().decompress
    symbols = np.stack([np.frombuffer(unpack(one.frame.data), np.uint8) for one in encoded])
    stored = sum(one.plane.nbytes for one in encoded) + symbols.size * entropy_bits(symbols) / 8
    return sum(page.nbytes for page in pages) / stored


def zipnn_ratio(pages: Sequence[Bytes], element: ElementType) -> float | None:
    """zipnn's ratio on pages one by one; None if it is missing or does not support the dtype."""
    try:
        zipnn: Any = importlib.import_module("zipnn")
    except ImportError:
        return None
    if element not in ZIPNN_DTYPES:
        return None
    coder = zipnn.ZipNN(bytearray_dtype=ZIPNN_DTYPES[element], input_format="byte", threads=1)
    stored = sum(len(coder.compress(page.tobytes())) for page in pages)
    return sum(page.nbytes for page in pages) / stored


def race(codecs: Mapping[str, Codec], pages: Sequence[Bytes], rounds: int) -> dict[str, Result]:
    """Every codec's ``ratio``, ``encode_mbs`` and ``decode_mbs``.

    Raises:
        RuntimeError: a page did not come back as it was.
    """
    raw = sum(page.nbytes for page in pages)
    outs = [np.empty_like(page) for page in pages]
    best = {name: [float("inf")] * 2 for name in codecs}
    results: dict[str, Result] = {}
    for turn in range(-1, rounds):
        for name, codec in codecs.items():
            start = time.thread_time()
            encoded = [codec.encode(page) for page in pages]
            between = time.thread_time()
            for one, out in zip(encoded, outs, strict=True):
                codec.decode(one, out)
            end = time.thread_time()
            if turn < 0:  # warms up, and is checked
                if not all(map(np.array_equal, outs, pages)):
                    raise RuntimeError(f"{name} did not return the pages that it was given")
                results[name] = {"ratio": raw / sum(one.nbytes for one in encoded)}
                for out in outs:
                    out.fill(0)  # so that the next codec cannot pass with this one's output
                continue
            encode_s, decode_s = best[name]
            best[name] = [min(encode_s, between - start), min(decode_s, end - between)]
    for name, (encode_s, decode_s) in best.items():
        results[name].update(encode_mbs=raw / encode_s / 1e6, decode_mbs=raw / decode_s / 1e6)
    return results


def compare(training: Sequence[Bytes], pages: Sequence[Bytes], element: ElementType) -> Result:
    """All figures of one dtype."""
    page_format = PageFormat(element, pages[0].nbytes, PAGE_TOKENS)
    untrained = CentredCodec(page_format)
    contestants: dict[str, Codec] = {
        "centred": untrained.trained(list(training)),
        "untrained": untrained,
        "zstd1": ZstdCodec(page_format),
    }
    found = race(contestants, pages, ROUNDS)
    found |= race({"zstd19": ZstdCodec(page_format, 19)}, pages, 1)  # a second per round
    return {
        **found["centred"],
        **{
            f"{what}_vs_zstd1": float(found["centred"][f"{what}_mbs"] or 0)
            / float(found["zstd1"][f"{what}_mbs"] or 0)
            for what in ("encode", "decode")
        },
        "untrained_ratio": found["untrained"]["ratio"],
        **{
            f"{name}_{key}": found[name][key] for name in ("zstd1", "zstd19") for key in found[name]
        },
        "zipnn_ratio": zipnn_ratio(pages, element),
        "entropy_bound": entropy_bound(pages, page_format),
    }


def measure(model: Path, tick: Tick) -> dict[str, Result]:
    """All dtypes."""
    training, pages = real_pages(model, "bfloat16")
    tick("bf16 pages")
    half_training, half_pages = real_pages(model, "float16")
    tick("fp16 pages")
    results = {
        "bf16": compare(training, pages, ElementType.BF16),
        "fp16": compare(half_training, half_pages, ElementType.FP16),
    }
    tick("16 bits")
    for name, dtype, element in (
        ("fp8", "float8_e4m3fn", ElementType.FP8_E4M3),
        ("fp8_e5m2", "float8_e5m2", ElementType.FP8_E5M2),
    ):
        results[name] = compare(cast(training, dtype), cast(pages, dtype), element)
    tick("8 bits")
    return results


def main(model: ModelFolder = None, as_json: AsJson = False) -> None:
    """Compare the codecs on real pages."""
    with benchmark("Centred codec on pages of held-out text", 4, as_json=as_json) as run:
        run.result = measure(model or small_model(), run.tick)


if __name__ == "__main__":
    run_benchmark(main, __doc__)

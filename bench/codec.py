"""Compression ratio and speed of KV page codecs: the centred codec and zstd.

    python -m bench.codec --json

Pages come from the small real model, in the layout of the worker's CPU pool. The codec is trained
on source code and measured on prose that is not in the training pages. bf16 and fp16 pages each
come from an engine of that dtype (cast from bf16, fp16 would have three mantissa bits that are
always zero). fp8 pages are bf16 pages cast with scale 1, which vLLM uses without calibration.

``ratio`` is raw over stored bytes. ``*_mbs`` is MB of raw pages per second of CPU time on one core,
the best of many interleaved rounds; ``*_vs_zstd1`` is this speed relative to zstd level 1 on the
same pages in the same rounds. ``entropy_bound`` is the ratio at the order-0 entropy of the measured
pages' symbols. For the bound, the symbols are centred by these pages' own centres, one static code
encodes all of them, and the remainders are stored uncompressed. No static code can exceed the
bound, whatever text it is trained on.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import zstandard
from numpy.typing import NDArray

from tiered_kv.bench.output import AsJson, ModelFolder, Tick, benchmark, run_benchmark
from tiered_kv.bench.servers.engines import Engine, engine, real_texts
from tiered_kv.bench.servers.model import small_model
from tiered_kv.codecs.base import Bytes, Codec, ElementType, PageFormat
from tiered_kv.codecs.centred import CentredCodec
from tiered_kv.codecs.zstd import ZstdCodec

PAGE_TOKENS = 32
TRAINING_PAGES, HELD_OUT_PAGES = 24, 8
ROUNDS = 100

Result = dict[str, float]
Pages = list[Bytes]


def prose(model: Path, tokens: int) -> list[int]:
    """Return ``tokens`` token ids from the part of Python's reference manual that ships with
    ``help()``.
    """
    from pydoc_data.topics import topics

    from transformers import AutoTokenizer

    text = "\n".join(topics[name] for name in sorted(topics))
    ids = AutoTokenizer.from_pretrained(str(model))(text[: tokens * 8])["input_ids"]
    return [int(token) for token in ids[:tokens]]


def saved_pages(running: Engine, prompt: list[int]) -> Pages:
    """Run a prompt, and return the pages that it adds to the CPU pool.

    Raises:
        RuntimeError: the prompt fills an unexpected number of pages.
    """
    slots = running.worker.pool.slots
    before = slots.any(axis=1)
    running.generate([prompt], max_tokens=1)
    running.settle()
    pages = [slot.copy() for slot in slots[slots.any(axis=1) & ~before]]
    if len(pages) != len(prompt) // PAGE_TOKENS:
        raise RuntimeError(
            f"a prompt of {len(prompt)} tokens saved {len(pages)} pages, not one per {PAGE_TOKENS} "
            "tokens"
        )
    return pages


def real_pages(model: Path, dtype: str) -> tuple[Pages, Pages]:
    """Return training pages and held-out pages, from an engine with that dtype."""
    code = real_texts(model, [TRAINING_PAGES * PAGE_TOKENS])[0]
    options = {"dtype": dtype, "block_size": PAGE_TOKENS}
    with engine(model, connector=True, extra={"cpu_gib": 0.1}, **options) as running:
        training = saved_pages(running, code)
        return training, saved_pages(running, prose(model, HELD_OUT_PAGES * PAGE_TOKENS))


def cast(pages: Pages, dtype: str) -> Pages:
    """Cast bf16 pages to another torch dtype, with scale 1."""
    import torch

    values = (torch.from_numpy(page).view(torch.bfloat16).to(torch.float32) for page in pages)
    return [one.to(getattr(torch, dtype)).view(torch.uint8).numpy() for one in values]


def entropy_bits(symbols: NDArray[np.uint8]) -> float:
    """Return the order-0 entropy in bits per symbol."""
    counts = np.bincount(symbols.reshape(-1), minlength=256)
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log2(shares)).sum())


def entropy_bound(pages: Pages, page_format: PageFormat) -> float:
    """Return the ratio that no static code can exceed; see the module docstring."""
    codec = CentredCodec(page_format).trained(pages)
    encoded = [codec.encode(page) for page in pages]
    unpack = zstandard.ZstdDecompressor().decompress
    symbols = np.stack([np.frombuffer(unpack(one.frame.data), np.uint8) for one in encoded])
    stored = sum(one.plane.nbytes for one in encoded) + symbols.size * entropy_bits(symbols) / 8
    return sum(page.nbytes for page in pages) / stored


def race(codecs: Mapping[str, Codec], pages: Sequence[Bytes], rounds: int) -> dict[str, Result]:
    """Run all codecs on the same pages, interleaved. Returns ``ratio``, ``encode_mbs`` and
    ``decode_mbs`` of each codec.

    Raises:
        RuntimeError: a decoded page differs from the original.
    """
    raw = sum(page.nbytes for page in pages)
    outs = [np.empty_like(page) for page in pages]
    stored: dict[str, int] = {}
    seconds = {name: np.full((rounds, 2), np.inf) for name in codecs}
    for turn in range(-1, rounds):
        for name, codec in codecs.items():
            start = time.thread_time()
            encoded = [codec.encode(page) for page in pages]
            between = time.thread_time()
            for one, out in zip(encoded, outs, strict=True):
                codec.decode(one, out)
            end = time.thread_time()
            if turn >= 0:
                seconds[name][turn] = between - start, end - between
                continue
            if not all(map(np.array_equal, outs, pages)):
                raise RuntimeError(f"{name} decoded a page that differs from the original")
            stored[name] = sum(one.nbytes for one in encoded)
            for out in outs:
                out.fill(0)  # so that the next codec cannot pass with this codec's output
    speeds = {name: raw / times.min(axis=0) / 1e6 for name, times in seconds.items()}
    return {
        name: {
            "ratio": raw / stored[name],
            "encode_mbs": float(encode),
            "decode_mbs": float(decode),
        }
        for name, (encode, decode) in speeds.items()
    }


def compare(training: Pages, pages: Pages, element: ElementType) -> Result:
    """Measure all figures of one dtype. The codec is trained on ``training`` and measured on
    ``pages``.
    """
    page_format = PageFormat(element, pages[0].nbytes, PAGE_TOKENS)
    untrained = CentredCodec(page_format)
    contestants: dict[str, Codec] = {
        "centred": untrained.trained(training),
        "untrained": untrained,
        "zstd1": ZstdCodec(page_format),
    }
    found = race(contestants, pages, ROUNDS)
    found |= race({"zstd19": ZstdCodec(page_format, 19)}, pages, 1)  # about a second per round
    ours, zstd1 = found["centred"], found["zstd1"]
    return {
        **ours,
        **{
            f"{what}_vs_zstd1": ours[f"{what}_mbs"] / zstd1[f"{what}_mbs"]
            for what in ("encode", "decode")
        },
        "untrained_ratio": found["untrained"]["ratio"],
        **{f"{name}_{key}": found[name][key] for name in ("zstd1", "zstd19") for key in ours},
        "entropy_bound": entropy_bound(pages, page_format),
    }


def measure(model: Path, tick: Tick) -> dict[str, Result]:
    """Measure all dtypes. Returns the figures of each dtype by its name."""
    bf16 = real_pages(model, "bfloat16")
    tick("bf16 pages")
    fp16 = real_pages(model, "float16")
    tick("fp16 pages")
    results = {"bf16": compare(*bf16, ElementType.BF16), "fp16": compare(*fp16, ElementType.FP16)}
    tick("16 bits")
    for name, dtype, element in (
        ("fp8", "float8_e4m3fn", ElementType.FP8_E4M3),
        ("fp8_e5m2", "float8_e5m2", ElementType.FP8_E5M2),
    ):
        training, pages = (cast(some, dtype) for some in bf16)
        results[name] = compare(training, pages, element)
    tick("8 bits")
    return results


def main(model: ModelFolder = None, as_json: AsJson = False) -> None:
    """Compare the codecs on real pages."""
    with benchmark("Centred codec on pages of held-out text", 4, as_json=as_json) as run:
        run.result = measure(model or small_model(), run.tick)


if __name__ == "__main__":
    run_benchmark(main, __doc__)

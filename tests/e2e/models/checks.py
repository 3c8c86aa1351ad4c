"""Checks of one tiny model: ``python -m tests.e2e.models.checks NAME FOLDER``.

The model runs on stock vLLM, then with the connector, then with the connector after a restart.
``row.json`` in the folder is written after every engine, so that a process that dies has reported
its earlier results. With ``--mixed`` the process only writes ``mixed.json`` (see ``mixed_prefix``).

With dense retention, an aligned context gives the same answer from any source of KV. Each source
has a job of its own. The jobs' prompts are equal but share no KV, so that each finds exactly the
context and computes exactly the rest. If a draft model looks ahead, vLLM's pool finds one block
less, and a restore may find more. The turns of an agent follow, with vLLM's own retention.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.e2e.models.asker import Asker, Turn, text
from tests.e2e.models.rows import MIXED, ROW, Row, in_a_line
from tests.e2e.models.workers import unlike
from tiered_kv.bench.models.catalogue import BLOCK, EVERY, IMAGE_PIXELS, VOCABULARY, TinyModel
from tiered_kv.bench.models.weights import ADAPTER_RANK, write_adapter, write_drafter, write_model
from tiered_kv.bench.servers.engines import engine

DTYPE = "bfloat16"
ENGINE = {
    "dtype": DTYPE,
    "block_size": BLOCK,
    "max_model_len": 1024,
    "num_gpu_blocks_override": 48,
    "enable_prefix_caching": True,
}
DENSE = {"prefix_cache_retention_interval": None}
"""Engine option that makes vLLM cache windows and states at every block."""
CPU_GIB, SSD_GIB = 0.25, 1

CONTEXT, AFTER = 768, 60
"""Minimum length of the aligned context, and number of tokens after it."""
PROMPT, ANSWER, MORE = 700, 60, 30
"""Tokens of a turn's prompt (not a whole number of blocks), of its answer, and of the text that the
next turn appends."""
COMPARED = 8
"""Number of tokens of each answer that is compared with another answer."""
DRAFTED = 33
"""Number of tokens of an answer whose draft tokens are counted: one token, then steps of up to
four."""
LEAST_BEFORE_STOP = 20
"""Minimum length of an answer before the stop string that ends it."""
CPU, SSD, RESTART, VRAM = "cpu", "ssd", "restart", "vram"


class Engines:
    """Engines of one model that run one after another on the same SSD folder.

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
        """Start an engine, and stop it when the block ends."""
        settings: dict[str, Any] = {**ENGINE, **self._model.options, **options}
        asked: dict[str, Any] = {}
        image = None
        if self._adapter is not None:
            from vllm.lora.request import LoRARequest

            settings |= {"enable_lora": True, "max_lora_rank": ADAPTER_RANK}
            asked["lora_request"] = LoRARequest("adapter", 1, str(self._adapter))
        if self._drafts is not None:
            settings["speculative_config"] = self._drafts
        if self._model.image_tokens:
            from PIL import Image

            edges = IMAGE_PIXELS, IMAGE_PIXELS
            image = Image.linear_gradient("L").resize(edges).convert("RGB")
        if connector:
            ssd = str(self._folder / "ssd")
            settings["extra"] = {"cpu_gib": CPU_GIB, "ssd_path": ssd, "ssd_gib": SSD_GIB}
        with engine(self._path, connector, **settings) as running:
            yield Asker(running, image, self._model.image_tokens, asked)


def check(model: TinyModel, folder: Path) -> None:
    """Run all checks of a model, and write its row."""
    row, began = Row(model.name), time.monotonic()

    def write(what: str) -> None:
        row.seconds = round(time.monotonic() - began, 1)
        (folder / ROW).write_text(json.dumps(row.as_json()))
        cpu = f"{row.seconds:.0f} s ({time.process_time():.0f} s of CPU)"
        print(f"{model.name}: {what} after {cpu}", file=sys.stderr, flush=True)

    row.cannot_start = "the process died under stock vLLM"
    write("starts")
    try:
        engines = Engines(model, folder)
        with engines.started(connector=False) as stock:
            row.groups = [group.words for group in stock.groups]
            stock_turns(stock, row)
            row.cannot_start = None
    except Exception as error:
        traceback.print_exc()
        row.cannot_start = in_a_line(error)
    write("stock vLLM finished")
    if row.cannot_start is not None:
        return
    with row.noting("connector"):
        with engines.started(connector=True, **DENSE) as asker:
            hit = before_restart(asker, row)
            write("the aligned context finished")
        with engines.started(connector=True) as asker:
            after_restart(asker, row, hit)
            write("the restart finished")
            turns(asker, row)
    write("all finished")


# -- an aligned context -------------------------------------------------------------


class AlignedContext:
    """A context that ends where the engine can find a prefix, and the text after it.

    Attributes:
        tokens: length of the context.
    """

    def __init__(self, asker: Asker) -> None:
        self._asker = asker
        self.tokens = -(-CONTEXT // asker.alignment) * asker.alignment
        self.context = asker.text(self.tokens, 1)

    def start(self, *names: str) -> None:
        """Compute the context for each job."""
        for name in names:
            self._asker.ask(self.context, name, 1)

    def go_on(self, name: str, tokens: int = COMPARED) -> Turn:
        """Run the job's next turn. It is declared the last, so that it keeps nothing in VRAM."""
        return self._asker.ask(self.context + text(AFTER, 2), name, tokens, last=True)


def before_restart(asker: Asker, row: Row) -> Turn:
    """Fill in the results of the first engine with the connector. Returns the turn that was a hit
    in VRAM."""
    case = AlignedContext(asker)
    row.context = case.tokens
    case.start(VRAM)
    hit = case.go_on(VRAM)
    if hit.source.local != case.tokens - asker.dropped:
        row.notes.append(f"vLLM found {hit.source.local} of {case.tokens} tokens in its own pool")
    case.start(CPU, SSD, RESTART)
    asker.evict_vram()
    again = case.go_on(CPU)
    row.cpu_tokens = again.source.restored
    row.equal = _same(asker, row, CPU, again, hit)
    with row.noting("control"):
        _control(asker, case, hit, row)
    with row.noting("drafts"):
        row.acceptance = _acceptance(asker, case)
    with row.noting("ssd"):
        asker.move_to_ssd()
        asker.evict_vram()
        again = case.go_on(SSD)
        row.ssd_tokens = again.source.restored
        row.equal = _same(asker, row, SSD, again, hit) and row.equal
    return hit


def after_restart(asker: Asker, row: Row, hit: Turn) -> None:
    """Fill in the results of an engine restarted with the same SSD."""
    case = AlignedContext(asker)
    # By the end of another turn the connector has read the adapter's files.
    asker.ask(asker.text(AFTER, 5), "first", 1, last=True)
    again = case.go_on(RESTART)
    row.restart_tokens = again.source.restored
    row.equal = _same(asker, row, RESTART, again, hit) and row.equal


def _same(asker: Asker, row: Row, source: str, again: Turn, hit: Turn) -> bool:
    wrong = []
    if again.source.restored < hit.source.local or not hit.source.local:
        wrong.append(f"{again.source.restored} of {row.context} tokens restored")
    else:
        wrong += unlike(hit.found, asker.started(again, hit.source.found))
    if not again.says_the_same(hit):
        wrong.append("another answer than after a hit in VRAM")
    row.notes += [f"{source}: {said}" for said in wrong]
    return not wrong


def _control(asker: Asker, case: AlignedContext, hit: Turn, row: Row) -> None:
    silent, groups = list[str](), asker.offloaded_groups
    for position, group in enumerate(groups):
        name = f"control {position}"
        case.start(name)
        asker.evict_vram()
        with asker.zeroed(position) as struck:
            wrong = case.go_on(name)
        if not struck():
            silent.append(f"no page of {group.words} was restored")
        elif wrong.logprobs == hit.logprobs:
            silent.append(f"{struck()} zeroed pages of {group.words} change nothing")
        elif not unlike(hit.found, asker.started(wrong, hit.source.found)):
            silent.append(f"{struck()} zeroed pages of {group.words} were restored unchanged")
    row.control_differs = bool(groups) and not silent
    row.notes += [f"control: {said}" for said in silent]


def _acceptance(asker: Asker, case: AlignedContext) -> dict[str, float | None]:
    """Return the fraction of draft tokens that are accepted after a hit in VRAM, after a restore,
    and with the KV of the draft layers zeroed. Empty unless there is a draft model with layers."""
    layers = asker.draft_layers
    found = dict[str, float | None]()
    for name in ("pool", "restored", "zeroed") if layers else ():
        case.start(f"drafts {name}")
        if name != "pool":
            asker.evict_vram()
        with asker.zeroed_layers(layers if name == "zeroed" else []):
            found[name] = case.go_on(f"drafts {name}", DRAFTED).acceptance
    return found


def mixed_prefix(model: TinyModel, folder: Path) -> None:
    """Compare a hit in VRAM with a hit whose second half is restored from CPU memory: the KV that
    the next turn finds, and its answer."""
    with Engines(model, folder).started(connector=True, **DENSE) as asker:
        case = AlignedContext(asker)
        case.start("computed")
        hit = case.go_on("computed")
        case.start("mixed")
        asker.evict_vram()
        half = case.tokens // 2 // asker.alignment * asker.alignment
        asker.ask(case.context[: half + 1], "mixed", 1)
        mixed = case.go_on("mixed")
        found = {
            "groups": [group.words for group in asker.groups],
            "context": case.tokens,
            "hit": hit.source.local,
            "half": half,
            "local": mixed.source.local,
            "restored": mixed.source.restored,
            "unlike": unlike(hit.found, asker.started(mixed, hit.source.found)),
            "same": mixed.says_the_same(hit),
        }
    (folder / MIXED).write_text(json.dumps(found))


# -- turns of an agent --------------------------------------------------------------


def stock_turns(asker: Asker, row: Row) -> None:
    """Fill in the results of stock vLLM, which has evicted nothing.

    Raises:
        RuntimeError: vLLM cannot run the model here, with the reason.
    """
    config = asker.scheduler.vllm_config
    if not config.cache_config.enable_prefix_caching:
        why = " (MLA without AMX)" if config.model_config.use_mla else ""
        raise RuntimeError(f"vLLM turns prefix caching off for it on this CPU{why}")
    first = _first(asker, "stock")
    row.stock_answer_recomputed = first.recomputed(_next(asker, first.context, "stock"))
    if max(first.tokens) >= VOCABULARY:
        highest = max(first.tokens)
        raise RuntimeError(f"it answers with token {highest}, which the model does not have")


def turns(asker: Asker, row: Row) -> None:
    """Fill in the results of an agent's turns with the connector."""
    with row.noting("restore of a turn"):
        first = _first(asker, "one")
        _restore(asker, first, row)
        with row.noting("stop string"):
            _stop_string(asker, first, row)
    with row.noting("stripped answer"):
        first = _first(asker, "stripped")
        asker.evict_vram()
        kept = first.prompt + first.tokens[len(first.tokens) // 2 :]
        row.stripped_hit = _next(asker, kept, "stripped").source.found
    with row.noting("pin"):
        first = _first(asker, "pinned")
        if not asker.engine.half.admission.pins.held_blocks:
            row.notes.append("pin: none was made")
        asker.rivals(PROMPT, seed=1000)
        row.pinned_hit = _next(asker, first.context, "pinned").source.local


def _first(asker: Asker, name: str, stop: str | None = None) -> Turn:
    return asker.ask(asker.text(PROMPT, 3), name, ANSWER, stop=stop)


def _next(asker: Asker, context: Sequence[int], name: str) -> Turn:
    return asker.ask([*context, *text(MORE, 4)], name, COMPARED, last=True)


def _restore(asker: Asker, first: Turn, row: Row) -> None:
    asker.evict_vram()
    after = _next(asker, first.context, "one")
    row.answer_recomputed = first.recomputed(after)
    if not after.source.restored:
        row.notes.append("turn: nothing was restored")
        return
    twin = _first(asker, "two")
    if twin.tokens != first.tokens:
        row.notes.append("turn: the same prompt was answered in two ways")
        return
    asker.evict_vram()
    again = _next(asker, twin.context, "two")
    wrong = []
    for turn, then in ((first, after), (twin, again)):
        wrong += unlike(asker.ended(turn, then.source.found), then.found)
    if not after.says_the_same(again):
        wrong.append("two restores, two answers")
    row.equal_bytes = not wrong
    row.notes += [f"turn: {said}" for said in dict.fromkeys(wrong)]


def _stop_string(asker: Asker, first: Turn, row: Row) -> None:
    """Generate the same answer again, and end it with a stop string that does not occur earlier in
    it."""
    answer = [f"w{token}" for token in first.tokens]
    new = (at for at in range(LEAST_BEFORE_STOP, len(answer)) if _is_new(answer, at))
    at = next(new, None)
    if at is None:
        row.notes.append("stop string: every token of the answer occurs before")
        return
    ended = _first(asker, "stopped", stop=answer[at])
    if ended.tokens != first.tokens[: at + 1]:
        row.notes.append(f"stop string: {len(ended.tokens)} tokens, not {at + 1}, to {answer[at]}")
        return
    asker.evict_vram()
    row.stop_string_had = ended.source.prompt + at
    kept = ended.prompt + ended.tokens[:at]
    row.stop_string_hit = _next(asker, kept, "stopped").source.found


def _is_new(answer: Sequence[str], at: int) -> bool:
    """Return False if the word occurs earlier in the answer, even as part of another word, as
    ``w10`` does in ``w100``."""
    return answer[at] not in " ".join(answer[:at])


if __name__ == "__main__":
    asked = next(model for model in EVERY if model.name == sys.argv[1])
    (mixed_prefix if "--mixed" in sys.argv else check)(asked, Path(sys.argv[2]))

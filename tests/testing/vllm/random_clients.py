"""Random clients of an engine with several groups of KV."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from contextlib import suppress

from tests.testing.vllm.models import MODELS
from tiered_kv.page_group import KvKind
from tiered_kv.testing.checked_kv import VOCABULARY, expected, text
from tiered_kv.testing.vllm.rig import Rig, RigOptions

LONGEST = 256


def random_options(rng: random.Random, models: Iterable[str] = MODELS) -> RigOptions:
    """An engine of one of the models, that holds one to three of the longest requests."""
    name = rng.choice(sorted(models))
    groups = MODELS[name]
    kinds = {group.kind for group in groups}
    one = sum(LONGEST // group.block_size + 2 for group in groups)
    match_unit = 4 if name == "full-state" and rng.random() < 0.5 else None
    return RigOptions(
        extra=None,
        blocks=rng.choice([one, one * 3 // 2, 3 * one]),
        max_model_len=LONGEST,
        max_batched_tokens=rng.choice([64, 256]),
        # One at a time: see test_hits_within_a_block_that_is_being_computed.
        max_num_seqs=1 if match_unit else rng.choice([2, 8]),
        policy=rng.choice(["fcfs", "priority"]),
        ahead=rng.random() < 0.5,
        groups=groups,
        retention=rng.choice([0, None, 64]) if kinds & {KvKind.WINDOW, KvKind.STATE} else 0,
        match_unit=match_unit,
    )


def play(rig: Rig, rng: random.Random) -> None:
    """Run one script."""
    contexts = [text(rng.randrange(5, 150), seed=rng.randrange(10**6)) for _ in range(4)]
    asked: dict[str, tuple[list[int], int, Sequence[int]]] = {}
    for i in range(rng.randrange(10, 40)):
        for _ in range(rng.randrange(0, 6)):
            rig.step()
        what = rng.random()
        if what < 0.8:
            job = rng.randrange(len(contexts))
            context = contexts[job][: rng.randrange(1, len(contexts[job]) + 1)]
            if rng.random() < 0.5:
                context = contexts[job]
            tokens, name = rng.randrange(1, 50), f"r{i}"
            stops = rng.choice([(), range(0, VOCABULARY, 12)])
            rig.add(name, context, tokens, stop_ids=stops, priority=rng.randrange(3))
            asked[name] = (context, tokens, stops)
            if rng.random() < 0.6:
                longer = context + expected(context, 20) + text(10, seed=rng.randrange(10**6))
                contexts[job] = longer[:190]
        elif what < 0.93 and asked:
            name = rng.choice(list(asked))
            if name not in rig.finished:
                rig.abort(name, late=rng.random() < 0.5)
        elif rng.random() < 0.5:
            rig.scheduler.reset_prefix_cache()
        else:
            with suppress(RuntimeError):  # vLLM refuses while KV is on its way from outside
                rig.reset_cache()
    rig.run()
    for name, (prompt, tokens, stops) in asked.items():
        if rig.finished[name] != "abort":
            whole = expected(prompt, tokens)
            end = next((i for i, token in enumerate(whole, 1) if token in stops), tokens)
            assert rig.outputs[name] == whole[:end], name

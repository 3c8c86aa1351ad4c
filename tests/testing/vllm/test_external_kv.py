"""External KV: the blocks of each group that vLLM needs for a hit, and the states that can be
saved."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.random_scripts import play_each
from tests.runtime.conftest import MakeRig
from tests.testing.vllm.models import FULL, MODELS, STATE, WINDOW
from tests.testing.vllm.perfect_store import Chance, Offer, PerfectStore, Tables
from tests.testing.vllm.random_clients import play_script
from tiered_kv.page_group import KvKind
from tiered_kv.testing.checked_kv import Cells, WrongKV, expected, kv, text
from tiered_kv.testing.vllm.rig import Rig

End = tuple[int, int, int, int]
"""The end of a turn: its tokens, the tokens known to be computed, the tokens in flight, and the
number of tokens that the state in the table covers."""
PROMPT = text(200, seed=1)
ANSWER = expected(PROMPT, 20)


class Given:
    """Stands in for the random number generator, so that the store has ``here`` tokens, available
    immediately."""

    def __init__(self, here: int) -> None:
        self._here = here

    def randint(self, a: int, b: int) -> int:
        return max(a, min(self._here, b))

    def randrange(self, start: int) -> int:
        return 0

    def random(self) -> float:
        return 0.5

    def randbytes(self, n: int) -> bytes:
        return bytes(n)


def context(rig: Rig, name: str, tokens: int) -> Cells:
    """Return the KV of the first tokens of a request and its answer."""
    return kv((rig.prompts[name] + expected(rig.prompts[name], 60))[:tokens])


@pytest.mark.scripts(25, nightly=1_000)
def test_random_scripts_end_well(tmp_path: Path, seeds: range) -> None:
    """Hits of any length find the KV that they need in the blocks that ``KvReach.blocks`` returns.
    Tokens whose load fails are computed."""

    def play(folder: Path, seed: int) -> Mapping[str, int]:
        stores: list[PerfectStore] = []

        def prepare(rig: Rig, rng: random.Random) -> None:
            stores.append(PerfectStore(rig, rng, failures=rng.choice([0, 0.3])))

        play_script(folder, seed, prepare=prepare)
        return {"loaded": len(stores[0].loaded), "failed": stores[0].failed}

    play_each(tmp_path, seeds, play)


@pytest.mark.parametrize("model", MODELS)
def test_a_hit_may_end_anywhere(make_rig: MakeRig, model: str) -> None:
    rig = make_rig(extra=None, groups=MODELS[model])
    for here in 192, 199, 150, 80, 1:
        store = PerfectStore(rig, Given(here))
        rig.reset_cache()
        assert rig.ask(f"of-{here}", PROMPT) == expected(PROMPT, 4)
        assert store.loaded == {f"of-{here}": here}
    rig.check_clean()


def test_tokens_of_a_failed_load_are_computed(make_rig: MakeRig) -> None:
    rig = make_rig(extra=None, groups=(FULL, STATE))
    store = PerfectStore(rig, Given(150), failures=1.0)
    assert rig.ask("one", PROMPT) == expected(PROMPT, 4)
    assert store.failed == 1


@pytest.mark.parametrize("tokens_before", [0, 1], ids=["whole", "in-part"])
def test_blocks_of_a_window_are_restored_completely(make_rig: MakeRig, tokens_before: int) -> None:
    """The window of a hit starts inside a block, and vLLM caches the whole block. If the token
    before the window is wrong, the request itself is unaffected, but a later hit that is one token
    shorter has wrong KV."""
    rig = make_rig(extra=None, groups=(FULL, WINDOW))
    store = PerfectStore(rig, Given(81))
    rig.add("one", PROMPT[:90], max_tokens=1)
    rig.step()
    table = rig.table("one", 1)
    rig.step()
    assert store.loaded == {"one": 81}
    assert [i for i, block in enumerate(table) if block] == [2, 3, 4, 5]
    first = WINDOW.reach.skipped(81) - 2 * 16
    assert first == 10
    rig.page(table[2], 1)[8 * (first - tokens_before) : 8 * first] ^= 1
    store.is_empty = True
    rig.run()
    assert rig.outputs["one"] == expected(PROMPT[:90], 1)
    rig.add("again", PROMPT[:90])
    if tokens_before:
        with pytest.raises(WrongKV, match=r"again: group 1 .* first at token 41"):
            rig.run()
    else:
        rig.run()


STATEFUL = [name for name, groups in MODELS.items() if groups[-1].kind is KvKind.STATE]


@pytest.mark.parametrize("model", STATEFUL)
@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "ahead"])
@pytest.mark.parametrize("stops", [(), ANSWER[9:10]], ids=["full-length", "stops"])
def test_a_state_when_a_turn_ends(
    make_rig: MakeRig, model: str, ahead: bool, stops: Sequence[int]
) -> None:
    """When a turn ends, the last block of its table has a state that covers all tokens except the
    last one. If a step was already in flight at a stop token, the state covers that token too."""
    rig = make_rig(extra=None, groups=MODELS[model], ahead=ahead)
    ends = turn_ends(rig, Given(0))
    rig.add("one", PROMPT, max_tokens=20, stop_ids=stops)
    rig.run()
    length = 200 + len(rig.outputs["one"])
    under_way = 1 if ahead and stops else 0
    assert ends == [(length, length - 1, under_way, length - 1 + under_way)]


@pytest.mark.scripts(25, nightly=1_000)
def test_states_when_turns_end(tmp_path: Path, seeds: range) -> None:
    """At the end of any turn, the state covers the tokens that are known to be computed (all but
    the last one) and the tokens in flight (at most one)."""

    def play(folder: Path, seed: int) -> Mapping[str, int]:
        found: list[tuple[list[End], bool]] = []

        def prepare(rig: Rig, rng: random.Random) -> None:
            found.append((turn_ends(rig, rng), rig.options.ahead))

        play_script(folder, seed, STATEFUL, prepare)
        [(ends, ahead)] = found
        for length, known, under_way, state in ends:
            assert known == length - 1
            assert under_way == 0 or (under_way == 1 and ahead)
            assert state == known + under_way
        return {"ends": len(ends)}

    play_each(tmp_path, seeds, play)


def turn_ends(rig: Rig, rng: Chance) -> list[End]:
    """Return a list that receives the ends of turns that are not aborted."""
    store = PerfectStore(rig, rng)
    ends: list[End] = []

    def look(request: Any, tables: Tables) -> None:
        if request.status.name == "FINISHED_ABORTED":
            return
        cells = context(rig, request.request_id, request.num_tokens)
        states = rig.runner.groups[-1].lengths(tables[-1], cells)
        under_way = request.num_in_flight_tokens
        known = request.num_computed_tokens - under_way
        ends.append((request.num_tokens, known, under_way, states[-1]))

    store.on_finish = look
    return ends


@pytest.mark.scripts(25, nightly=1_000)
def test_states_that_vllm_offers(tmp_path: Path, seeds: range) -> None:
    """Each state that vLLM offers for a forward pass is in the named block after that pass."""

    offered = Counter[bool]()

    def prepare(rig: Rig, rng: random.Random) -> None:
        def look(offers: list[Offer]) -> None:
            for name, group, block, tokens in offers:
                before = (tokens - 1) // rig.options.groups[group].block_size
                table = [0] * before + [block]
                found = rig.runner.groups[group].lengths(table, context(rig, name, tokens))
                offered[tokens in found] += 1

        PerfectStore(rig, rng).after_pass = look

    play_each(tmp_path, seeds, lambda folder, seed: play_script(folder, seed, STATEFUL, prepare))
    assert offered.keys() == {True}


def test_vllm_offers_states_where_prompts_end(make_rig: MakeRig) -> None:
    rig = make_rig(extra=None, groups=(FULL, STATE))
    store = PerfectStore(rig, Given(0))
    seen: list[int] = []
    store.after_pass = lambda offers: seen.extend(tokens for *_, tokens in offers)
    rig.ask("one", PROMPT, max_tokens=40)
    assert seen == [192]

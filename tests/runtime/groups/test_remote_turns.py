"""A job's next turn on another engine finds its context in the remote store, for any KV types of
the model."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.runtime.conftest import MakeRig
from tiered_kv.page_group import KvKind
from tiered_kv.storage.remote_pages import PAGE_PREFIX
from tiered_kv.testing.checked_kv import expected, text
from tiered_kv.testing.valkey import ValkeyServer
from tiered_kv.testing.vllm.groups import GroupSpec
from tiered_kv.testing.vllm.rig import Rig

from .kinds import ANSWER, JOB, MODELS, PROMPT

WITH_FULL = {
    name: groups for name, groups in MODELS.items() if KvKind.FULL in [g.kind for g in groups]
}
models = pytest.mark.parametrize("groups", WITH_FULL.values(), ids=WITH_FULL)


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[ValkeyServer]]:
    """Two servers, over which the pages are distributed."""
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    with ValkeyServer(folders[0]) as one, ValkeyServer(folders[1]) as other:
        yield [one, other]


def open_engine(
    make_rig: MakeRig, groups: Sequence[GroupSpec], servers: Sequence[ValkeyServer]
) -> Rig:
    url = "valkey://" + ",".join(str(one.server) for one in servers)
    extra = {"cpu_gib": 0.01, "codec": "raw", "policy": "lru", "remote": url}
    # Prompts take many steps, because the store is not queried for what one step computes.
    return make_rig(
        groups=tuple(groups), blocks=200, max_batched_tokens=32, max_num_seqs=8, extra=extra
    )


def ask(rig: Rig, name: str, prompt: Sequence[int], tokens: int) -> list[int]:
    """Run a turn, and wait until every order has finished, also after the turn's end."""
    rig.add(name, prompt, max_tokens=tokens, params=JOB)
    for _ in range(2000):
        rig.step()
        rig.wait_for_worker()
        rig.now += (
            0.001 if rig.scheduler.running else 1e-5
        )  # a step that computes takes 1 ms, a step that waits almost nothing
        if not rig.scheduler.has_requests():
            if not rig.orders_under_way:
                break
            time.sleep(0.002)  # writes are slow, because they leave bandwidth for other transfers
    else:
        raise AssertionError("orders are under way for ever")
    assert rig.outputs[name] == expected(prompt, tokens)
    return rig.outputs[name]


def pages_in(servers: Sequence[ValkeyServer]) -> list[int]:
    return [one.talk(b"KEYS", PAGE_PREFIX + b"*").count(PAGE_PREFIX) for one in servers]


@models
def test_a_jobs_next_turn_is_found_by_another_engine(
    make_rig: MakeRig, groups: tuple[GroupSpec, ...], servers: list[ValkeyServer]
) -> None:
    first = open_engine(make_rig, groups, servers)
    answer = ask(first, "t1", PROMPT, ANSWER)
    first.close()
    assert sum(pages_in(servers)) >= len(PROMPT) // 16
    second = open_engine(make_rig, groups, servers)
    prompt = PROMPT + answer + text(30, seed=2)
    ask(second, "t2", prompt, 4)
    unit = second.half.facts.hit_tokens
    assert second.count("prompt_tokens_remote") >= (len(PROMPT) - 1) // unit * unit
    second.check_clean()


@models
def test_jobs_that_alternate_between_engines_get_the_same_answers(
    make_rig: MakeRig, groups: tuple[GroupSpec, ...], servers: list[ValkeyServer]
) -> None:
    engines = [open_engine(make_rig, groups, servers) for _ in range(2)]
    context, found = list(PROMPT), []
    for turn in range(4):
        rig = engines[turn % 2]
        before = rig.count("prompt_tokens_remote")
        answer = ask(rig, f"t{turn}", context, 9 + 5 * turn)
        found.append(rig.count("prompt_tokens_remote") - before)
        context += answer + text(61 + 13 * turn, seed=turn)
    assert all(tokens > 0 for tokens in found[1:]), found
    for rig in engines:
        rig.check_clean()


@models
def test_a_store_without_windows_and_states_costs_little_time(
    make_rig: MakeRig, groups: tuple[GroupSpec, ...], servers: list[ValkeyServer]
) -> None:
    """The store has only the pages of the full attention group. They are useless without the other
    groups' pages, except at chunk boundaries, so none are read beyond the last such boundary."""
    first = open_engine(make_rig, groups, servers)
    answer = ask(first, "t1", PROMPT, ANSWER)
    fingerprints = [
        first.half.deps.fingerprints.base(at).digest()
        for at, group in enumerate(first.half.facts.groups)
        if group.reach.kind is not KvKind.FULL
    ]
    first.close()
    for server in servers:
        for fingerprint in fingerprints:
            for name in names_in(server, PAGE_PREFIX + fingerprint):
                server.talk(b"DEL", name)
    second = open_engine(make_rig, groups, servers)
    ask(second, "t2", PROMPT + answer + text(30, seed=2), 4)
    # At the start of a chunk, only the pages of the full attention group are needed.
    chunks = [group.span for group in groups if group.kind is KvKind.CHUNK]
    usable = sum((len(PROMPT) + ANSWER) // span * span for span in chunks)
    assert second.count("prompt_tokens_remote") == usable
    second.check_clean()


def names_in(server: ValkeyServer, prefix: bytes) -> list[bytes]:
    """Return the keys with this prefix, parsed from the reply because keys may contain any
    bytes."""
    said = server.talk(b"KEYS", b"*")
    found, at = [], said.index(b"\r\n") + 2
    while at < len(said):
        end = said.index(b"\r\n", at)
        nbytes = int(said[at + 1 : end])
        found.append(said[end + 2 : end + 2 + nbytes])
        at = end + 2 + nbytes + 2
    return [name for name in found if name.startswith(prefix)]

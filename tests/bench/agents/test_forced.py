from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from tiered_kv.bench.agents.forced import ForcedTokens
from tiered_kv.bench.agents.forcing import SERVER_ARGS, XARG, server_env

VOCABULARY = 50
OWN = 7
"""Token that the model generates when no token is forced."""


def params(forced: Any = None) -> SamplingParams:
    return SamplingParams(max_tokens=8, extra_args=None if forced is None else {XARG: forced})


@dataclass
class Request:
    forced: Any
    output: list[int] = field(default_factory=list)

    @property
    def next(self) -> int:
        """Token that the request should generate next."""
        at = len(self.output)
        return self.forced[at] if self.forced and at < len(self.forced) else OWN


class Batch:
    """A batch of requests that reports its added, removed and moved rows to a logits processor, as
    vLLM does."""

    def __init__(self) -> None:
        model = SimpleNamespace(get_vocab_size=lambda: VOCABULARY)
        config = SimpleNamespace(model_config=model)
        self.processor = ForcedTokens(config, torch.device("cpu"), False)
        self.rows: list[Request] = []

    def change(
        self, gone: set[int], new: list[Request], swaps: list[tuple[int, int]] | None = None
    ) -> None:
        """Put new requests into the rows of removed requests, move the last rows into the remaining
        holes, and swap the given pairs of rows."""
        holes = sorted(row for row in gone if row < len(self.rows))
        rows: list[Request | None] = [
            None if row in holes else request for row, request in enumerate(self.rows)
        ]
        added, moved = [], []
        for request in new:
            if holes:
                row = holes.pop(0)
                rows[row] = request
            else:
                row = len(rows)
                rows.append(request)
            added.append((row, params(request.forced), [1, 2], request.output))
        while holes:
            if rows[-1] is None:
                rows.pop()
                holes.remove(len(rows))
                continue
            row = holes.pop(0)
            moved.append((len(rows) - 1, row, MoveDirectionality.UNIDIRECTIONAL))
            rows[row] = rows.pop()
        self.rows = [request for request in rows if request is not None]
        assert len(self.rows) == len(rows)
        for one, other in swaps or []:
            if max(one, other) < len(rows) and one != other:
                self.rows[one], self.rows[other] = self.rows[other], self.rows[one]
                moved.append((one, other, MoveDirectionality.SWAP))
        taken = {row for row, *_ in added}
        removed = [row for row in gone if row not in taken]
        self.processor.update_state(BatchUpdate(len(rows), removed, added, moved))

    def step(self) -> list[int]:
        """Sample greedily, and return the token of every row."""
        logits = torch.zeros(len(self.rows), VOCABULARY)
        logits[:, OWN] = 1.0
        said: list[int] = self.processor.apply(logits).argmax(dim=-1).tolist()
        for request, token in zip(self.rows, said, strict=True):
            request.output.append(token)
        return said


def test_vllm_accepts_the_class_as_a_logits_processor() -> None:
    assert issubclass(ForcedTokens, LogitsProcessor)
    assert not Batch().processor.is_argmax_invariant(), "it must run for greedy requests too"


def test_a_request_declares_its_tokens_and_then_anything() -> None:
    batch = Batch()
    batch.change(set(), [Request([3, 1, 4]), Request(None)])
    assert [batch.step() for _ in range(4)] == [[3, OWN], [1, OWN], [4, OWN], [OWN, OWN]]


def test_a_preempted_request_resumes_where_it_was() -> None:
    batch = Batch()
    preempted = Request([3, 1, 4])
    batch.change(set(), [preempted])
    batch.step()
    batch.change({0}, [])
    batch.change(set(), [Request(None), preempted])
    assert batch.step() == [OWN, 1]


REQUESTS = st.builds(Request, st.none() | st.lists(st.integers(0, VOCABULARY - 1), max_size=6))
CHANGES = st.tuples(
    st.sets(st.integers(0, 7)),
    st.lists(REQUESTS, max_size=4),
    st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=3),
)


@given(st.lists(CHANGES, max_size=12))
def test_every_request_gets_its_own_tokens_however_the_batch_is_shuffled(
    changes: list[tuple[set[int], list[Request], list[tuple[int, int]]]],
) -> None:
    batch = Batch()
    for gone, new, swaps in changes:
        batch.change({row for row in gone if row < len(batch.rows)}, new, swaps)
        wanted = [request.next for request in batch.rows]
        assert batch.step() == wanted


BAD = ["1,2", 5, {"a": 1}, [1, "2"], [1.0], [True], [-1], [[1]]]


@pytest.mark.parametrize("bad", BAD)
def test_a_value_that_is_not_a_list_of_ids_is_refused_on_arrival(bad: Any) -> None:
    with pytest.raises(ValueError, match=XARG):
        ForcedTokens.validate_params(params(bad))


@pytest.mark.parametrize("bad", [*BAD, [3, VOCABULARY]])
def test_invalid_forced_tokens_do_not_disturb_other_requests(bad: Any) -> None:
    batch = Batch()
    batch.change(set(), [Request(None), Request([3, 1])])
    batch.processor.update_state(BatchUpdate(3, [], [(2, params(bad), None, [])], []))
    batch.rows.append(Request(None))
    assert batch.step() == [OWN, 3, OWN]


def test_a_server_finds_the_processor_from_any_folder(tmp_path: Path) -> None:
    module, _, name = SERVER_ARGS[1].partition(":")
    assert (module, name) == (ForcedTokens.__module__, ForcedTokens.__name__)
    look = f"import importlib.util; assert importlib.util.find_spec({module!r})"
    env = {**os.environ, **server_env()}
    subprocess.run([sys.executable, "-c", look], cwd=tmp_path, env=env, check=True)

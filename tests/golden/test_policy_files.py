"""Files of every policy that learns, written by commit 913b4b9. Entries that a policy no longer
uses are ignored."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.golden.conftest import Copy
from tests.golden.written import changed
from tiered_kv.connectors.runtime.policy_state import PolicyState
from tiered_kv.policies import registry

LEARNING = {"occupancy": 2300, "contextserve": 600, "continuum": 60, "continuum-fixed": 60}
"""Policies that learn, and the number of gaps that each observed."""
IGNORED = {"occupancy": {"trees", "learned"}, "contextserve": {"trees"}}
"""Entries of a policy's state in commit 913b4b9 that no longer exist."""
TOOLS = [("bash", "ls", "ls <path>"), ("bash", "pytest", "pytest <path>"), ("read",), ()]


def made_up(count: int) -> Iterator[tuple[tuple[str, ...], float]]:
    """Yield tool and duration of each generated gap, without the gaps that never ended."""
    chance = np.random.default_rng(1)
    for n in range(count):
        tool = int(chance.integers(len(TOOLS)))
        gap_s = float(np.exp(chance.normal(tool * 1.5 - 1, 0.7)))
        if n % 10 != 9:
            yield TOOLS[tool], gap_s


def still_read(content: bytes, name: str) -> bytes:
    """Return the file without the entries that its policy ignores."""
    saved = json.loads(content)
    for entry in IGNORED.get(name, ()):
        del saved["learned"][entry]
    return json.dumps(saved).encode()


def read(folder: Path, name: str) -> object:
    """Return the state that the next engine loads, or None if it loads nothing."""
    policy = registry.policy(name)
    state = PolicyState(policy, folder, name)
    found = policy.dump() if state.load() else None
    (folder / f"policy-{name}.json").unlink()
    state.close()
    return found


def test_every_policy_that_learns_has_a_file(written: Path) -> None:
    learning = {name for name in registry.POLICIES if registry.policy(name).dump()}
    assert learning == set(LEARNING)
    files = {path.name for path in (written / "policies").iterdir()}
    assert files == {f"policy-{name}.json" for name in LEARNING}


@pytest.mark.parametrize("name", LEARNING)
def test_the_next_engine_loads_what_was_learned(name: str, copy: Copy) -> None:
    path = copy("policies") / f"policy-{name}.json"
    content = path.read_bytes()
    saved = json.loads(content)
    assert saved.keys() == {"version", "policy", "learned"}
    assert (saved["version"], saved["policy"]) == (1, name)
    rest = still_read(content, name)
    assert read(path.parent, name) == json.loads(rest)["learned"]
    assert path.read_bytes() == rest, "it is written as it was"


@pytest.mark.parametrize("name", ["contextserve", "continuum", "continuum-fixed"])
def test_loaded_gaps_equal_the_observed_ones(name: str, written: Path) -> None:
    saved = json.loads((written / "policies" / f"policy-{name}.json").read_text())
    observed = list(made_up(LEARNING[name]))
    found = {tuple(one["tool"]): one["gaps"] for one in saved["learned"]["tools"]}
    assert {path[:1] for path in found} == {(), ("bash",), ("read",)}
    for path, gaps in found.items():
        wanted = [gap_s for tool, gap_s in observed if tool[: len(path)] == path]
        assert gaps == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("name", LEARNING)
def test_a_changed_byte_is_noticed(name: str, copy: Copy) -> None:
    path = copy("policies") / f"policy-{name}.json"
    content = still_read(path.read_bytes(), name)
    saved = json.loads(content)
    noticed = 0
    for at in (*range(70), *range(70, len(content), len(content) // 40)):
        bad = changed(content, at)
        path.write_bytes(bad)
        found = read(path.parent, name)
        if as_json(bad) == saved:  # the last digit of a float, beyond its precision
            assert found == saved["learned"]
        else:
            assert found != saved["learned"], f"the change at {at} went unnoticed"
            noticed += 1
    assert noticed > 90


def as_json(content: bytes) -> object:
    try:
        return json.loads(content)
    except ValueError:
        return None

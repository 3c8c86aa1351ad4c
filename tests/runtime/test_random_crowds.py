"""Fairness among random agents whose jobs never end. There are more agents than requests that may
run concurrently. No request waits much beyond the admission limit, and clients get equal shares of
the running requests. As in every other random script, the rig itself checks that no later arrival
is admitted before an overdue request (``tiered_kv.testing.fairness``)."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.random_scripts import LONGEST, Script, Sent, play_each, some_options
from tiered_kv.testing.checked_kv import CELL, text
from tiered_kv.testing.vllm.rig import Rig, RigOptions

STEP_S = 0.05
STEPS = 200
COPIED_WITHIN = 4
"""Number of steps within which copies finish. Copies take real time but steps do not, so on a busy
machine a save could hold its blocks for hundreds of steps."""
ANSWER = 11


@dataclass
class Agent:
    """A client's agent, which starts its next turn when a tool has returned."""

    name: str
    salt: str | None
    params: dict[str, Any] | None
    context: list[int]
    due_s: float = 0.0
    turn: str | None = None


class Crowd(Script):
    """Agents in a closed loop: each runs one turn at a time, and its job never ends."""

    def __init__(self, rig: Rig, rng: random.Random, agents: list[Agent]) -> None:
        super().__init__(rig, rng, {}, [])
        self.agents = agents
        self.waits: dict[str, float] = {}
        """Seconds that each request waited for its first blocks."""
        self._arrived: dict[str, float] = {}
        self._allocated = rig.half.on_allocated
        rig.half.on_allocated = self._watched

    def _watched(self, request_id: str, *args: Any) -> None:
        if request_id in self._arrived:
            self.waits[request_id] = self.rig.now - self._arrived.pop(request_id)
        self._allocated(request_id, *args)

    def step(self) -> None:
        rig, rng = self.rig, self.rng
        for agent in self.agents:
            if agent.turn in rig.finished:
                grown = [*agent.context, *rig.outputs[agent.turn], *text(8, rng.randrange(10**6))]
                agent.context = grown if len(grown) < LONGEST - 60 else grown[: len(grown) // 3]
                agent.turn, agent.due_s = None, rig.now + rng.choice([0.0, 0.0, 0.2, 2.0])
            if agent.turn is None and agent.due_s <= rig.now:
                agent.turn = f"{agent.name}.{len(self.sent)}"
                self.sent[agent.turn] = Sent(agent.context, rng.randrange(1, ANSWER + 1), ())
                self._arrived[agent.turn] = rig.now
                rig.add(
                    agent.turn,
                    agent.context,
                    self.sent[agent.turn].tokens,
                    params=agent.params,
                    salt=agent.salt,
                )
        rig.step()
        rig.now += STEP_S
        if not rig.steps % COPIED_WITHIN:
            rig.wait_for_worker()

    def end(self) -> None:
        """Finish the running turns, and start no further ones."""
        self.agents.clear()
        self.finish()


def some_agents(rng: random.Random) -> list[Agent]:
    """Return agents of several clients. A client may have a salt, and may use one job id for all
    its requests, one for each agent, or none."""
    agents = []
    for client in range(rng.randrange(2, 6)):
        salt = rng.choice([None, f"salt {client}"])
        one_id = rng.random() < 0.4
        for n in range(rng.choice([1, 2, 6])):
            name = f"c{client}a{n}"
            job = f"client {client}" if one_id else name
            params = rng.choice([{"job_id": job}, {"job_id": job}, None])
            context = text(rng.randrange(5, 120), seed=rng.randrange(10**6))
            agents.append(Agent(name, salt, params, context))
    return agents


def play_script(folder: Path, seed: int) -> None:
    rng = random.Random(seed)
    limit_s = rng.choice([1.0, 3.0, 300.0])
    options = some_options(
        rng,
        blocks=rng.choice([20, 40, 80]),
        max_num_seqs=rng.choice([1, 2, 4]),
        extra={
            "cpu_gib": rng.choice([0, 0, 60]) * 16 * CELL / 2**30,
            "pin_fraction": rng.choice([0, 0.5, 1]),
            "policy": rng.choice(["occupancy", "continuum"]),
            "admission": rng.choice(["auto", "off"]),
            "admission_max_wait_s": limit_s,
        },
    )
    with Rig(folder / "model", options) as rig:
        crowd = Crowd(rig, rng, some_agents(rng))
        # An overdue request precedes all later arrivals, so at most one request of each agent
        # precedes it. Each of those takes some steps of prefilling and decoding.
        turn_s = STEP_S * (ANSWER + LONGEST / 64 + 5)
        bound_s = limit_s + len(crowd.agents) * turn_s
        for _ in range(STEPS):
            crowd.step()
        crowd.end()
        late = {name: wait for name, wait in crowd.waits.items() if wait > bound_s}
        assert not late, f"waited beyond {bound_s:g} s: {late}"
        assert crowd.waits.keys() == crowd.sent.keys()


@pytest.mark.scripts(75, nightly=4_000)
def test_random_crowds_are_served_fairly(tmp_path: Path, seeds: range) -> None:
    play_each(tmp_path, seeds, play_script)


@pytest.mark.parametrize("one_id", [False, True], ids=["salts", "one job id each"])
def test_clients_that_keep_the_seats_full_get_equal_shares(tmp_path: Path, one_id: bool) -> None:
    """One client has ten concurrent requests, another has four, and a third has one. Four requests
    may run concurrently. The first two clients get equal shares, although one sends more
    requests."""
    options = RigOptions(blocks=400, max_num_seqs=4, in_job_order=True, extra={"cpu_gib": 0.0})
    with Rig(tmp_path / "model", options) as rig:
        rng = random.Random(7)
        crowd = Crowd(
            rig,
            rng,
            [
                Agent(
                    f"{client}{n}",
                    None if one_id else client,
                    {"job_id": client if one_id else f"{client}{n}"},
                    text(40, seed=ord(client) + n),
                )
                for client, agents in (("a", 10), ("b", 4), ("c", 1))
                for n in range(agents)
            ],
        )
        running = Counter[str]()
        for _ in range(STEPS):
            crowd.step()
            for agent in crowd.agents:  # tools take no time, so all clients always have requests
                agent.due_s = 0.0
            running.update(name[0] for name in rig.running())
        crowd.end()
    # The third client sends one request at a time. Its next one waits until another request ends.
    # The other two clients share the rest.
    assert running["c"] > 0.6 * STEPS
    assert 0.8 < running["a"] / running["b"] < 1.25


def newcomers_wait_s(folder: Path, extra: dict[str, Any] | None) -> float:
    """Return the mean time to first token of new jobs, in seconds, on an engine with twice as many
    agents as requests that may run."""
    options = RigOptions(
        blocks=100,
        max_num_seqs=4,
        max_model_len=LONGEST,
        in_job_order=extra is not None,
        extra=extra,
    )
    rng, waits, sent = random.Random(5), list[float](), dict[str, float]()
    contexts = {f"a{n}": text(60, seed=n) for n in range(8)}
    turns = dict.fromkeys(contexts, 0)
    with Rig(folder / "model", options) as rig:
        for step in range(1200):
            for job, turn in turns.items():
                if not turn or f"{job}.{turn}" in rig.finished:
                    turns[job] += 1
                    params, tokens = {"job_id": job}, rng.randrange(4, 24)
                    rig.add(f"{job}.{turns[job]}", contexts[job], tokens, params=params)
            if step > 200 and not step % 20:
                sent[f"new{step}"] = rig.now
                rig.add(f"new{step}", text(30, seed=step), 6, params={"job_id": f"new{step}"})
            rig.step()
            rig.now += STEP_S
            waits += [rig.now - sent.pop(name) for name in list(sent) if rig.outputs[name]]
        rig.run()
    assert len(waits) >= 40
    return sum(waits) / len(waits)


def test_newcomers_wait_no_longer_than_in_order_of_arrival(tmp_path: Path) -> None:
    ours = {"cpu_gib": 0.001, "policy": "occupancy", "admission_max_wait_s": 2.0}
    ratio = newcomers_wait_s(tmp_path / "ours", ours) / newcomers_wait_s(tmp_path / "stock", None)
    assert ratio < 1.2

"""vLLM's router in front of replicas: where jobs go, how long they take, and a replica that dies.

Prompts are texts, because the router ignores cached blocks for token ids. Three pairs of servers
run: one publishes the connector's KV events in addition to vLLM's, one publishes only vLLM's, and
one has a shared store. Each server has one core. ``scripts/install-peers`` installs the router. Its
``kv_aware`` policy gets no job id, so that it can find a context's server only by the events.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from tiered_kv.bench.agents.client import Answer, Api, Ask, Hints, ask_over
from tiered_kv.bench.agents.jobs import Job, Load, arrivals, make_jobs
from tiered_kv.bench.agents.paired import PairedRatio, drawn_order
from tiered_kv.bench.agents.player import Conversation, drive
from tiered_kv.bench.agents.results import JobDone
from tiered_kv.bench.hints.senders import Server
from tiered_kv.bench.output import Tick
from tiered_kv.bench.restore import BLOCK, SETTLE_S, TIMEOUT_S, context_gib, texts
from tiered_kv.bench.servers.peers import router_of
from tiered_kv.bench.servers.service import free_port
from tiered_kv.bench.servers.vllm_server import CONNECTOR, MODEL_NAME, ServerOptions
from tiered_kv.testing.valkey import ValkeyServer

from .replicas import STEPS, Replica, started

ROUNDS = 8
VOCABULARY = 40_000
HERE = 0.9
"""Fraction of a context that a server must have found in CPU memory for a turn to count as
returned to the context's holder."""
KILLED_ADDED, KILLED_ANSWER = 40, 16
"""Tokens that a killed job's second turn adds, and length of its answer."""
POLL_S = 0.2
ANSWERED = re.compile(r"^vllm:request_success_total\{.*\} (\S+)$", re.M)
RENDERED, RENDERS = 1_500, 15
"""Length of the prompt whose rendering is timed, in tokens, and number of calls."""
OURS, VLLMS, NONE = "kv_aware", "kv_aware_vllm_events", "kv_aware_no_events"
RANDOM, STICKY = "random", "sticky"
HEALTH = ("--health-check-interval-secs", "1", "--health-failure-threshold", "2")
"""Options with which the router notices a dead server within seconds, instead of three minutes.
Until then ``consistent_hash`` sends the server's jobs nowhere else."""
RENDER = ("--enable-scale-out",)
"""Option that enables the ``/render`` routes, from which the router gets the tokens of a prompt."""
EVENTS, NO_EVENTS = {"TIERED_KV_EVENTS": "vllm-router"}, {"TIERED_KV_EVENTS": "off"}

LOAD = Load(
    jobs=10,
    turns=3,
    system=64,
    task=2_000,
    result=60,
    answer=4,
    gap_s=12.0,
    gap_spread=0.3,
    gap_limit_s=24.0,
    apart_s=2.0,
)
"""Jobs of a round. A server's VRAM holds one and a half contexts. Jobs arrive quickly enough to use
both servers, and return after gaps in which other jobs have replaced their KV in VRAM. The gaps are
long enough for most first turns to finish, because the router sends jobs of a busy server
elsewhere, whatever KV that server holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Size of a run. Lengths in tokens.

    Attributes:
        returning: number of jobs that return once.
        context: mean length of the first prompt of a returning job.
        rounds: number of paired rounds of the two kinds of events; random and sticky placement get
            half as many.
        load: jobs of a round.
        vram: size of each server's KV pool.
        killed: a quarter of the number of jobs that run on both servers before one server is
            killed.
    """

    returning: int = 40
    context: int = 600
    rounds: int = ROUNDS
    load: Load = LOAD
    vram: int = 4_096
    killed: int = 4

    @property
    def held(self) -> int:
        """Tokens that the CPU memory of a server must hold."""
        load = self.load
        turns = load.system + load.task + (load.turns - 1) * load.result + load.turns * load.answer
        return max(3 * self.returning * self.context // 2, 2 * load.jobs * turns) + 2 * self.vram


# -- servers and routers ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pair:
    """Two running servers that publish KV events.

    Attributes:
        events: port of each server's events.
    """

    replicas: Sequence[Replica]
    events: Sequence[int]

    @contextmanager
    def routed(self, policy: str, log: Path) -> Iterator[str]:
        """Run the router in front of the servers. Yields its address.

        Args:
            policy: the router's policy, or one of ``OURS``, ``VLLMS`` and ``NONE``.
        """
        urls = [one.server.url for one in self.replicas]
        words = ["--policy", POLICIES.get(policy, policy), *HEALTH]
        if POLICIES.get(policy) == "kv_aware":
            words += ["--kv-event-model", MODEL_NAME, "--kv-event-block-size", str(BLOCK)]
            # Without a source the router does not start, so it gets ports without a server.
            ports = [free_port() for _ in urls] if policy == NONE else self.events
            for url, port in zip(urls, ports, strict=True):
                words += ["--kv-event-source", f"{url}=tcp://127.0.0.1:{port}"]
        with router_of(urls, log / f"{policy}.router.log", *words) as router:
            yield router.url


POLICIES: Mapping[str, str] = {
    OURS: "kv_aware",
    VLLMS: "kv_aware",
    NONE: "kv_aware",
    STICKY: "consistent_hash",
}
"""The router's policy in each arm that is not named after its policy."""


@contextmanager
def pair(model: Path, size: Size, folder: Path, env: Mapping[str, str]) -> Iterator[Pair]:
    """Start two servers with one core each that publish KV events."""
    cores, made, events = sorted(os.sched_getaffinity(0)), list[ServerOptions](), list[int]()
    folder.mkdir()
    for at in range(2):
        events.append(free_port())
        # vLLM binds an address only if it has an asterisk, and ZeroMQ ignores it after a port.
        endpoint = f"tcp://127.0.0.1:{events[-1]}*"
        published: dict[str, Any] = {"enable_kv_cache_events": True, "publisher": "zmq"}
        published |= {"endpoint": endpoint, "topic": ""}
        options = ServerOptions(
            model=model,
            block_size=BLOCK,
            kv_blocks=size.vram // BLOCK,
            max_model_len=size.vram - 2 * BLOCK,
            kv_transfer_config=CONNECTOR,
            env={
                "VLLM_CPU_OMP_THREADS_BIND": str(cores[at % len(cores)]),
                "TIERED_KV_CPU_GIB": f"{context_gib(model, size.held):.4f}",
                "TIERED_KV_TRACE": str(folder / f"trace-{at}.jsonl"),
                "VLLM_PLUGINS": "tiered_kv",
                **env,
            },
            extra_args=(*STEPS, *RENDER, "--kv-events-config", json.dumps(published)),
        )
        made.append(options)
    with started(made, folder) as replicas:
        yield Pair(replicas, events)


def from_cpu(pair: Pair) -> int:
    """Return the number of prompt tokens that the servers have found in CPU memory so far. The
    servers' counters are used because an answer reports this number only if the request names its
    job."""
    return sum(
        Server(replica.client).status()["counters"]["prompt_tokens_cpu"]
        for replica in pair.replicas
    )


# -- which server gets a returning turn ------------------------------------------------


def returning(pair: Pair, url: str, size: Size, seed: int, tick: Tick) -> float:
    """Send each job's first turn to one of the servers, fill VRAM, and send the second turns to the
    router. Returns the fraction of second turns whose context was found in CPU memory.

    Half of the jobs, drawn at random, begin on each server.

    Args:
        url: address of the router.
    """
    chance = random.Random(seed)
    load = replace(size.load, jobs=size.returning, turns=2, system=0, task=size.context, answer=1)
    jobs = as_texts(pair, make_jobs(load, seed, VOCABULARY))
    holders = [pair.replicas[at % 2] for at in range(len(jobs))]
    chance.shuffle(holders)
    contexts = [Conversation() for _ in jobs]
    lengths = list[int]()
    for job, holder, context in zip(jobs, holders, contexts, strict=True):
        context.add(job.turns[0])
        first = unnamed(holder.client, context)
        context.answered(first)
        lengths.append(first.prompt_tokens)
    tick("first turns")
    for server in [Server(replica.client) for replica in pair.replicas]:
        server.fill_vram()
        server.settle()
    returned = 0
    with httpx.Client(base_url=url, timeout=TIMEOUT_S) as client:
        for job, context, length in zip(jobs, contexts, lengths, strict=True):
            context.add(job.turns[1])
            before = from_cpu(pair)
            unnamed(client, context)
            returned += from_cpu(pair) - before >= HERE * (length - BLOCK)
    tick("second turns")
    return returned / len(jobs)


def as_texts(pair: Pair, jobs: Sequence[Job]) -> tuple[Job, ...]:
    """Return the jobs with texts instead of token ids."""
    client = pair.replicas[0].client

    def text(tokens: Sequence[int]) -> str:
        asked = {"model": MODEL_NAME, "tokens": [*tokens]}
        return str(client.post("/detokenize", json=asked).raise_for_status().json()["prompt"])

    return tuple(
        replace(job, turns=tuple(replace(turn, text=text(turn.added)) for turn in job.turns))
        for job in jobs
    )


def unnamed(client: httpx.Client, context: Conversation) -> Answer:
    """Send a turn without a job id, and return the answer of one token."""
    prompt = context.prompt(Api.COMPLETIONS)
    return ask_over(client, MODEL_NAME, Ask(prompt=prompt, max_tokens=1))


def rendering(replica: Replica) -> dict[str, Any]:
    """Time the route that the router, under ``kv_aware``, calls on every server for each chat
    request.

    Returns:
        ``tokens``: length of the prompt. ``ms``: median time of a call, milliseconds.
    """
    (tokens,) = texts(replica.client, 1, RENDERED)
    asked = {"model": MODEL_NAME, "tokens": tokens}
    text = replica.client.post("/detokenize", json=asked).raise_for_status().json()["prompt"]
    body = {"model": MODEL_NAME, "messages": [{"role": "user", "content": text}], "max_tokens": 1}
    times = list[float]()
    for _ in range(RENDERS):
        began = time.perf_counter()
        replica.client.post("/v1/chat/completions/render", json=body).raise_for_status()
        times.append(time.perf_counter() - began)
    return {"tokens": RENDERED, "ms": 1e3 * statistics.median(times)}


# -- mean job time ---------------------------------------------------------------------


def job_times(
    arms: tuple[str, str], pair: Pair, urls: Mapping[str, str], size: Size, seed: int, tick: Tick
) -> dict[str, Any]:
    """Play the same jobs through the routers of two arms, in rounds.

    Args:
        pair: servers that convert the jobs to texts.
        urls: address of each arm's router.

    Returns:
        ``paired_ratio``, ``paired_interval``: mean job time of the first arm, divided by the mean
            job time of the second arm, and the 95% interval. ``seconds``: mean job time of each
            arm. ``cached_share``: fraction of the earlier context that later turns found cached.
            ``rounds``: the mean times of each round.

    Raises:
        RuntimeError: a job failed.
    """
    times: dict[str, list[float]] = {arm: [] for arm in arms}
    cached: dict[str, list[float]] = {arm: [] for arm in arms}
    for number in range(size.rounds):
        jobs = as_texts(pair, make_jobs(size.load, seed + number, VOCABULARY))
        starts = arrivals(len(jobs), 1 / size.load.apart_s, seed + number)
        for arm in drawn_order(arms, seed, number):
            done = play(urls[arm], jobs, starts, arm, number)
            times[arm].append(statistics.fmean(one.completion_s for one in done))
            cached[arm].append(found_share(done))
            tick(f"{arm}, round {number + 1} of {size.rounds}")
    first, second = (times[arm] for arm in arms)
    ratio = PairedRatio.of(first, second)
    return {
        "paired_ratio": ratio.value,
        "paired_interval": [ratio.low, ratio.high],
        "seconds": {arm: statistics.fmean(found) for arm, found in times.items()},
        "cached_share": {arm: statistics.fmean(found) for arm, found in cached.items()},
        "rounds": times,
    }


def play(
    url: str, jobs: Sequence[Job], starts: Sequence[float], arm: str, number: int
) -> tuple[JobDone, ...]:
    """Play jobs through a router. Requests name their job only in the arm whose router keeps a job
    on its server, and in the arm that is compared with it.

    Args:
        number: number of the round.

    Raises:
        RuntimeError: a job failed.
    """
    named = arm in (RANDOM, STICKY)
    salt = arm if named else ""  # the arms' servers are the same
    own = [replace(job, salt=salt, name=f"{arm}-{number}-{job.name}") for job in jobs]
    playing = drive(
        url,
        MODEL_NAME,
        own,
        starts,
        hints=Hints.NONE,
        force=False,
        logprobs=False,
        session_header=named,
    )
    done = asyncio.run(playing)
    if errors := [one.error for one in done if one.error]:
        raise RuntimeError(f"a job of {arm} failed: {errors[0]}")
    return done


def found_share(done: Sequence[JobDone]) -> float:
    """Return the fraction of the earlier context that later turns found cached."""
    turns = [(one, two) for job in done for one, two in zip(job.turns, job.turns[1:], strict=False)]
    contexts = sum(one.prompt_tokens + one.output_tokens for one, _ in turns)
    return sum(two.cached_tokens for _, two in turns) / contexts


# -- a server that dies ----------------------------------------------------------------


def killed(pair: Pair, url: str, size: Size, tick: Tick) -> dict[str, Any]:
    """Kill the server of some jobs between two turns.

    Args:
        url: address of a router that keeps a job on its server.

    Returns:
        ``jobs``: number of jobs of the killed server, each answered by the other server.
        ``noticed_s``: time until the first of these jobs was answered, seconds. Until the router
            notices that the server is gone, it answers with errors, and the client repeats the
            request.
        ``remote_share``: fraction of these jobs' contexts that came from the shared store.
        ``compared``, ``equal``: number of jobs whose whole context came from the store, and True if
            these jobs' answers equal their answers when no server was killed.

    Raises:
        httpx.HTTPStatusError: the router does not send the jobs to the other server.
    """
    whole, noticed_s = size.context // BLOCK * BLOCK, 0.0
    prompts = texts(pair.replicas[0].client, 4 * size.killed, whole + KILLED_ADDED)
    with httpx.Client(base_url=url, timeout=TIMEOUT_S) as client:

        def turn(at: int, salt: str, length: int, tokens: int) -> Answer:
            name = f"{salt} {at}"
            asked = Ask(
                prompt=prompts[at][:length],
                max_tokens=tokens,
                session=name,
                salt=salt,
                extra=Hints.KV_PARAMS.body(name, False),
            )
            return ask_over(client, MODEL_NAME, asked)

        unharmed = list[Answer]()
        for at in range(len(prompts)):
            turn(at, "unharmed", whole, 1)
            unharmed.append(turn(at, "unharmed", whole + KILLED_ADDED, KILLED_ANSWER))
        tick("jobs of unharmed servers")
        homes = list[int]()
        for at in range(len(prompts)):
            before = answered(pair)
            turn(at, "harmed", whole, 1)
            while (after := answered(pair)) == before:
                time.sleep(POLL_S)  # the server counts an answer after it was sent
            homes.append(after[1] > before[1])
        victim = max((0, 1), key=homes.count)
        replica = pair.replicas[victim]
        replica.shared_pages()
        assert replica.server.pid is not None
        os.killpg(replica.server.pid, signal.SIGKILL)
        moved, began = dict[int, Answer](), time.monotonic()
        for at in [at for at, home in enumerate(homes) if home == victim]:
            while at not in moved:
                try:
                    moved[at] = turn(at, "harmed", whole + KILLED_ADDED, KILLED_ANSWER)
                except httpx.HTTPStatusError:
                    if time.monotonic() - began > SETTLE_S:
                        raise
                    time.sleep(POLL_S)  # as clients do
            noticed_s = noticed_s or time.monotonic() - began
        tick("jobs of the killed server")
    found = {at: one.sources.get("remote_tokens", 0) for at, one in moved.items()}
    complete = [at for at, tokens in found.items() if tokens == whole]
    return {
        "jobs": len(moved),
        "noticed_s": noticed_s,
        "remote_share": sum(found.values()) / (whole * len(moved)),
        "compared": len(complete),
        "equal": bool(complete) and all(moved[at].tokens == unharmed[at].tokens for at in complete),
    }


def answered(pair: Pair) -> list[float]:
    """Return the number of requests that each server has answered."""
    pages = [one.client.get("/metrics").raise_for_status().text for one in pair.replicas]
    return [sum(map(float, ANSWERED.findall(page))) for page in pages]


# -- the measurement -------------------------------------------------------------------


def measure(model: Path, size: Size, seed: int, folder: Path, tick: Tick) -> dict[str, Any]:
    """Run all measurements of this module. Returns ``returned_to_holder`` (see ``returning``),
    ``mean_job_time`` (see ``job_times``), ``render`` (see ``rendering``) and ``killed``.
    """
    returned, by_events, rendered = with_events(model, size, seed, folder, tick)
    by_place, died = with_store(model, size, seed, folder, tick)
    return {
        "returned_to_holder": returned,
        "mean_job_time": {
            "kv_aware_over_vllm_events": by_events,
            "random_shared_over_sticky": by_place,
        },
        "render": rendered,
        "killed": died,
    }


def with_events(
    model: Path, size: Size, seed: int, folder: Path, tick: Tick
) -> tuple[dict[str, float], dict[str, Any], dict[str, Any]]:
    """Measure two pairs of servers, of which only one publishes the connector's events too. Returns
    the results of ``returning`` by arm, of ``job_times``, and of ``rendering``."""
    with ExitStack() as stack:
        tick("servers with the connector's events, and with vLLM's")
        ours = stack.enter_context(pair(model, size, folder / OURS, EVENTS))
        vllms = stack.enter_context(pair(model, size, folder / VLLMS, NO_EVENTS))
        arms = {OURS: ours, VLLMS: vllms, NONE: ours}
        urls = {arm: stack.enter_context(one.routed(arm, folder)) for arm, one in arms.items()}
        returned = {
            arm: returning(one, urls[arm], size, seed + at, tick)
            for at, (arm, one) in enumerate(arms.items())
        }
        by_events = job_times((OURS, VLLMS), ours, urls, size, seed, tick)
        return returned, by_events, rendering(ours.replicas[0])


def with_store(
    model: Path, size: Size, seed: int, folder: Path, tick: Tick
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Measure servers with a shared store. Returns the results of ``job_times`` and ``killed``."""
    with ExitStack() as stack:
        tick("servers with a shared store")
        store = stack.enter_context(ValkeyServer(folder))
        env = {**NO_EVENTS, "TIERED_KV_REMOTE": store.url}
        shared = stack.enter_context(pair(model, size, folder / "shared", env))
        urls = {arm: stack.enter_context(shared.routed(arm, folder)) for arm in (RANDOM, STICKY)}
        fewer = replace(size, rounds=(size.rounds + 1) // 2)
        by_place = job_times((RANDOM, STICKY), shared, urls, fewer, seed, tick)
        return by_place, killed(shared, urls[STICKY], size, tick)

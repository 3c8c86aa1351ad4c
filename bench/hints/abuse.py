"""Hostile calls of ``POST /tiered_kv/hints`` from one client, while streams of another client
decode.

Each round has two spells of calls: hostile calls, and the same number of calls, with the same
bodies, to a path that vLLM does not have. The callers run at the lowest priority, in a separate
process.
"""

from __future__ import annotations

import hashlib
import http.client
import itertools
import json
import os
import pickle
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from tiered_kv.bench.agents.paired import PairedRatio, drawn_order
from tiered_kv.bench.output import Tick
from tiered_kv.bench.servers.load import group_members
from tiered_kv.bench.servers.vllm_server import MODEL_NAME, VllmServer
from tiered_kv.policies.jobs.kv_hints import MAX_ACTIONS, Intent, Outcome

from .senders import JSON_TYPE, Server

HINTS, NOTHING = "/tiered_kv/hints", "/nothing"
CALLERS = 8
"""Maximum number of concurrent calls."""
DECODING, ANSWER_TOKENS, PROMPT_TOKENS = 2, 400, 150
"""Number of streams, and the size of their answers and prompts."""
REST_S = 2.0
"""Pause before each spell, for the server to recover from the previous one, seconds."""
LATE = 3.0
"""A spell ends after this multiple of its planned time, however many calls are left."""
TIMEOUT_S = 120.0
HARMLESS = {Outcome.REJECTED, Outcome.MISSING, Outcome.DEFERRED}
REFUSED, LIMITED = {400, 413, 415}, 429
VICTIMS, SALT, CALLER_SALT = 4, "alice", "mallory"
SEED = 1
HASH_SEED = "0"
"""Value of ``PYTHONHASHSEED`` for the server."""


@dataclass(frozen=True, slots=True)
class Victim:
    """A job with another cache salt, which hostile calls must not affect.

    Attributes:
        name, number: the job's id, and its number in the server's list of jobs.
        prompt: token ids of its context.
        hashes: hashes of its blocks.
    """

    name: str
    number: int
    prompt: Sequence[int]
    hashes: Sequence[bytes]


def block_hashes(prompt: Sequence[int], salt: str, block: int) -> list[bytes]:
    """Return the hashes of a prompt's full blocks, as an engine computes them with ``HASH_SEED``
    and SHA-256. This function does not call vLLM, because importing vLLM takes as long as starting
    the server."""
    found = [_sha256(HASH_SEED)]
    for start in range(0, len(prompt) - block + 1, block):
        extra = None if start else (("cache_salt", salt),)
        found.append(_sha256((found[-1], tuple(prompt[start : start + block]), extra)))
    return found[1:]


def _sha256(value: object) -> bytes:
    return hashlib.sha256(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)).digest()


def hostile(victims: Sequence[Victim]) -> list[bytes]:
    """Return the bodies of hostile calls. The server must not carry out any of them."""
    unknown: dict[str, Any] = {"action_type": "release", "payload": {"job_id": "no such job"}}

    def acts(*actions: Any, **more: Any) -> bytes:
        return json.dumps({"actions": actions, **more}).encode()

    def each(payload: Mapping[str, Any], **more: Any) -> bytes:
        actions = [{"action_type": one.value, "payload": payload} for one in Intent]
        for action in actions:
            if action["action_type"] == Intent.REVISE:
                action["payload"] = {**payload, "done": True}
        return acts(*actions, cache_salt=CALLER_SALT, **more)

    bodies = [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe{}",
        b"[" * 50_000,
        b'{"actions": [' + b"9" * 5_000 + b"]}",
        b'{"actions": [], "actions": []}',
        acts(),
        acts(None, 1, "x", [], {}, True, [[[]]]),
        json.dumps({"actions": {"action_type": "release"}}).encode(),
        acts(unknown, cache_salt=5),
        acts(unknown, cache_salt="\ud800"),
        acts({"action_type": ["release"]}, {"action_type": "format"}, {"action_type": "kv.kv.pin"}),
        acts({**unknown, "action_id": "x" * 50_000}, message_id="x" * 50_000),
        acts({**unknown, "payload": {"job_id": "x" * 50_000}}),
        acts({**unknown, "payload": {"job_id": "\x00\r\n\x1b[31m"}}, cache_salt=CALLER_SALT),
        acts({**unknown, "payload": [1]}, {**unknown, "payload": "x"}),
        acts({**unknown, "action_version": {"a": [1]}}, protocol_version="99.7"),
        acts({**unknown, "action_version": "1" * 9_000}, protocol_version=["0.1"]),
        acts(*[unknown] * (MAX_ACTIONS + 200), cache_salt=CALLER_SALT),
        acts({"action_type": "pin", "payload": {"job_id": "no", "ttl_s": float("nan")}}),
        acts({"action_type": "pin", "payload": {"job_id": "no", "ttl": "-5m"}}),
        acts({"action_type": "retain", "payload": {"job_id": "no", "priority": 10**400}}),
        acts({"action_type": "revise", "payload": {"job_id": "no", "progress": "half"}}),
        each({"token_ids": [-1, 10**30]}),
        each({"token_ids": [[1], {"a": 1}]}),
        each({"block_hashes": ["g" * 64, 1 << 70]}),
        each({"block_hashes": [*range(1_000)]}),
        each({"number": "0.1.2"}),
        each({"number": -1}),
    ]
    for one in victims:
        bodies += [
            each({"job_id": one.name}),
            each({"number": one.number}),
            each({"number": f"0.{one.number}"}),
            each({"token_ids": list(one.prompt)}),
            each({"block_hashes": [found.hex() for found in one.hashes]}),
            each({"block_hashes": [int.from_bytes(found[-8:], "big") for found in one.hashes]}),
        ]
    return bodies


# -- calls ----------------------------------------------------------------------------


def call(port: int, path: str, body: bytes) -> str:
    """POST a body to a path of the server on loopback. Returns ``harmless``, ``refused``,
    ``limited`` or a description of the fault.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        connection.request("POST", path, body, JSON_TYPE)
        answer = connection.getresponse()
        found = answer.read()
    except OSError as error:
        return f"no answer: {error!r}"
    finally:
        connection.close()
    if path == NOTHING:
        return "refused" if answer.status == 404 else f"status {answer.status}"
    if answer.status == LIMITED:
        return "limited"
    if answer.status in REFUSED:
        return "refused"
    if answer.status != 200:
        return f"status {answer.status}: {body[:80]!r}"
    outcomes = {one["outcome"] for one in json.loads(found)["results"]}
    return "harmless" if outcomes <= HARMLESS else f"carried out: {body[:300]!r}: {found[:300]!r}"


def call_many(
    port: int, path: str, bodies: Sequence[bytes], first: int, calls: int, spell_s: float
) -> Counter[str]:
    """Make calls, with each of ``bodies`` in turn, spread evenly over a spell, up to ``CALLERS`` of
    them concurrently. Returns the count of each result. Calls that would start later than ``LATE``
    times the spell's planned duration are counted as ``not made``.

    Args:
        first: number of the spell's first call, counted over all rounds.
        calls: number of calls.
        spell_s: planned duration of the spell, seconds.
    """
    began = time.monotonic()

    def one(at: int) -> str:
        time.sleep(max(0.0, began + at * spell_s / calls - time.monotonic()))
        if time.monotonic() > began + LATE * spell_s:
            return "not made"
        return call(port, path, bodies[(first + at) % len(bodies)])

    with ThreadPoolExecutor(CALLERS) as callers:
        return Counter(callers.map(one, range(calls)))


# -- decoding -------------------------------------------------------------------------


@dataclass(slots=True)
class Decoding:
    """Streams that keep a server decoding.

    Attributes:
        url: address of the server.
        answers: arrival times of each answer's tokens, as ``time.perf_counter``.
    """

    url: str
    answers: list[list[float]] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Decode until the block ends. The block starts when every stream has received a token.

        Raises:
            RuntimeError: an answer failed.
        """
        with ThreadPoolExecutor(DECODING) as pool:
            clients = [pool.submit(self._decode, at) for at in range(DECODING)]
            try:
                while sum(map(bool, self.answers)) < DECODING and not any(
                    client.done() for client in clients
                ):
                    time.sleep(REST_S / 20)
                yield
            finally:
                self._stop.set()
            for client in clients:
                client.result()

    def _decode(self, at: int) -> None:
        with httpx.Client(base_url=self.url, timeout=TIMEOUT_S, trust_env=False) as client:
            for number in itertools.count():
                if self._stop.is_set():
                    return
                times = list[float]()
                self.answers.append(times)
                body = {
                    "model": MODEL_NAME,
                    "prompt": [1_000 + 100 * at + number % 100] * PROMPT_TOKENS,
                    "max_tokens": ANSWER_TOKENS,
                    "ignore_eos": True,
                    "stream": True,
                    "kv_transfer_params": {"job_id": f"decodes {at}", "is_last_step": True},
                }
                with client.stream("POST", "/v1/completions", json=body) as answer:
                    if answer.is_error:
                        raise RuntimeError(f"a request failed: {answer.read().decode()}")
                    for line in answer.iter_lines():
                        if line.startswith("data: {"):
                            times.append(time.perf_counter())
                        if self._stop.is_set():
                            return

    def p95_ms(self, began: float, ended: float) -> float:
        """Return the 95th percentile of the time between two tokens of an answer, milliseconds.

        Args:
            began, ended: period to evaluate, as ``time.perf_counter``.

        Raises:
            RuntimeError: no tokens were decoded in the period.
        """
        times = [
            other - one
            for answer in self.answers
            for one, other in itertools.pairwise(answer)
            if began <= one and other <= ended
        ]
        if not times:
            raise RuntimeError("no tokens were decoded during the calls: raise --calls")
        return 1e3 * float(np.quantile(times, 0.95))


# -- the measurement ------------------------------------------------------------------


def held_by(group: int) -> dict[int, tuple[int, int]]:
    """Return the number of threads and of file descriptors of each process in a process group, by
    process id."""
    found = {}
    for pid in group_members(group):
        with suppress(FileNotFoundError, PermissionError):  # the process has ended
            names = (Path(f"/proc/{pid}/{name}") for name in ("task", "fd"))
            threads, files = (len(list(one.iterdir())) for one in names)
            found[pid] = (threads, files)
    return found


UNCHANGED = ("id", "number", "turn", "state", "since", "context_tokens", "decision")
"""Fields of a job's row that neither time nor other jobs change."""


def rows(server: Server) -> list[Mapping[str, Any]]:
    """Return the ``UNCHANGED`` fields of the victims' rows in the server's list of jobs."""
    return [
        {name: row[name] for name in UNCHANGED}
        for row in server.jobs().values()
        if row["id"].startswith("victim")
    ]


def measure(
    running: VllmServer,
    server: Server,
    prompts: Sequence[Sequence[int]],
    block: int,
    *,
    calls: int,
    rounds: int,
    rate: float,
    tick: Tick,
) -> dict[str, Any]:
    """Make hostile calls, and the same number of calls that vLLM itself refuses. Returns the counts
    of their results, the times between tokens, and what changed on the server.

    Args:
        prompts: contexts of the victims.
        block: tokens per block.
        calls: number of hostile calls.
        rounds: number of rounds that the calls are divided into.
        rate: calls per second.

    Raises:
        RuntimeError: the engine does not find a victim's context by its block hashes, or no tokens
            were decoded during the calls.
    """
    victims = []
    for at, prompt in enumerate(prompts):
        server.turn(f"victim {at}", prompt, salt=SALT)
        number = server.jobs()[f"victim {at}"]["number"]
        victims.append(Victim(f"victim {at}", number, prompt, block_hashes(prompt, SALT, block)))
    server.settle()
    by_hash = server.hint("prefetch", SALT, block_hashes=[one.hex() for one in victims[0].hashes])
    if by_hash["outcome"] != Outcome.ACCEPTED:
        raise RuntimeError(f"the engine did not find a context by its block hashes: {by_hash}")
    bodies, before, held = hostile(victims), rows(server), held_by(running.pid or 0)
    decoding, each = Decoding(running.url), max(1, calls // rounds)
    results = {path: Counter[str]() for path in (HINTS, NOTHING)}
    p95: dict[str, list[float]] = {path: [] for path in results}
    with (
        ProcessPoolExecutor(1, initializer=os.nice, initargs=(19,)) as caller,
        ExitStack() as stack,
    ):
        caller.submit(os.getpid).result()  # forks the process before threads start
        stack.enter_context(decoding.running())
        for number in range(rounds):
            for path in drawn_order([HINTS, NOTHING], SEED, number):
                time.sleep(REST_S)
                began = time.perf_counter()
                spell = (running.port, path, bodies, number * each, each, each / rate)
                results[path] += caller.submit(call_many, *spell).result()
                p95[path].append(decoding.p95_ms(began, time.perf_counter()))
            tick(f"abuse, round {number + 1} of {rounds}")
    running.check()
    counters = server.settle()
    after, held_after = rows(server), held_by(running.pid or 0)
    lost = 0
    for one in victims:
        report = server.turn(one.name, [*one.prompt, 7, 8, 9], salt=SALT)
        # A turn recomputes the partial block at the end of its context, and the new tokens.
        lost += max(0, report["recomputed_tokens"] - block - 3)
    known = {"harmless", "refused", "limited", "not made"}
    wrong = sum((one for one in results.values()), Counter[str]())
    ratio = PairedRatio.of(p95[HINTS], p95[NOTHING])
    grown = [
        max(now - then for now, then in zip(held_after[pid], counts, strict=True))
        for pid, counts in held.items()
    ]
    return {
        "calls": results[HINTS].total() - results[HINTS]["not made"],
        **{name: results[HINTS][name] for name in ("harmless", "refused", "limited")},
        "calls_of_nothing": results[NOTHING].total() - results[NOTHING]["not made"],
        "wrong": sum(count for name, count in wrong.items() if name not in known),
        "wrong_first": next((name for name in wrong if name not in known), None),
        "p95_over_404s": ratio.value,
        "p95_over_404s_interval": [ratio.low, ratio.high],
        "p95_ms": float(np.median(p95[HINTS])),
        "p95_404s_ms": float(np.median(p95[NOTHING])),
        "rounds": rounds,
        "calls_per_s": rate,
        "jobs_changed": sum(one not in after for one in before) + abs(len(after) - len(before)),
        "tokens_lost": lost,
        "hook_errors": counters["hook_errors"],
        "held_more": max(grown),
    }

"""KV hints are read from all forms that clients and routers send, and every action has a result."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from tests.arbitrary_ids import LEAVES
from tiered_kv.connectors.vllm.middleware import MESSAGES, PATHS, RESPONSES, carry
from tiered_kv.policies.jobs.hints import TurnHints, read_hints
from tiered_kv.policies.jobs.kv_hints import (
    FIELDS,
    MAX_ACTIONS,
    MAX_HASHES,
    MAX_ID_BYTES,
    MAX_MESSAGE_CHARS,
    MAX_TOKENS,
    HintReader,
    HintResult,
    Intent,
    KvHint,
    Outcome,
    Target,
    results_json,
)

CHAT = "/v1/chat/completions"
OWN = Target(own=True)
DIGEST = bytes(range(32))


def envelope(*actions: Any, version: object = "0.1") -> dict[str, Any]:
    return {"protocol_version": version, "message_id": "m1", "actions": list(actions)}


def action(kind: object, version: object = "1.0", name: object = "a", **payload: Any) -> Any:
    return {"action_id": name, "action_type": kind, "action_version": version, "payload": payload}


def read(message: object, engine: int | None = None) -> HintReader:
    reader = HintReader(engine)
    reader.add(message)
    return reader


def hint(kind: str, **payload: Any) -> KvHint:
    """Return the hint of an action that can be carried out."""
    (found,) = read(envelope(action(kind, **payload))).found
    assert isinstance(found, KvHint), found
    return found


def refused(message: object, engine: int | None = None) -> HintResult:
    """Return the result of the only action in a message, which cannot be carried out."""
    (found,) = read(message, engine).found
    assert isinstance(found, HintResult), found
    return found


# -- envelopes ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*Intent, *(f"kv.{intent}" for intent in Intent)])
def test_an_intent_may_have_a_prefix(kind: str) -> None:
    found = hint(kind, job_id="j", done=True)
    assert (found.intent, found.target) == (Intent(kind.removeprefix("kv.")), Target(job="j"))


def test_an_envelope_a_list_and_one_action_are_read_also_as_json() -> None:
    one = action("demote", session_id="agent-42")
    wanted = [KvHint("a", Intent.DEMOTE, Target(job="agent-42"))]
    for message in (envelope(one), [one], one):
        assert read(message).found == read(json.dumps(message)).found == wanted
    assert read({"action_id": "a", "action_type": "demote", "job_id": "agent-42"}).found == wanted
    assert read(envelope()).found == read([]).found == []


def test_actions_in_formats_of_other_projects_are_read() -> None:
    """The formats are vLLM's ``kv.fetch``, Dynamo's session policy, and SGLang's draft."""
    fetch = {"source_control_endpoint": "h:1", "block_hashes": [1, 2**64 - 1], "mode": "copy"}
    ends = (bytes(7) + b"\1", b"\xff" * 8)
    assert hint("kv.fetch", **fetch).intent is Intent.PREFETCH
    assert hint("kv.fetch", **fetch).target == Target(hashes=ends)
    late = {"execute_at": "request_completion", "block_hashes": ["11", str(2**64 - 1)]}
    retained = hint("kv.retain", **late, priority=3, ttl_seconds=2.5)
    assert (retained.ttl_s, retained.priority) == (2.5, 0.75)
    assert retained.target == Target(hashes=(bytes(7) + b"\x0b", b"\xff" * 8))
    evicted = hint("kv.evict", **late, include_current_request=True)
    assert (evicted.intent, evicted.target) == (Intent.RELEASE, OWN)
    assert hint("kv.deref") == KvHint("a", Intent.RELEASE, OWN)
    assert hint("kv.prefetch") == KvHint("a", Intent.PREFETCH, OWN)


def test_an_unknown_version_is_read_as_a_known_one_with_one_warning() -> None:
    reader = read(envelope(action("retain", name="a"), action("demote", name="b"), version="7"))
    assert [bool(one.note) for one in reader.hints] == [True, False]
    reader = read(envelope(action("retain", "7", name="a"), action("demote", name="b")))
    assert [bool(one.note) for one in reader.hints] == [True, False]
    done = [HintResult(name, None, Outcome.ACCEPTED, "Done.") for name in "ab"]
    said = results_json(done, reader.hints)
    assert said[0]["reason"] == "This version of retain is unknown: version 1.0 is assumed. Done."
    assert said[1] == {"action_id": "b", "outcome": "accepted", "reason": "Done."}


@pytest.mark.parametrize(
    "nonsense",
    [None, 7, "", "{", "[" * 5000, "9" * 5000, "null", {}, {"actions": 3}, b"x", float("nan")],
)
def test_an_invalid_message_has_one_result(nonsense: object) -> None:
    assert refused(nonsense).outcome is Outcome.REJECTED


@pytest.mark.parametrize(
    "nonsense",
    [
        None,
        [],
        {},
        action(None),
        action(["retain"]),
        action("kv.kv.retain"),
        action("share"),
        {**action("retain"), "payload": 3},
        action("retain", job_id=""),
        action("retain", session_id=[1]),
        action("retain", ttl_s=0),
        action("retain", ttl_s=-1),
        action("retain", ttl_s=float("nan")),
        action("retain", ttl_s=10**400),
        action("retain", ttl="5 weeks"),
        action("retain", priority="high"),
        action("retain", priority=True),
        action("retain", token_ids=[]),
        action("retain", token_ids=[1, True]),
        action("retain", token_ids=[-1]),
        action("retain", token_ids=[2**32]),
        action("retain", token_ids={"a": 1}),
        action("retain", block_hashes="ab" * 32),
        action("retain", block_hashes=["ab"]),
        action("retain", block_hashes=["x" * 64]),
        action("retain", block_hashes=[2**64]),
        action("retain", block_hashes=[1.5]),
        action("revise"),
        action("revise", done=False),
        action("revise", done="yes"),
        action("revise", progress=2),
        action("revise", progress=1, total=0),
        action("revise", expected_tool_s=-1),
        action("release", number=5),
    ],
)
def test_an_action_that_cannot_be_read_is_rejected_and_the_next_one_is_read(nonsense: Any) -> None:
    bad, good = read(envelope(nonsense, action("pin", name="good"))).found
    assert isinstance(bad, HintResult)
    assert bad.outcome is Outcome.REJECTED
    assert bad.reason.startswith("The hint cannot be read: ")
    assert good == KvHint("good", Intent.PIN, OWN)


# -- targets ------------------------------------------------------------------------


def test_a_job_is_named_as_in_requests() -> None:
    for ids, job in (
        ({"job_id": 7}, "7"),
        ({"session_id": "S"}, "S"),
        ({"session_id": "S", "agent_id": "a"}, "S/agent:a"),
        ({"session_id": "S", "agent_id": "lead"}, "S"),
        ({"program_id": "p"}, "p"),
        ({"task_id": "t"}, "t"),
    ):
        assert hint("release", **ids).target == Target(job=job)


def test_hashes_are_numbers_bytes_or_digits_of_whole_hashes() -> None:
    """Block hashes are accepted in the forms in which clients see them: vLLM's KV events have the
    whole hash in bytes, or its last eight bytes as a number."""
    number = int.from_bytes(DIGEST, "big") & (1 << 64) - 1
    whole = [DIGEST, DIGEST.hex(), f"hex:{DIGEST.hex()}", f"0x{DIGEST.hex().upper()}"]
    ends = [number, str(number), number - 2**64, DIGEST[-8:].hex()]
    assert hint("demote", block_hashes=whole).target == Target(hashes=(DIGEST,) * 4)
    assert hint("demote", block_hashes=ends[:2]).target == Target(hashes=(DIGEST[-8:],) * 2)
    assert hint("demote", hashes=ends[3:]).target == Target(hashes=(DIGEST[-8:],))


def test_a_prefix_is_named_by_its_tokens() -> None:
    assert hint("prefetch", token_ids=[1, 2, 2**32 - 1]).target.tokens == (1, 2, 2**32 - 1)


def test_only_the_route_may_name_a_job_by_number_and_each_engine_answers_for_its_own() -> None:
    assert refused(action("release", number=57)).outcome is Outcome.REJECTED
    for number, engine in ((57, 0), ("57", 0), ("0.57", 0), ("3.57", 3)):
        (found,) = read(action("release", number=number), engine).found
        assert found == KvHint("a", Intent.RELEASE, Target(number=57))
        assert refused(action("release", number=number), 4).outcome is Outcome.MISSING
    nonsense: tuple[Any, ...] = (-1, True, 1.5, "", "1.2.3", "9" * 30, 10**30, {}, "٣")
    for number in nonsense:
        assert refused(action("release", number=number), 0).outcome is Outcome.REJECTED


def test_the_route_has_no_job_of_its_own() -> None:
    assert refused(action("release"), 0).outcome is Outcome.REJECTED
    lineage = action("evict", block_hashes=[1], include_current_request=True)
    assert refused(lineage, 0).outcome is Outcome.REJECTED


# -- parameters -------------------------------------------------------------------


def test_times_are_seconds_or_strings_with_units() -> None:
    for given, ttl_s in ((300, 300), ("300", 300), ("5m", 300), ("1h", 3600), ("24h", 86_400)):
        for name in ("ttl_s", "ttl_seconds", "ttl", "duration"):
            assert hint("pin", **{name: given}).ttl_s == ttl_s
    assert hint("pin", ttl="1.5 s").ttl_s == 1.5
    assert hint("pin", ttl="250ms").ttl_s == 0.25
    assert hint("pin").ttl_s is None


def test_priorities_of_any_scale_keep_their_order_and_sign() -> None:
    given = [-1e9, -5, -1, 0, 0.5, 1, 3, 100, 1e9]
    found = [hint("retain", priority=one).priority for one in given]
    assert found == sorted(set(found))
    assert -1 <= found[0] < 0 == found[3] < found[-1] <= 1


def test_a_revision_has_the_time_left_the_progress_or_the_end() -> None:
    assert hint("revise", expected_tool_s=40).expected_s == 40.0
    assert hint("revise", progress=0.25).progress == 0.25
    assert hint("revise", progress=3, total=4).progress == 0.75
    assert hint("revise", done=True).done
    assert hint("revise", done=1).done, "vLLM turns the booleans of vllm_xargs into numbers"


# -- bounds -------------------------------------------------------------------------


def test_actions_over_the_bound_have_one_result() -> None:
    actions = [action("pin", name=f"a{at}") for at in range(3 * MAX_ACTIONS)]
    reader = read(envelope(*actions))
    reader.add(envelope(*actions))
    assert len(reader.hints) == MAX_ACTIONS
    (rest,) = reader.answered
    assert str(MAX_ACTIONS) in rest.reason


@pytest.mark.parametrize(
    ("field", "most"), [("token_ids", MAX_TOKENS), ("block_hashes", MAX_HASHES)]
)
def test_tokens_and_hashes_of_all_actions_together_are_bounded(field: str, most: int) -> None:
    half = action("retain", **{field: list(range(most // 2))})
    more = action("retain", **{field: [1]})
    reader = read([half, half, more])
    assert [type(one) for one in reader.found] == [KvHint, KvHint, HintResult]
    assert str(most) in reader.answered[0].reason


def test_names_and_strings_are_bounded_and_can_be_encoded() -> None:
    name = read(action("pin", name="x" * 10_000)).hints[0].action_id
    assert len(name) <= MAX_ID_BYTES
    assert read(action("pin", name="\ud83d")).hints[0].action_id == "?"
    assert read([action("pin", name=None), action("pin", name=7)]).hints[0].action_id == "#0"
    assert "characters" in refused("[" + " " * MAX_MESSAGE_CHARS + "]").reason


# -- requests -----------------------------------------------------------------------


def retained(hints: TurnHints) -> tuple[str, float | None, float]:
    """Return the name, time and priority of the only hint, which retains the request's own job."""
    (found,) = hints.kv_hints
    assert not hints.kv_answered
    assert not hints.ignored
    assert (found.intent, found.target) == (Intent.RETAIN, OWN)
    return found.action_id, found.ttl_s, found.priority


def sent(path: str, **body: Any) -> TurnHints:
    """Return the hints in a body that has passed the middleware."""
    got = json.loads(carry(json.dumps({"model": "m", **body}).encode(), path))
    return read_hints(got.get("kv_transfer_params"), got.get("vllm_xargs"))


def test_a_request_without_hints_has_none() -> None:
    for path in PATHS:
        assert sent(path, messages=[]) == sent(path, prompt="cache_control nvext") == TurnHints()


@pytest.mark.parametrize("name", ["kv_hint", "kv_hints"])
def test_messages_are_read_in_parameters_and_in_xargs(name: str) -> None:
    one, other = envelope(action("pin", name="a")), envelope(action("demote", name="b"))
    found = read_hints({"job_id": "j", name: one}, {name: json.dumps(other)})
    assert [(one.action_id, one.intent) for one in found.kv_hints] == [
        ("a", Intent.PIN),
        ("b", Intent.DEMOTE),
    ]
    assert (found.job_id, found.ignored) == ("j", 0)
    assert read_hints({name: [1]}).kv_answered[0].outcome is Outcome.REJECTED


def block(text: str, **control: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **({"cache_control": control} if control else {})}


def test_the_longest_time_of_anthropics_cache_control_counts() -> None:
    """Anthropic's ``cache_control`` may be in all places that Anthropic's documentation names:
    tools, system, messages, and the top level of the body."""
    short, long = {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}
    say = [{"role": "user", "content": [block("Hi", **short)]}]
    assert retained(sent(MESSAGES, messages=say)) == ("cache_control", 300.0, 0.0)
    for more in (
        {"system": [block("Be brief.", **long)]},
        {"tools": [{"name": "t", "input_schema": {}, "cache_control": long}]},
        {"cache_control": long},
    ):
        assert retained(sent(MESSAGES, messages=say, **more))[1] == 3600.0
        assert retained(sent(MESSAGES, **more, messages=say))[1] == 3600.0
    assert not sent(CHAT, messages=say).kv_hints, "on another path it means nothing"


def test_a_body_that_the_fast_parser_rejects_is_read_too() -> None:
    """Some clients cut texts in the middle of an emoji, and some send NaN. Hints in such bodies are
    read too, and the body's own parameters are kept."""
    cut = [block("\ud83d", type="ephemeral", ttl="1h")]
    assert retained(sent(MESSAGES, system=cut)) == ("cache_control", 3600.0, 0.0)
    assert retained(sent(MESSAGES, system=cut, temperature=float("nan")))[1] == 3600.0
    named = sent(MESSAGES, system=cut, kv_transfer_params={"job_id": "j"})
    assert (named.job_id, retained(named)[1]) == ("j", 3600.0)


def test_a_text_about_cache_control_is_none() -> None:
    said = json.dumps(block("x", type="ephemeral", ttl="1h"))
    for text in (
        said,
        json.dumps(said),
        '"cache_control"',
        "cache_control",
        '\\"cache_control": {',
    ):
        assert not sent(MESSAGES, messages=[{"role": "user", "content": text}]).kv_hints
        assert not sent(MESSAGES, messages=[block(text)]).kv_hints
    schema = {"properties": {"cache_control": {"type": "string"}}}
    assert not sent(MESSAGES, tools=[{"name": "t", "input_schema": schema}]).kv_hints


def test_an_invalid_time_is_rejected() -> None:
    for ttl in ("long", "x" * 999, [1], {"a": 1}, -1, True, None):
        control = {"type": "ephemeral", "ttl": ttl}
        found = sent(MESSAGES, system=[{"type": "text", "text": "x", "cache_control": control}])
        assert not found.kv_hints
        assert all(one.outcome is Outcome.REJECTED for one in found.kv_answered)


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_openais_retention_is_read_if_it_is_longer_than_the_default(path: str) -> None:
    asked = sent(path, prompt_cache_retention="24h")
    assert retained(asked) == ("prompt_cache_retention", 86_400.0, 0.0)
    for other in ("in_memory", "in-memory", None, 24, ["24h"], "x" * 999):
        assert sent(path, prompt_cache_retention=other) == TurnHints()


def test_dynamos_priority_and_time_are_one_hint() -> None:
    hints, control = {"priority": 3, "osl": 512}, {"type": "ephemeral", "ttl": "10m"}
    both = sent(CHAT, nvext={"agent_hints": hints, "cache_control": control})
    assert retained(both) == ("nvext.cache_control", 600.0, 0.75)
    assert retained(sent(CHAT, nvext={"agent_hints": hints})) == ("nvext.agent_hints", None, 0.75)
    assert retained(sent(CHAT, nvext={"cache_control": {}}))[1] == 300.0
    for nothing in ({"agent_hints": {"osl": 1}}, {"agent_hints": {"priority": 0}}, 3, {}):
        assert sent(CHAT, nvext=nothing) == TurnHints()


@pytest.mark.parametrize("as_text", [True, False])
def test_a_router_states_the_time_and_whether_it_expects_the_job_back(as_text: bool) -> None:
    """The test uses the agentic context of vLLM's router, as in its documentation."""
    said = {"program_id": "p", "priority": 10, "expected_resume": True}
    for name in ("kv_retention_ttl_seconds", "kv_retention_ttl"):
        context: Any = {**said, name: 5}
        context = json.dumps(context) if as_text else context
        found = sent(CHAT, vllm_xargs={"agentic_context": context})
        assert retained(found) == (name, 5.0, 0.0)
        assert (found.job_id, found.is_last_step) == ("p", False)
    last = read_hints({"agentic_context": {**said, "expected_resume": False}})
    assert last.is_last_step
    told = {"is_last_step": False, "agentic_context": {"expected_resume": False}}
    assert not read_hints(told).is_last_step, "what is said for us counts"


def test_the_longest_time_of_a_request_counts() -> None:
    found = sent(
        MESSAGES,
        system=[block("x", type="ephemeral")],
        prompt_cache_retention="24h",
        nvext={"agent_hints": {"priority": -1}},
        vllm_xargs={"agentic_context": {"program_id": "p", "kv_retention_ttl_seconds": 7}},
    )
    assert retained(found) == ("prompt_cache_retention", 86_400.0, -0.5)


def test_the_documentation_names_every_field() -> None:
    page = (Path(__file__).parents[3] / "docs" / "configuration.md").read_text()
    for name in (*FIELDS - {"client_hints"}, *Intent, "cache_control", "prompt_cache_retention"):
        assert re.search(rf"`[\w.]*{name}[:\w\" ]*`", page), name


# -- arbitrary input --------------------------------------------------------------

NAMES = [
    *("protocol_version", "message_id", "actions", "action_id", "action_type", "action_version"),
    *("payload", "job_id", "session_id", "agent_id", "number", "token_ids", "block_hashes", "ttl"),
    *("ttl_s", "priority", "progress", "total", "done", "expected_tool_s", "kv_hint", "kv_hints"),
    *("include_current_request", "client_hints", "agentic_context", "expected_resume", "nvext"),
    *("cache_control", "agent_hints", "prompt_cache_retention", "kv_retention_ttl_seconds"),
]


def deep(depth: int) -> Any:
    """Return a value that is nested more deeply than Python's recursion limit."""
    found: Any = "x"
    for at in range(depth):
        found = [found] if at % 2 else {"payload": found}
    return found


VALUES: list[Any] = [
    *LEAVES, *Intent, "kv.retain", "kv.fetch", "24h", "5m", "1e400", float("inf"), -(2**70),
    10**400, "9" * 5000, "[" * 5000, '{"actions": [{"action_type": "pin"}]}', "\ud800" * 40,
    "0.57", 0.5, 2, list(range(300)), [DIGEST] * 3, [2**64 - 1], ["ab" * 32], [[]] * 100,
    [None] * 200, set(), ..., deep(3000),
]  # fmt: skip


def anything(rng: random.Random, depth: int = 4) -> Any:
    """Return a random value that a client could send, mostly with field names that are read."""
    if not depth or rng.random() < 0.3:
        return rng.choice(VALUES)
    if rng.random() < 0.3:
        return [anything(rng, depth - 1) for _ in range(rng.randrange(1, 4))]
    return {rng.choice(NAMES): anything(rng, depth - 1) for _ in range(rng.randrange(1, 6))}


def plausible(rng: random.Random) -> Any:
    """Return an envelope with arbitrary values in its actions."""
    actions = [
        {**action(rng.choice(VALUES)), "payload": anything(rng, 2)}
        for _ in range(rng.choice([0, 1, 3, 70]))
    ]
    return envelope(*actions, version=rng.choice(VALUES))


def check(rng: random.Random) -> None:
    """Check one message in a request, in a call of the route, and in a body."""
    message = plausible(rng) if rng.random() < 0.5 else anything(rng)
    for engine in (None, 0):
        reader = read(message, engine)
        assert len(reader.found) <= MAX_ACTIONS + 1
        if isinstance(message, dict) and isinstance(message.get("actions"), list):
            assert len(reader.found) <= max(1, len(message["actions"]))
        for one in reader.found:
            assert len(one.action_id) <= MAX_ID_BYTES
            one.action_id.encode()
        for result in reader.answered:
            assert len(result.reason) < 300
            result.reason.encode()
        for hint in reader.hints:
            check_hint(hint)
        text = json.dumps(results_json(reader.answered, reader.hints), allow_nan=False)
        assert len(text) < 600 * len(reader.found) + 3
    params, xargs = anything(rng), anything(rng)
    assert read_hints(params, xargs, None, message) == read_hints(params, xargs, None, message)
    if rng.random() < 0.1:
        body = {name: rng.choice(VALUES) for name in rng.sample(NAMES, 8)}
        try:
            told = json.dumps({**body, "nvext": plausible(rng)}, default=str).encode()
        except RecursionError:
            told = b'{"nvext":' + b"[" * 9000 + b"]" * 9000 + b"}"
        assert carry(told, rng.choice(sorted(PATHS))).startswith(b"{")


def check_hint(hint: KvHint) -> None:
    target = hint.target
    given = (target.job, target.number, target.tokens or None, target.hashes or None)
    assert sum(one is not None for one in given) + target.own == 1
    assert all(8 <= len(one) <= 64 for one in target.hashes)
    assert -1 <= hint.priority <= 1
    assert hint.ttl_s is None or 0 < hint.ttl_s < float("inf")
    assert hint.expected_s is None or 0 <= hint.expected_s < float("inf")
    assert hint.progress is None or 0 <= hint.progress <= 1
    assert type(hint.done) is bool


@pytest.mark.scripts(40, nightly=1_000)
def test_arbitrary_messages_have_bounded_results_and_raise_nothing(seeds: range) -> None:
    """The test checks a hundred messages for each seed."""
    for seed in seeds:
        rng = random.Random(seed)
        for _ in range(100):
            check(rng)

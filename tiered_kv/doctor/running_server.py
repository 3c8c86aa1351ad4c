"""Checks of a running server through its ``/health`` and ``/metrics`` pages, which are fetched with
limits on time and size.
"""

from __future__ import annotations

import json
import math
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from http.client import HTTPException
from typing import Protocol
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tiered_kv.formatting import count
from tiered_kv.metric_families import PART_OF, PREFIX, event_of
from tiered_kv.metrics import COUNTERS
from tiered_kv.sizing.block_layout import advise_block_size
from tiered_kv.vllm_versions import SPECULATED_STATES

from .cold_memory import check_cold_pages
from .finding import Finding, fail, ok, warn

MAX_BYTES = 32 << 20
CONNECT_S, WHOLE_S = 5.0, 15.0
"""Timeouts for one network operation, and for a whole page, seconds."""


class UnreachableError(Exception):
    """A page could not be fetched. The message gives the reason."""


class RefusedError(UnreachableError):
    """The server answered a request with an error status.

    Attributes:
        status: HTTP status.
        said: text of the response; empty if it has none.
    """

    def __init__(self, status: int, reason: str, said: str) -> None:
        super().__init__(f"{status} {reason}")
        self.status = status
        self.said = said


class Body(Protocol):
    """The body of a response."""

    def read1(self, n: int, /) -> bytes:
        """Read available bytes, at most ``n``. Returns no bytes at the end."""
        ...


def base_of(url: str) -> str:
    """Return the address of a server without the path that users may have pasted with it.

    Raises:
        UnreachableError: the text is not an HTTP address.
    """
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
    except ValueError as error:
        raise UnreachableError(f"the text is not an address: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UnreachableError("the address is not an HTTP address")
    return f"{parts.scheme}://{parts.netloc}"


def fetch(
    url: str, whole_s: float = WHOLE_S, token: str | None = None, post: bytes | None = None
) -> str:
    """Fetch a page, and return its text.

    Args:
        whole_s: timeout for the whole page, seconds.
        token: admin token or API key. It is sent to this server, but not to servers to which this
            server redirects.
        post: JSON to post. The server may use the whole time to answer.

    Raises:
        RefusedError: the server answers with an error status, such as 404.
        UnreachableError: the server cannot be reached, or the page is too long or takes too long.
    """
    until = time.monotonic() + whole_s
    try:
        request = urllib.request.Request(url, post)
        if token is not None:  # re-encoded, because http.client writes ISO 8859-1
            bearer = f"Bearer {token}".encode("utf-8", "surrogateescape").decode("latin-1")
            request.add_unredirected_header("Authorization", bearer)
        if post is not None:
            request.add_header("Content-Type", "application/json")
        silent_s = whole_s if post is not None else min(CONNECT_S, whole_s)
        with urllib.request.urlopen(request, timeout=silent_s) as answer:
            return _read(answer, until, whole_s)
    except urllib.error.HTTPError as error:
        with error:
            raise RefusedError(error.code, error.reason, _said(error, until, whole_s)) from error
    except urllib.error.URLError as error:
        raise UnreachableError(str(error.reason)) from error
    except (OSError, HTTPException, ValueError) as error:
        raise UnreachableError(str(error) or type(error).__name__) from error


def _read(answer: Body, until: float, whole_s: float) -> str:
    pieces, length = [], 0
    while piece := answer.read1(1 << 16):
        pieces.append(piece)
        length += len(piece)
        if length > MAX_BYTES:
            raise UnreachableError(f"the answer is larger than {MAX_BYTES >> 20} MiB")
        if time.monotonic() > until:
            raise UnreachableError(f"the answer was incomplete after {whole_s:g} s")
    return b"".join(pieces).decode("utf-8", "replace")


def _said(error: urllib.error.HTTPError, until: float, whole_s: float) -> str:
    """Return the text of a refusal, or an empty text if it cannot be read."""
    try:
        return _read(error, until, whole_s)
    except (UnreachableError, OSError, HTTPException, ValueError):
        return ""


def totals(page: str) -> Mapping[str, float]:
    """Return the sum of each metric over its labels, by name. Unreadable lines are left out.

    Raises:
        UnreachableError: the page is not a Prometheus page.
    """
    found: dict[str, float] = defaultdict(float)
    for sample in _samples(page):
        found[sample.name] += sample.value
    return found


def events(page: str) -> Mapping[str, float]:
    """Return the connector's counters and gauges that the page contains, by event name, summed over
    engines. Unreadable lines are left out.

    Raises:
        UnreachableError: the page is not a Prometheus page.
    """
    found: dict[str, float] = defaultdict(float)
    for sample in _samples(page):
        event = event_of(sample.name, sample.labels)
        if event is not None:
            found[event] += sample.value
    for part, whole in PART_OF.items():
        if part in found:
            found[whole] += found[part]
    return dict(found)


def labels(page: str, name: str) -> list[Mapping[str, str]]:
    """Return the labels of each sample of a metric. Unreadable lines are left out.

    Raises:
        UnreachableError: the page is not a Prometheus page.
    """
    return [sample.labels for sample in _samples(page) if sample.name == name]


def unreadable_lines(page: str) -> list[str]:
    """Return the lines of a metrics page that cannot be parsed."""
    if _parsed(page) is not None:
        return []
    return [line for line in page.split("\n") if _parsed(line) is None]


def _samples(page: str) -> list[Sample]:
    """Return the samples of a page that have a finite value. Lines that cannot be parsed are left
    out. Raises UnreachableError if no line can be parsed as a metric."""
    found = _parsed(page)
    if found is None:
        by_line = map(_parsed, page.split("\n"))
        found = [sample for samples in by_line if samples is not None for sample in samples]
        if not found:
            raise UnreachableError("the answer is not a Prometheus page: no line contains a metric")
    return [sample for sample in found if math.isfinite(sample.value)]


def _parsed(page: str) -> list[Sample] | None:
    try:
        families = text_string_to_metric_families(page)
        return [sample for family in families for sample in family.samples]
    except (ValueError, KeyError, IndexError):
        return None


REQUESTS = "vllm:request_success_total"
"""Metric with the number of requests that vLLM has answered."""
CACHE_CONFIG = "vllm:cache_config_info"
"""Metric whose labels are vLLM's cache settings."""
DRAFTS = "vllm:spec_decode_num_drafts_total"
"""Metric that exists only on servers with speculative decoding."""

FAILURES: Mapping[str, str] = {
    "save_failures": "See the server's log for the failed copies.",
    "restore_failures": "See the server's log for the failed copies.",
    "compression_failures": "See the server's log. TIERED_KV_CODEC=raw turns compression off.",
    "demotion_failures": "Check the disk: run tiered-kv doctor on the server's machine.",
    "promotion_failures": "Check the disk: tiered-kv store verify checks every page.",
    "ssd_pages_bad": "Check the disk: tiered-kv store verify checks every page.",
    "ssd_segments_bad": "Check the disk: tiered-kv store verify checks every page.",
    "ssd_errors": "Check the disk and the kernel's log.",
    "ssd_pages_refused": "The disk was full or failed: check the disk, or lower TIERED_KV_SSD_GIB.",
    "share_failures": "See the server's log: the remote store is full, down or slow.",
    "fetch_failures": "The remote store evicts pages too early: give it more memory.",
    "remote_pages_bad": "Another program writes to the remote store, or its link corrupts data.",
    "remote_calls_failed": "See the server's log: the remote store is down or slow.",
    "remote_pages_refused": "See the server's log: the remote store is full or refuses writes.",
    "remote_errors": "See the server's log, which contains each error once, and report the error.",
    "hook_errors": "See the server's log, which contains each error once, and report the error.",
    "watchdog_barks": "See the server's log, and report the error.",
    "tool_read_errors": "See the server's log, and report the error.",
    "trace_dropped": "Put TIERED_KV_TRACE on a faster disk, or unset it.",
    "hints_ignored": (
        "Clients send invalid values in kv_transfer_params: docs/configuration.md lists the fields."
    ),
}
"""Counters that should stay at 0, and the advice for each counter that does not."""


def check_server(url: str) -> Iterator[Finding]:
    """Check that the server at this address is up, and check its metrics. Yields the findings."""
    try:
        base = base_of(url)
        fetch(f"{base}/health")
    except UnreachableError as error:
        advice = "Start the server, or use the address that its clients use: http://HOST:8000."
        yield fail("server", f"{url}: {error}", advice)
        return
    yield ok("server", f"{base} is up")
    try:
        page = fetch(f"{base}/metrics")
        found = {**totals(page), **events(page)}
    except UnreachableError as error:
        advice = (
            "Use the address of the server itself, not of a router: vLLM serves its metrics there."
        )
        yield fail("metrics", f"{base}/metrics: {error}", advice)
        return
    if bad := unreadable_lines(page):
        seen = f"{count(len(bad), 'unreadable line')} ignored; the first is {bad[0]!a:.60}"
        yield warn("metrics", seen, "Check proxies in front of the server, or report the line.")
    caches = labels(page, CACHE_CONFIG)
    if DRAFTS in found:
        yield from check_speculation(caches)
    if any(name.startswith(PREFIX) for name in found):
        yield from check_block_size(caches, _max_len(base))
    yield from check_metrics(found)
    if _count(found, "turns"):
        yield check_ids(found, has_routes=_has_routes(base))


def _has_routes(base: str) -> bool:
    """Return False if the server lacks the routes of the plugin, which also adds the middleware."""
    try:
        fetch(f"{base}/tiered_kv/status")
    except RefusedError as error:
        return error.status != 404
    except UnreachableError:
        pass
    return True


def check_ids(found: Mapping[str, float], *, has_routes: bool) -> Finding:
    """Check whether the ids that clients send are read. The headers that clients send are visible
    neither to the engine nor to this check.

    Args:
        found: sums of the server's metrics by name, and of the connector's counters by event.
        has_routes: True if the plugin is enabled.
    """
    unnamed, carried = _count(found, "turns_unnamed"), _count(found, "ids_carried")
    seen = f"{unnamed:,.0f} requests named no job"
    if unnamed and not carried and not has_routes:
        seen += ", and nothing reads ids in client headers and body fields"
        advice = (
            "If clients name their sessions, as Claude Code, Codex and OpenCode do, start the "
            "server with VLLM_PLUGINS=tiered_kv. Otherwise nothing needs to change."
        )
        return warn("ids", seen, advice)
    return ok("ids", f"{seen}; the middleware read the ids of {carried:,.0f} requests")


def check_speculation(caches: Iterable[Mapping[str, str]]) -> Iterator[Finding]:
    """Check whether a server with speculative decoding is affected by a defect of vLLM itself. With
    prefix caching of states (Mamba, linear attention), the output can be wrong, with or without the
    connector. Yields a warning if the server is affected.

    Args:
        caches: vLLM's cache settings, for each engine.
    """
    modes = {
        mode
        for cache in caches
        if cache.get("enable_prefix_caching") == "True"
        and (mode := cache.get("mamba_cache_mode", "none")) != "none"
    }
    if modes:
        seen = f"on, with prefix caching of states (mamba_cache_mode={', '.join(sorted(modes))})"
        yield warn("speculation", seen, SPECULATED_STATES)


def check_block_size(caches: Iterable[Mapping[str, str]], max_len: int) -> Iterator[Finding]:
    """Check whether longer blocks would suit the server's contexts better. Yields a warning if so.

    Args:
        caches: vLLM's cache settings, for each engine.
        max_len: maximum context length, tokens; 0 if unknown.
    """
    blocks = {
        int(said)
        for cache in caches
        if (said := cache.get("block_size", "")).isdecimal()
        and cache.get("sliding_window", "None") == "None"
    }
    for block in sorted(blocks)[:1]:
        advice = advise_block_size(block, max_len)
        if advice is not None:
            seen = f"{block} tokens, in contexts of up to {max_len:,}"
            yield warn("block size", seen, advice)


def _max_len(base: str) -> int:
    """Return the maximum context length of a server, tokens; 0 if the server does not report it."""
    try:
        models = json.loads(fetch(f"{base}/v1/models"))["data"]
        return max(int(one["max_model_len"] or 0) for one in models)  # adapters report None
    except (UnreachableError, RecursionError, ValueError, LookupError, TypeError):
        return 0  # for example, the server asks for an API key


def check_metrics(found: Mapping[str, float]) -> Iterator[Finding]:
    """Check the counters of a server. Yields the findings.

    Args:
        found: sums of the server's metrics by name, and of the connector's counters by event.
    """
    if not any(name.startswith(PREFIX) for name in found):
        if any(name.startswith("vllm:") for name in found):
            advice = "Start vLLM with --kv-transfer-config: tiered-kv plan prints the flags."
            yield fail("connector", "vLLM runs without the connector", advice)
        else:
            yield fail(
                "connector", "the page has no vLLM metrics", "Use the address of a vLLM server."
            )
        return
    yield from _mode(found)
    yield _work(found)
    yield _tiers(found)
    if _count(found, "cpu_slots"):
        yield check_cold_pages(found)
    counts = {name: _count(found, name) for name in FAILURES if name in COUNTERS}
    for name, failed in counts.items():
        if failed:
            seen = f"{failed:,.0f}: {COUNTERS[name][:1].lower()}{COUNTERS[name][1:]}"
            yield warn(name, seen, FAILURES[name])
    if not any(counts.values()):
        yield ok("failures", f"none in {len(counts)} counters")


def _mode(found: Mapping[str, float]) -> Iterator[Finding]:
    """Yield a finding if the server is in observe mode."""
    would = found.get(f"{PREFIX}would_have_saved_tokens_total")  # exists only in observe mode
    if would is not None:
        words = f"observe: the prefill of {would:,.0f} prompt tokens would have been saved"
        yield ok("TIERED_KV_MODE", f"{words}; no KV is moved")


def _work(found: Mapping[str, float]) -> Finding:
    """Check that the connector receives turns, and report which tiers their prompts came from."""
    turns, requests = _count(found, "turns"), found.get(REQUESTS, 0.0)
    if not turns:
        if requests:
            advice = "See the server's log: after a hook fails, vLLM runs without the connector."
            return fail("connector", f"no turns, but {requests:,.0f} answered requests", advice)
        return ok("connector", "loaded; no request has been answered yet")
    parts = {name: _count(found, f"prompt_tokens_{name}") for name in ("vram", "cpu", "recomputed")}
    whole = sum(parts.values()) or 1.0
    words = (
        f"{count(round(turns), 'turn')}; of their prompt tokens "
        f"{parts['vram'] / whole:.0%} were in VRAM, "
        f"{parts['cpu'] / whole:.0%} came from CPU memory and lower tiers, "
        f"{parts['recomputed'] / whole:.0%} were prefilled"
    )
    if _count(found, "cpu_slots") and not _count(found, "pages_saved"):
        advice = "See the server's log. Turns shorter than a block have no KV to save."
        return warn("connector", f"{words}; no pages were saved", advice)
    return ok("connector", words)


def _tiers(found: Mapping[str, float]) -> Finding:
    slots = _count(found, "cpu_slots")
    pages, below = (_count(found, name) for name in ("cpu_pages", "ssd_pages"))
    if not slots:
        advice = "Set TIERED_KV_CPU_GIB above 0, unless KV should only be pinned in VRAM."
        return warn("tiers", "CPU memory is off", advice)
    words = f"{pages:,.0f} pages in {slots:,.0f} slots of CPU memory, {below:,.0f} on SSD"
    return ok("tiers", words)


def _count(found: Mapping[str, float], name: str) -> float:
    return found.get(name, 0.0)

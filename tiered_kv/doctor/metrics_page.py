"""Pages of a running server, fetched with a limit on time and size."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Mapping
from http.client import HTTPException
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tiered_kv.metric_families import PART_OF, event_of

MAX_BYTES = 32 << 20
CONNECT_S, WHOLE_S = 5.0, 15.0
"""Seconds for one answer of the network, and for a whole page."""


class UnreachableError(Exception):
    """A page that does not come; the message says why."""


def base_of(url: str) -> str:
    """Address of a server, without what people paste behind it.

    Raises:
        UnreachableError: it is no address of HTTP.
    """
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
    except ValueError as error:
        raise UnreachableError(f"no address: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UnreachableError("no address of HTTP")
    return f"{parts.scheme}://{parts.netloc}"


def fetch(url: str, whole_s: float = WHOLE_S) -> str:
    """Fetch a page.

    Raises:
        UnreachableError: it is not there, too long, or takes too long.
    """
    until = time.monotonic() + whole_s
    pieces, length = [], 0
    try:
        with urllib.request.urlopen(url, timeout=min(CONNECT_S, whole_s)) as answer:
            while piece := answer.read1(1 << 16):
                pieces.append(piece)
                length += len(piece)
                if length > MAX_BYTES:
                    raise UnreachableError(f"more than {MAX_BYTES >> 20} MiB")
                if time.monotonic() > until:
                    raise UnreachableError(f"not whole after {whole_s:g} s")
    except urllib.error.HTTPError as error:
        raise UnreachableError(f"{error.code} {error.reason}") from error
    except urllib.error.URLError as error:
        raise UnreachableError(str(error.reason)) from error
    except (OSError, HTTPException, ValueError) as error:
        raise UnreachableError(str(error) or type(error).__name__) from error
    return b"".join(pieces).decode("utf-8", "replace")


def totals(page: str) -> Mapping[str, float]:
    """Sum of each metric over its labels, by name.

    Raises:
        UnreachableError: the page is none of Prometheus's.
    """
    found: dict[str, float] = defaultdict(float)
    for sample in _samples(page):
        found[sample.name] += sample.value
    return found


def events(page: str) -> Mapping[str, float]:
    """Counters and gauges of the connector by the names of events, summed over engines: all that
    the page has.

    Raises:
        UnreachableError: the page is none of Prometheus's.
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


def _samples(page: str) -> list[Sample]:
    try:
        families = text_string_to_metric_families(page)
        return [sample for family in families for sample in family.samples]
    except (ValueError, KeyError, IndexError) as error:
        raise UnreachableError(f"no page of Prometheus: {error}") from error

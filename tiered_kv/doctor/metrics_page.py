"""Pages of a running server, fetched with a limit on time and size."""

from __future__ import annotations

import math
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Mapping
from http.client import HTTPException
from typing import Protocol
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tiered_kv.metric_families import PART_OF, event_of

MAX_BYTES = 32 << 20
CONNECT_S, WHOLE_S = 5.0, 15.0
"""Seconds for one answer of the network, and for a whole page."""


class UnreachableError(Exception):
    """A page that does not come; the message says why."""


class RefusedError(UnreachableError):
    """A page that the server does not give.

    Attributes:
        status: status of HTTP.
        said: text of the answer; empty if there was none.
    """

    def __init__(self, status: int, reason: str, said: str) -> None:
        super().__init__(f"{status} {reason}")
        self.status = status
        self.said = said


class Body(Protocol):
    """The body of an answer."""

    def read1(self, n: int, /) -> bytes:
        """Read what is there, so many bytes at most; nothing at the end."""
        ...


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


def fetch(
    url: str, whole_s: float = WHOLE_S, token: str | None = None, post: bytes | None = None
) -> str:
    """Fetch a page.

    Args:
        token: sent to this server, and to none that it sends on to.
        post: JSON to post. The server may take all the time to answer.

    Raises:
        RefusedError: the server refuses it.
        UnreachableError: it is not there, too long, or takes too long.
    """
    until = time.monotonic() + whole_s
    try:
        request = urllib.request.Request(url, post)
        if token is not None:  # its bytes, since http.client writes ISO 8859-1
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
            raise UnreachableError(f"more than {MAX_BYTES >> 20} MiB")
        if time.monotonic() > until:
            raise UnreachableError(f"not whole after {whole_s:g} s")
    return b"".join(pieces).decode("utf-8", "replace")


def _said(error: urllib.error.HTTPError, until: float, whole_s: float) -> str:
    """Text of a refusal, as far as it comes."""
    try:
        return _read(error, until, whole_s)
    except (UnreachableError, OSError, HTTPException, ValueError):
        return ""


def totals(page: str) -> Mapping[str, float]:
    """Sum of each metric over its labels, by name. Lines that cannot be read are left out.

    Raises:
        UnreachableError: the page is none of Prometheus's.
    """
    found: dict[str, float] = defaultdict(float)
    for sample in _samples(page):
        found[sample.name] += sample.value
    return found


def events(page: str) -> Mapping[str, float]:
    """Counters and gauges of the connector by the names of events, summed over engines: all that
    the page has. Lines that cannot be read are left out.

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


def labels(page: str, name: str) -> list[Mapping[str, str]]:
    """Return the labels of each sample of a metric. Lines that cannot be read are left out.

    Raises:
        UnreachableError: the page is none of Prometheus's.
    """
    return [sample.labels for sample in _samples(page) if sample.name == name]


def unreadable_lines(page: str) -> list[str]:
    """Lines of a page of metrics that cannot be read."""
    return (
        [] if _parsed(page) is not None else [line for line in _lines(page) if not _is_line(line)]
    )


def _samples(page: str) -> list[Sample]:
    """The samples of a page that have a number."""
    found = _parsed(page)
    if found is None:
        found = _parsed("\n".join(filter(_is_line, _lines(page))))
        if not found:
            raise UnreachableError("no page of Prometheus: no line of it has a metric")
    return [sample for sample in found if math.isfinite(sample.value)]


def _parsed(page: str) -> list[Sample] | None:
    try:
        families = text_string_to_metric_families(page)
        return [sample for family in families for sample in family.samples]
    except (ValueError, KeyError, IndexError):
        return None


def _lines(page: str) -> list[str]:
    return page.split("\n")


def _is_line(line: str) -> bool:
    return _parsed(line) is not None

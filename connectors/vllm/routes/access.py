"""Access control of the routes: with a token, or without one from the server's own machine.

Without a token the server must listen on loopback or on a Unix socket. Web pages in a browser on
that machine, and proxies that forward requests from elsewhere, can reach loopback too. Their
requests are recognized by their headers.

The module also parses the query strings of the routes, which are untrusted, and defines refusals:
responses with an error status and a message.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tiered_kv.config import ADMIN_TOKEN
from tiered_kv.status import Cursor

NO_JOB = "There is no job with this id: it has finished, was forgotten, or never existed."


class Refusal(Exception):
    """Refusal of a request.

    Attributes:
        status: HTTP status.
        sentence: message that says what is wrong and what to do. It quotes nothing from the
            request.
    """

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status
        self.sentence = sentence


PASSED_ON = (
    "origin",
    "referer",
    "forwarded",
    "x-forwarded-for",
    "x-forwarded-host",
    "x-forwarded-proto",
    "x-real-ip",
    "via",
)
"""Headers that only web pages and proxies send."""

FETCH_SITE, TYPED = "sec-fetch-site", "none"
"""Header in which a browser reports the cause of a request, also for an ``<img>`` or a link, which
send no ``Origin``; and its value for an address that the user typed."""

_BLANK = " \t"
"""Optional whitespace around a header value (RFC 9110). ``str.strip()`` would also remove the bytes
85 and A0, which may end a UTF-8 character."""


@dataclass(frozen=True, slots=True)
class Access:
    """The access rule of a server.

    Attributes:
        token: the token; None if there is none.
        on_loopback: True if the server listens only on loopback or on a Unix socket.
    """

    token: str | None = field(repr=False)
    on_loopback: bool

    @classmethod
    def of(cls, env: Mapping[str, str], args: Any) -> Access:
        """Create the rule for the API server's arguments.

        An empty token counts as none. Whitespace around a token is removed, because a header cannot
        carry it. A token of whitespace alone is kept, so that no request has access.
        """
        local = bool(getattr(args, "uds", None)) or is_loopback(getattr(args, "host", None) or "")
        token = env.get(ADMIN_TOKEN) or None
        return cls(token and (token.strip(f"{_BLANK}\r\n") or token), local)

    def check(self, headers: Mapping[str, str]) -> None:
        """Check that a request has access.

        Args:
            headers: the request's headers by lower-case name, decoded as ISO 8859-1.

        Raises:
            Refusal: the request has no access.
        """
        if self.token is not None:
            kind, _, given = headers.get("authorization", "").partition(" ")
            # Bytes are compared, because the environment represents bytes that are not UTF-8 as
            # surrogates.
            token = self.token.encode("utf-8", "surrogateescape")
            right = hmac.compare_digest(given.strip(_BLANK).encode("latin-1"), token)
            if kind.lower() != "bearer" or not right:
                raise Refusal(
                    401,
                    f"These routes need the server's {ADMIN_TOKEN}: send it as Authorization: "
                    "Bearer TOKEN.",
                )
            return
        if not self.on_loopback:
            raise Refusal(
                403,
                "These routes are off, because the server accepts connections from other machines: "
                f"set {ADMIN_TOKEN} for the server and send it, or serve with --host 127.0.0.1.",
            )
        if _is_passed_on(headers) or not is_loopback(_host(headers)):
            raise Refusal(
                403,
                "Without a token these routes answer only programs on this machine, not web "
                f"pages or proxies: set {ADMIN_TOKEN} for the server and send it.",
            )


def is_loopback(host: str) -> bool:
    """True for localhost and for addresses of the loopback interface."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _is_passed_on(headers: Mapping[str, str]) -> bool:
    """True if a web page or a proxy sent the request."""
    from_page = headers.get(FETCH_SITE, TYPED) != TYPED
    return from_page or any(name in headers for name in PASSED_ON)


def _host(headers: Mapping[str, str]) -> str:
    """Return the host that a request names, without its port; localhost if it names none, which
    never happens with browsers.

    A name other than localhost may belong to an attacker who makes it resolve to loopback.
    """
    host = headers.get("host", "")
    if host.startswith("["):
        address, _, behind = host.partition("]")
        return address if not behind or behind.startswith(":") else host
    return host.partition(":")[0] or "localhost"


DEFAULT_LIMIT = 100
"""Default number of jobs in a page."""
MOST_LIMIT = 1000
"""Maximum number of jobs in a page."""

_LIMIT = re.compile(r"[0-9]{1,4}")


@dataclass(frozen=True, slots=True)
class Page:
    """Query for a page of the list of jobs: at most ``limit`` jobs that follow ``after``."""

    limit: int = DEFAULT_LIMIT
    after: Cursor = field(default_factory=Cursor)


def read_page(query: Mapping[str, str]) -> Page:
    """Read the page parameters of a query.

    Raises:
        Refusal: a parameter is invalid.
    """
    read_nothing({name: "" for name in query if name not in ("limit", "after")})
    limit = query.get("limit", str(DEFAULT_LIMIT))
    if not _LIMIT.fullmatch(limit) or not 1 <= int(limit) <= MOST_LIMIT:
        raise Refusal(400, f"limit must be a number of jobs from 1 to {MOST_LIMIT}.")
    try:
        return Page(int(limit), Cursor.from_json(query.get("after", "0.0")))
    except ValueError:
        wrong = "after must be the value of next in the previous page, such as 0.57."
        raise Refusal(400, wrong) from None


def read_nothing(query: Mapping[str, str]) -> None:
    """Check that a query is empty.

    Raises:
        Refusal: the query is not empty.
    """
    if query:
        raise Refusal(400, "The query has an unknown parameter: remove it.")

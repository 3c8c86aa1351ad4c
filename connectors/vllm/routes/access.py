"""Access to the routes: with a token, or by whoever is on the machine of a server that nobody else
can reach.

Without a token a server must listen on loopback. Web pages in a browser on that machine, and
proxies that pass on what comes from elsewhere, reach it as well, and are told by their headers.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tiered_kv.config import ADMIN_TOKEN

from .refusals import Refusal

PASSED_ON = ("origin", "forwarded", "x-forwarded-for", "x-real-ip", "via")
"""Headers of web pages and proxies."""


@dataclass(frozen=True, slots=True)
class Access:
    """The rule of a server.

    Attributes:
        token: the token; None if there is none.
        on_loopback: True if the server listens on loopback or on a Unix socket alone.
    """

    token: str | None = field(repr=False)
    on_loopback: bool

    @classmethod
    def of(cls, env: Mapping[str, str], args: Any) -> Access:
        """The rule for the API server's arguments. An empty token is none."""
        local = bool(getattr(args, "uds", None)) or is_loopback(getattr(args, "host", None) or "")
        return cls(env.get(ADMIN_TOKEN) or None, local)

    def check(self, headers: Mapping[str, str]) -> None:
        """Let a request pass.

        Args:
            headers: its headers, by name in any case, as ISO 8859-1.

        Raises:
            Refusal: it may not ask.
        """
        if self.token is not None:
            kind, _, given = headers.get("authorization", "").partition(" ")
            right = hmac.compare_digest(given.strip().encode("latin-1"), self.token.encode())
            if kind.lower() != "bearer" or not right:
                raise Refusal(
                    401,
                    f"These routes need the token of the server's {ADMIN_TOKEN}: send it as "
                    "Authorization: Bearer TOKEN.",
                )
            return
        if not self.on_loopback:
            raise Refusal(
                403,
                "These routes are off, since this server listens beyond its own machine: set "
                f"{ADMIN_TOKEN} for it and send that, or serve on --host 127.0.0.1.",
            )
        if any(name in headers for name in PASSED_ON) or not is_loopback(_host(headers)):
            raise Refusal(
                403,
                "Without a token these routes answer programs on this machine alone, not web pages "
                f"or proxies: set {ADMIN_TOKEN} for the server and send that.",
            )


def is_loopback(host: str) -> bool:
    """True for localhost and for addresses of the loopback interface."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _host(headers: Mapping[str, str]) -> str:
    """Host that a request asks, without its port. Names other than localhost may be anybody's, who
    has them lead to loopback. Without a name no browser asks."""
    host = headers.get("host", "")
    if host.startswith("["):
        return host.partition("]")[0]
    return host.partition(":")[0] or "localhost"

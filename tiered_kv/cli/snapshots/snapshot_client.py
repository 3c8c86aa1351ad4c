"""The client of a server's routes for snapshots."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tiered_kv.top.route_client import RouteClient, RouteError, other_version, parse

Object = Mapping[str, Any]

DEFAULT_TIMEOUT_S, MOST_TIMEOUT_S = 60.0, 3600.0
"""Wait for the end of an operation unless told otherwise, and the longest, seconds."""
SLACK_S = 120.0
"""Time that the server may take beyond that, seconds: its engine may be busy for a while."""


class SnapshotClient:
    """The routes of one server.

    Args:
        url: its address, as people paste it.
        token: the token of its operator; None if there is none.

    Raises:
        RouteError: the address or the token cannot be one.
    """

    def __init__(self, url: str, token: str | None) -> None:
        self._routes = RouteClient(url, token)

    def folder(self) -> Path:
        """Ask where the server has its snapshots, on its own machine.

        Raises:
            RouteError: there is no answer.
        """
        folder = _object(self._routes.get("snapshots")).get("folder")
        if not isinstance(folder, str) or not folder.startswith("/"):
            raise other_version("folder is no path")
        return Path(folder)

    def ask(self, path: str, timeout_s: float, **fields: Any) -> Object:
        """Request an operation; returns the server's answer.

        Args:
            path: its route, after ``/tiered_kv/``.
            timeout_s: longest wait for its end, seconds.
            fields: further fields of the request; those that are None are left out.

        Raises:
            RouteError: it was not done, as far as is known.
        """
        given = {name: value for name, value in fields.items() if value is not None}
        body = {**given, "timeout_s": timeout_s}
        return _object(self._routes.post(path, body, timeout_s + SLACK_S))


def is_over(error: RouteError) -> bool:
    """True if the server has said that what it was asked for failed or is refused, so that it
    needs nothing any more."""
    return error.status is not None and error.status not in (500, 503, 504)


def _object(text: str) -> Object:
    found = parse(text)
    if not isinstance(found, dict):
        raise other_version("it is no object")
    return found

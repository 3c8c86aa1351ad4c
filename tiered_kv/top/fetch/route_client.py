"""The client of a server's routes. Each failure is a sentence that says what to do."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Mapping
from typing import Any

from tiered_kv.config import ADMIN_TOKEN
from tiered_kv.doctor.running_server import RefusedError, UnreachableError, base_of, fetch

from .answers import (
    AnswerError,
    Cursor,
    JobPage,
    Status,
    harmless,
    is_of_vllm,
    read_jobs,
    read_refusal,
    read_status,
)

PATIENCE_S = 10.0
"""Longest wait for an answer, seconds."""
PAGE = 1_000
"""Jobs that are asked for at once: the most that a server tells."""

NO_ROUTES = (
    "The server has no /tiered_kv routes: start it with VLLM_PLUGINS=tiered_kv and vLLM's Python "
    "front end, and give the address of the server itself."
)
NO_TOKEN = f"The server wants a token: give its {ADMIN_TOKEN} with --token or in the environment."
WRONG_TOKEN = f"The server refuses the token: give what {ADMIN_TOKEN} is set to there."
CLOSED = f"The server answers others only: set {ADMIN_TOKEN} for it, and give that with --token."
NO_ENGINE = (
    "There is no engine with the connector behind the server: start it with --kv-transfer-config, "
    "as tiered-kv plan writes it."
)
ODD_TOKEN = "The token has a line break or another control character: give it as it is set."


class RouteError(Exception):
    """A route that does not answer. The message is one sentence for people.

    Attributes:
        status: status of HTTP; None if there was no answer of this form.
    """

    def __init__(self, sentence: str, status: int | None = None) -> None:
        super().__init__(sentence)
        self.status = status


class RouteClient:
    """The routes of one server.

    Args:
        url: its address, as people paste it.
        token: the token of its operator; None if there is none.

    Attributes:
        base: the server's address.

    Raises:
        RouteError: the address or the token cannot be one.
    """

    def __init__(self, url: str, token: str | None) -> None:
        try:
            self.base = base_of(url)
        except UnreachableError as error:
            raise RouteError(
                f"{harmless(url)}: {harmless(str(error))}. Give it as http://HOST:8000."
            ) from error
        token = token.strip(" \t\r\n") if token is not None else None  # as the server does
        if token is not None and any(unicodedata.category(char) == "Cc" for char in token):
            raise RouteError(ODD_TOKEN)  # here, as later it would be shown
        self._token = token or None

    def status(self) -> Status:
        """Ask for the status of all engines.

        Raises:
            RouteError: there is no answer.
        """
        try:
            return read_status(self.get("status"))
        except AnswerError as error:
            raise other_version(error) from error

    def jobs(self, after: Cursor) -> JobPage:
        """Ask for a page of jobs, after one that was listed.

        Raises:
            RouteError: there is no answer.
        """
        try:
            return read_jobs(self.get(f"jobs?limit={PAGE}&after={after}"))
        except AnswerError as error:
            raise other_version(error) from error

    def get(self, path: str) -> str:
        """Ask a route.

        Args:
            path: what follows ``/tiered_kv/``.

        Raises:
            RouteError: there is no answer.
        """
        return self._ask(path, PATIENCE_S)

    def post(self, path: str, body: Mapping[str, Any], patience_s: float) -> str:
        """Post JSON to a route, and wait so long for its answer.

        Raises:
            RouteError: there is no answer.
        """
        return self._ask(path, patience_s, json.dumps(body).encode())

    def _ask(self, path: str, patience_s: float, post: bytes | None = None) -> str:
        try:
            return fetch(f"{self.base}/tiered_kv/{path}", patience_s, self._token, post)
        except RefusedError as error:
            raise RouteError(self._sentence(error), error.status) from error
        except UnreachableError as error:
            raise RouteError(
                f"{harmless(self.base)} does not answer ({harmless(str(error))}): is the server "
                "up, and is this its address?"
            ) from error

    def _sentence(self, error: RefusedError) -> str:
        match error.status:
            case 401:
                return NO_TOKEN if self._token is None else WRONG_TOKEN
            case 403:
                return read_refusal(error.said) or CLOSED
            case 404:
                ours = "" if is_of_vllm(error.said) else read_refusal(error.said)
                return ours or NO_ROUTES
            case 501:
                return read_refusal(error.said) or NO_ENGINE
        said = read_refusal(error.said)
        return said or f"The server answered {error.status}: see its log, and ask again."


def other_version(error: AnswerError) -> RouteError:
    """The error for an answer that cannot be read."""
    return RouteError(
        f"The answer has a form that is not known here ({harmless(str(error))}): use the "
        "tiered-kv of the version that the server has."
    )

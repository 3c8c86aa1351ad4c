"""Client of a server's HTTP routes. Each error message is a sentence that tells the user what to
do."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from tiered_kv.config import ADMIN_TOKEN
from tiered_kv.doctor.running_server import RefusedError, UnreachableError, base_of, fetch
from tiered_kv.json_fields import JsonObject
from tiered_kv.status import Cursor, JobPage, ServerStatus

from .safe_text import MOST_CHARS, harmless, harmless_json

Read = TypeVar("Read", bound=JsonObject)

PATIENCE_S = 10.0
"""Maximum wait for the response to a query, seconds."""
SLACK_S = 120.0
"""Time that the server may take beyond the timeout of an operation, seconds, because its engine can
be busy."""
PAGE = 1_000
"""Number of jobs requested per call. It is the maximum that a server returns."""

MOST_OF_SENTENCE = 4_000
"""Maximum length of an error message from the server, characters. A message can list all
requirements of a snapshot."""

NO_ROUTES = (
    "The server has no /tiered_kv routes: start it with VLLM_PLUGINS=tiered_kv and vLLM's "
    "Python front end, and use the address of the server itself."
)
NO_TOKEN = (
    f"The server requires a token: pass its {ADMIN_TOKEN} with --token or in the environment."
)
WRONG_TOKEN = f"The server refuses the token: pass the value of {ADMIN_TOKEN} on the server."
CLOSED = (
    f"The server refuses this client: set {ADMIN_TOKEN} on the server, and pass it with --token."
)
NO_ENGINE = (
    "The server has no engine with the connector: start it with the --kv-transfer-config that "
    "tiered-kv plan prints."
)
ODD_TOKEN = (
    "The token has a line break or another control character: use the value set on the server."
)


class RouteError(Exception):
    """A request to a route failed. The message is one sentence for users.

    Attributes:
        status: HTTP status; None if there was no HTTP response.
    """

    def __init__(self, sentence: str, status: int | None = None) -> None:
        super().__init__(sentence)
        self.status = status

    @property
    def is_final(self) -> bool:
        """True if the server has reported that the operation failed or was refused, so that the
        server no longer uses the snapshot of the operation.
        """
        return self.status is not None and self.status not in (500, 503, 504)


class RouteClient:
    """Client of the routes of one server.

    Args:
        url: address of the server, as pasted by users.
        token: admin token; None if there is none.

    Attributes:
        base: normalized address of the server.

    Raises:
        RouteError: the address or the token is invalid.
    """

    def __init__(self, url: str, token: str | None) -> None:
        try:
            self.base = base_of(url)
        except UnreachableError as error:
            raise RouteError(
                f"{harmless(url)} cannot be used: {harmless(str(error))}. Write it as "
                "http://HOST:8000."
            ) from error
        token = token.strip(" \t\r\n") if token is not None else None  # as the server does
        if token is not None and any(unicodedata.category(char) == "Cc" for char in token):
            raise RouteError(
                ODD_TOKEN
            )  # checked here, because a later error message would contain the token
        self._token = token or None

    def status(self) -> ServerStatus:
        """Request the status of all engines.

        Raises:
            RouteError: the request failed.
        """
        status = read_answer(ServerStatus, parse(self.get("status")))
        if not status.engines:
            raise other_version("the list of engines is empty")
        return status

    def jobs(self, after: Cursor) -> JobPage:
        """Request the page of jobs that follows a cursor.

        Raises:
            RouteError: the request failed.
        """
        page = self.get(f"jobs?limit={PAGE}&after={after}")
        return read_answer(JobPage, parse(page))

    def snapshot_folder(self) -> Path:
        """Request the path of the server's snapshot folder on the server's machine.

        Raises:
            RouteError: the request failed.
        """
        folder = _object(self.get("snapshots")).get("folder")
        if not isinstance(folder, str) or not folder.startswith("/"):
            raise other_version("folder is not an absolute path")
        return Path(folder)

    def operate(self, path: str, timeout_s: float, **fields: Any) -> Mapping[str, Any]:
        """Request an operation on jobs. Returns the server's answer.

        Args:
            path: route of the operation, after ``/tiered_kv/``.
            timeout_s: how long the server waits for the operation to finish, seconds.
            fields: further fields of the request; fields that are None are left out.

        Raises:
            RouteError: the operation failed, or its result is unknown.
        """
        given = {name: value for name, value in fields.items() if value is not None}
        body = json.dumps({**given, "timeout_s": timeout_s}).encode()
        return _object(self._ask(path, timeout_s + SLACK_S, body))

    def get(self, path: str) -> str:
        """Request a route. Returns the text of the response.

        Args:
            path: route, after ``/tiered_kv/``.

        Raises:
            RouteError: the request failed.
        """
        return self._ask(path, PATIENCE_S)

    def _ask(self, path: str, patience_s: float, post: bytes | None = None) -> str:
        try:
            return fetch(f"{self.base}/tiered_kv/{path}", patience_s, self._token, post)
        except RefusedError as error:
            raise RouteError(self._sentence(error), error.status) from error
        except UnreachableError as error:
            raise RouteError(
                f"{harmless(self.base)} does not respond ({harmless(str(error))}): check that "
                "the server runs, and that the address is right"
            ) from error

    def _sentence(self, error: RefusedError) -> str:
        said = _error(error.said)
        given = said.get("message")
        sentence = harmless(given, MOST_OF_SENTENCE) if isinstance(given, str) else ""
        match error.status:
            case 401:
                return NO_TOKEN if self._token is None else WRONG_TOKEN
            case 403:
                return sentence or CLOSED
            case 404:
                is_of_vllm = "type" in said  # errors of tiered-kv's routes have no type
                return NO_ROUTES if is_of_vllm else sentence or NO_ROUTES
            case 501:
                return sentence or NO_ENGINE
        return (
            sentence
            or f"The server answered with status {error.status}: see its log, and try again."
        )


def parse(text: str) -> Any:
    """Parse the JSON of a response.

    Raises:
        RouteError: the text is not JSON.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise other_version("the text is not JSON") from error


def read_answer(kind: type[Read], found: object, most_chars: int = MOST_CHARS) -> Read:
    """Convert a parsed response to ``kind``. Texts are sanitized, and truncated after
    ``most_chars``.

    Raises:
        RouteError: the response has an unexpected form.
    """
    try:
        return kind.from_json(harmless_json(found, most_chars))
    except (ValueError, RecursionError) as error:
        raise other_version(str(error)) from error


def other_version(what: str) -> RouteError:
    """Return the error for a response of an unexpected form. ``what`` describes the difference."""
    return RouteError(
        f"The answer has an unexpected form ({harmless(what)}): use the same version of "
        "tiered-kv as the server."
    )


def _object(text: str) -> dict[str, Any]:
    found = parse(text)
    if not isinstance(found, dict):
        raise other_version("the JSON value is not an object")
    return found


def _error(text: str) -> dict[str, Any]:
    """Return the contents of an error response; an empty dict if the text is not an error
    response."""
    try:
        found = _object(text).get("error")
    except RouteError:
        return {}
    return found if isinstance(found, dict) else {}

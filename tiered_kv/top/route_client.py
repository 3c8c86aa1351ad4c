"""Client of a server's routes. Each error message is a sentence that says what to do."""

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
"""Maximum wait for an answer, seconds."""
SLACK_S = 120.0
"""Time that the server may take beyond the timeout of an operation, seconds, since its engine may
be busy for a while."""
PAGE = 1_000
"""Number of jobs requested per call, the most that a server returns."""

MOST_OF_SENTENCE = 4_000
"""Maximum length of an error message from the server, characters: it may list everything that a
snapshot needs."""

NO_ROUTES = (
    "The server has no /tiered_kv routes: start it with VLLM_PLUGINS=tiered_kv and vLLM's "
    "Python front end, and use the address of the server itself."
)
NO_TOKEN = f"The server wants a token: give its {ADMIN_TOKEN} with --token or in the environment."
WRONG_TOKEN = f"The server refuses the token: give what {ADMIN_TOKEN} is set to there."
CLOSED = f"The server answers others only: set {ADMIN_TOKEN} for it, and give that with --token."
NO_ENGINE = (
    "The server has no engine with the connector: start it with the --kv-transfer-config that "
    "tiered-kv plan prints."
)
ODD_TOKEN = (
    "The token has a line break or another control character: use the value that the server has."
)


class RouteError(Exception):
    """A failed request to a route. The message is one sentence for users.

    Attributes:
        status: HTTP status; None without an HTTP answer.
    """

    def __init__(self, sentence: str, status: int | None = None) -> None:
        super().__init__(sentence)
        self.status = status

    @property
    def is_final(self) -> bool:
        """True if the server has reported that the operation failed or was refused, so that it no
        longer uses a snapshot for it."""
        return self.status is not None and self.status not in (500, 503, 504)


class RouteClient:
    """The routes of one server.

    Args:
        url: address of the server, as pasted by users.
        token: the operator's token; None if there is none.

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
                f"{harmless(url)}: {harmless(str(error))}. Write it as http://HOST:8000."
            ) from error
        token = token.strip(" \t\r\n") if token is not None else None  # as the server does
        if token is not None and any(unicodedata.category(char) == "Cc" for char in token):
            raise RouteError(ODD_TOKEN)  # refused here, because a later error would show the token
        self._token = token or None

    def status(self) -> ServerStatus:
        """Request the status of all engines.

        Raises:
            RouteError: the request failed.
        """
        status = read_answer(ServerStatus, parse(self.get("status")))
        if not status.engines:
            raise other_version("it has no engine")
        return status

    def jobs(self, after: Cursor) -> JobPage:
        """Request the page of jobs that follows a cursor.

        Raises:
            RouteError: the request failed.
        """
        page = self.get(f"jobs?limit={PAGE}&after={after}")
        return read_answer(JobPage, parse(page))

    def snapshot_folder(self) -> Path:
        """Request the folder of the server's snapshots, a path on its own machine.

        Raises:
            RouteError: the request failed.
        """
        folder = _object(self.get("snapshots")).get("folder")
        if not isinstance(folder, str) or not folder.startswith("/"):
            raise other_version("folder is not a path")
        return Path(folder)

    def operate(self, path: str, timeout_s: float, **fields: Any) -> Mapping[str, Any]:
        """Request an operation on jobs. Returns the server's answer.

        Args:
            path: route of the operation, after ``/tiered_kv/``.
            timeout_s: maximum time that the operation waits for its end, seconds.
            fields: further fields of the request; fields that are None are left out.

        Raises:
            RouteError: the operation was not carried out, as far as is known.
        """
        given = {name: value for name, value in fields.items() if value is not None}
        body = json.dumps({**given, "timeout_s": timeout_s}).encode()
        return _object(self._ask(path, timeout_s + SLACK_S, body))

    def get(self, path: str) -> str:
        """Request a route's answer.

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
                "the server runs, and that this is its address"
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
                is_of_vllm = "type" in said  # which errors of our routes do not have
                return NO_ROUTES if is_of_vllm else sentence or NO_ROUTES
            case 501:
                return sentence or NO_ENGINE
        return sentence or f"The server answered {error.status}: see its log, and ask again."


def parse(text: str) -> Any:
    """Parse the JSON of an answer.

    Raises:
        RouteError: the text is not JSON.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise other_version("it is not JSON") from error


def read_answer(kind: type[Read], found: object, most_chars: int = MOST_CHARS) -> Read:
    """Read an answer. Its texts are sanitized, and truncated after ``most_chars``.

    Raises:
        RouteError: the answer has an unexpected form.
    """
    try:
        return kind.from_json(harmless_json(found, most_chars))
    except (ValueError, RecursionError) as error:
        raise other_version(str(error)) from error


def other_version(what: str) -> RouteError:
    """Create the error for an answer of an unexpected form; ``what`` describes the difference."""
    return RouteError(
        f"The answer has a form that is not known here ({harmless(what)}): use the "
        "tiered-kv of the version that the server has."
    )


def _object(text: str) -> dict[str, Any]:
    found = parse(text)
    if not isinstance(found, dict):
        raise other_version("it is not an object")
    return found


def _error(text: str) -> dict[str, Any]:
    """Contents of an error answer; empty if the text is not one."""
    try:
        found = _object(text).get("error")
    except RouteError:
        return {}
    return found if isinstance(found, dict) else {}

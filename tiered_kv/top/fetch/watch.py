"""A watch on a server: snapshot after snapshot."""

from __future__ import annotations

from dataclasses import replace

from tiered_kv.top.view import Snapshot

from .flow import Flow
from .job_sweep import JobSweep
from .route_client import RouteClient, RouteError
from .safe_text import harmless


class Watch:
    """Looks at a server again and again. One thread at a time.

    Args:
        client: the server's routes.
    """

    def __init__(self, client: RouteClient) -> None:
        self._client = client
        self._sweep = JobSweep(client.jobs)
        self._flows: dict[int | None, Flow] = {}
        self._last: Snapshot | None = None

    def look(self) -> Snapshot:
        """Look at the server.

        Raises:
            RouteError: it cannot be looked at.
        """
        status = self._client.status()
        self._sweep.go_on()
        found = {
            one.engine: self._flows.setdefault(one.engine, Flow()).add(one)
            for one in status.engines
        }
        self._last = Snapshot(
            url=harmless(self._client.base),
            version=status.version,
            vllm_version=status.vllm_version,
            engines=status.engines,
            all_engines=tuple(one.engine for one in status.engines),
            growth={engine: growth for engine, growth in found.items() if growth is not None},
            jobs=self._sweep.jobs(),
            whole=self._sweep.whole,
        )
        return self._last

    def look_again(self) -> Snapshot:
        """Look at the server; where that fails, the last snapshot with the problem.

        Raises:
            RouteError: it fails, and there is no snapshot yet.
        """
        try:
            return self.look()
        except RouteError as error:
            if self._last is None:
                raise
            return replace(self._last, problem=str(error))

"""One load on one server, as it is kept in JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from tiered_kv.bench.replay.results import JobDone

from .live_load import Arriving, Load


@dataclass(frozen=True, slots=True)
class LiveRun:
    """A load played on a server.

    Attributes:
        server: name that it is told by.
        round: 0 for the first.
        agents: sub-agents, as jobs of their own; their jobs' times have theirs in them.
        tells_cached: ``cached_tokens`` of the turns are what the server said, not zeros.
        counts: prompt tokens by the server's own counters: asked, vram, connector.
    """

    server: str
    url: str
    load: Load
    round: int
    jobs: tuple[JobDone, ...]
    agents: tuple[JobDone, ...] = ()
    tells_cached: bool = False
    counts: Mapping[str, int] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        load = {**asdict(self.load), "arriving": self.load.arriving.value}
        return {**asdict(self), "load": load}

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> LiveRun:
        """The inverse of ``as_json``.

        Raises:
            KeyError, TypeError, ValueError: it is no run.
        """
        load = {**said["load"], "arriving": Arriving(said["load"]["arriving"])}
        parts = {key: tuple(map(JobDone.from_json, said[key])) for key in ("jobs", "agents")}
        return cls(**{**said, "load": Load(**load), **parts})

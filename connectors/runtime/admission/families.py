"""Blocks that jobs share, counted once for each family of jobs."""

from __future__ import annotations

from collections.abc import Mapping

from tiered_kv.policies.base import JobKey

from .members import ActiveJob


class Families:
    """Jobs that begin with the same blocks; one of them counts what they share. One thread.

    Attributes:
        blocks: that families share, all of them.
    """

    def __init__(self) -> None:
        self.blocks = 0.0
        self._sizes: dict[bytes, int] = {}
        self._counts: dict[JobKey, tuple[bytes, float]] = {}

    def count_all(
        self, members: Mapping[JobKey, ActiveJob], chances: Mapping[JobKey, float]
    ) -> None:
        """Count all jobs anew: what a family shares, by the chance of the one that needs it
        most."""
        self.blocks, self._sizes, self._counts = 0.0, {}, {}
        needed: dict[bytes, float] = {}
        for key, member in members.items():
            if member.shared:
                needed[member.family] = max(chances[key], needed.get(member.family, 0.0))
        largest: dict[bytes, int] = {}
        for key, member in members.items():
            if member.shared:
                more = max(0, member.shared - largest.get(member.family, 0))
                self._enter(key, member.family, more * needed[member.family])
                largest[member.family] = more + largest.get(member.family, 0)

    def counted_with(self, key: JobKey, member: ActiveJob) -> float:
        """Blocks that a job counts for its family; it enters it if it is new there."""
        if not member.shared:
            return 0.0
        if key not in self._counts:
            known = member.family in self._sizes
            self._enter(key, member.family, 0.0 if known else member.shared)
        return self._counts[key][1]

    def leave(self, key: JobKey) -> float:
        """Take a job out; returns the blocks that the others still share in its place."""
        family, blocks = self._counts.pop(key, (b"", 0.0))
        if not family:
            return 0.0
        self._sizes[family] -= 1
        if self._sizes[family]:
            return blocks
        del self._sizes[family]
        self.blocks -= blocks
        return 0.0

    def _enter(self, key: JobKey, family: bytes, blocks: float) -> None:
        self._sizes[family] = self._sizes.get(family, 0) + 1
        self._counts[key] = family, blocks
        self.blocks += blocks

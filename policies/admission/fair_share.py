"""Equal shares of the room: what one client leaves waiting must not keep others' new jobs out.
Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class Blocks(NamedTuple):
    """Expected blocks.

    Attributes:
        vram: blocks of VRAM.
        anywhere: blocks of VRAM and CPU memory.
    """

    vram: float = 0.0
    anywhere: float = 0.0


NOTHING = Blocks()


@dataclass(frozen=True, slots=True)
class FairShare:
    """Blocks that clients leave waiting beyond an equal share of the room each.

    Attributes:
        over: those of each client.
        total: those of all clients.
    """

    over: Mapping[str, Blocks] = field(default_factory=dict)
    total: Blocks = NOTHING

    @classmethod
    def of(cls, waiting: Mapping[str, Blocks], room: Blocks) -> FairShare:
        """Compare clients with their shares. A client that is alone gets half of the room: the
        next one may come at any time.

        Args:
            waiting: expected demand of each client's jobs that are away and unpinned; a client
                without any counts as well if it has jobs.
            room: blocks of VRAM, and anywhere.
        """
        clients = max(2, len(waiting))
        vram, anywhere = (blocks / clients for blocks in room)
        over = {
            salt: Blocks(max(0.0, one.vram - vram), max(0.0, one.anywhere - anywhere))
            for salt, one in waiting.items()
        }
        total = Blocks(
            sum(one.vram for one in over.values()), sum(one.anywhere for one in over.values())
        )
        return cls(over, total)

    def of_others(self, client: str, *, anywhere: bool) -> float:
        """Blocks that do not count when that client asks for room: what the others leave waiting
        beyond their shares."""
        own = self.over.get(client, NOTHING)
        return self.total[anywhere] - own[anywhere]

"""Equal shares for clients. Pure.

``FairShare``: contexts that a client leaves waiting must not keep the new jobs of others out.
``EqualShare``: a client's requests and pins must not keep the requests of others waiting.
"""

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


@dataclass(frozen=True, slots=True)
class ClientUse:
    """Use that a client makes of the engine.

    Attributes:
        contexts: its running requests and pins.
        blocks: their blocks.
    """

    contexts: int = 0
    blocks: float = 0.0

    def plus(self, blocks: float) -> ClientUse:
        """Return the use with one context more, of that many blocks."""
        return ClientUse(self.contexts + 1, self.blocks + blocks)


@dataclass(frozen=True, slots=True)
class EqualShare:
    """Share of each client while others wait. A single context is always within it.

    Attributes:
        seats: requests that may run.
        blocks: blocks of the pool.
    """

    seats: float
    blocks: float

    @classmethod
    def of(cls, seats: float, blocks: int, clients: int) -> EqualShare:
        """Divide an engine among its clients.

        Args:
            seats: most requests that the engine runs at the same time.
            blocks: blocks of its pool.
            clients: number of clients that have requests or pins.
        """
        return cls(seats / clients, blocks / clients)

    def excess(self, use: ClientUse) -> float:
        """Return how many times its share a client has, of the seats or of the pool; 0 if it is
        within its share."""
        times = max(use.contexts / self.seats, use.blocks / self.blocks)
        return times if times > 1 and use.contexts > 1 else 0.0

    def fills_pool(self, use: ClientUse) -> bool:
        """True if a client has more than its share of the pool."""
        return use.contexts > 1 and use.blocks > self.blocks

"""Links: what moves bytes one after the other, at a bandwidth."""

from __future__ import annotations


class Link:
    """First in, first out; one direction.

    Args:
        bandwidth: bytes a second.
        latency_s: of each transfer, beside its bytes.

    Attributes:
        carried: bytes so far.
    """

    def __init__(self, bandwidth: float, latency_s: float = 20e-6) -> None:
        if bandwidth <= 0:
            raise ValueError("a link needs a bandwidth above 0")
        self.bandwidth = bandwidth
        self.latency_s = latency_s
        self.carried = 0
        self._free_at = 0.0

    def send(self, nbytes: int, now: float) -> float:
        """Queue a transfer; returns when it is over."""
        self._free_at = max(now, self._free_at) + self.seconds(nbytes)
        self.carried += nbytes
        return self._free_at

    def seconds(self, nbytes: int) -> float:
        """Time of a transfer alone, as a worker measures it."""
        return self.latency_s + nbytes / self.bandwidth

"""Slots that a copy of a dead process may still write to, and how long they rest.

A killed process leaves copies by devices under way. They write to the pages of the file, which the
driver holds for them, whoever has the file by then. Nothing tells when they end:

- The lock of the file says little. A dying process gives up its files in no order that one could
  rely on: its lock may go before the driver's handle, whose release ends the copies.
- Its process id says little more. The next owner may live in another container, which does not see
  it. And NVIDIA's driver ends a killed process' work in a thread of its own if it finds its locks
  taken (``nvidia_close_deferred`` in its open source), when the process is gone already.

Only slots that were invalid are in danger. A slot becomes invalid before a copy into it is
submitted, and valid after the copy's event has passed, so that no copy writes to a valid slot.
Copies by processors and disks are no danger either: a thread within one keeps the lock.

So slots that are found invalid rest: nothing is written to them for a while. They are few, those of
saves under way, of discards, and of pages that were not hashed yet. Slots never used do not rest.
A copy takes milliseconds and the end of a CUDA context seconds. An engine that has got VRAM for its
own cache on the same device has seen the other's context end, but it may be another device.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

REST_S = 30.0
"""Time that slots rest from the moment the file's lock was had, seconds.

Long beside the end of a context, and mostly over when an engine that starts takes its first
request.
"""


@dataclass(frozen=True, slots=True)
class Rest:
    """Slots that nothing may be written to for a while.

    Attributes:
        slots: slots that were invalid when the file was taken over.
        until: end of their rest, on the clock that ``since`` was read on.
    """

    slots: frozenset[int]
    until: float

    @classmethod
    def begin(cls, slots: Iterable[int], since: float) -> Rest:
        """Begin a rest, when the file's lock was had.

        Args:
            since: seconds.
        """
        return cls(frozenset(slots), since + REST_S)

    def left_s(self, now: float) -> float:
        """Seconds until nothing rests any more.

        Args:
            now: seconds on the clock of ``since``.
        """
        return max(0.0, self.until - now) if self.slots else 0.0

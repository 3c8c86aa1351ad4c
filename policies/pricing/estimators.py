"""Estimators of the cost of a restore and of a second in VRAM, learned from this engine's requests.

T and η are defined as in Continuum (arXiv 2511.02230). λ replaces the constant 1 that Continuum
charges per second. ``tiered_kv.policies.base.Costs`` describes all of them.
"""

from __future__ import annotations

import math
from collections import deque

WINDOW = 100
"""Number of turns over which T is averaged, as in Continuum. Only turns whose KV had left VRAM
count."""
PREFILL_DECAY = 0.98
"""Factor by which the weight of a measured prefill decays with each later prefill."""
SURVIVAL_STEP = 0.2
"""Weight of the latest returning job in the moving average of ``Survival``."""
PEAK_HALF_LIFE_S = 10.0
"""Half-life of a demand peak in the forecast, seconds."""
PRICE = 1.0
"""λ while VRAM is short, as in Continuum, because each context in VRAM then keeps out another."""

SHORTEST_S = 1e-6
"""Minimum duration that counts as measured, and minimum divisor of rates, seconds."""

_TOKENS = 1000.0  # unit of the fit, so that both terms have similar magnitude


class PrefillFit:
    """Estimator of the time to prefill tokens after a context. The time is the sum of a term that
    is proportional to the number of tokens, and a term for attention that is proportional to the
    difference of the squares of the end and start positions of these tokens. The two coefficients
    are fitted by weighted least squares on relative errors, and are never negative.

    Attributes:
        measured: True once a real prefill was observed.
    """

    def __init__(self) -> None:
        self.measured = False
        self._linear = self._quadratic = 0.0
        self._sums = [0.0] * 5  # of xx, xz, zz, x and z, with x and z divided by seconds

    def suppose(self, linear: float, quadratic: float) -> None:
        """Add an estimate of both coefficients, with the weight of two observed prefills.

        Args:
            linear: coefficient of the linear term, seconds per 1,000 tokens.
            quadratic: coefficient of the quadratic term, seconds per (1,000 tokens)².
        """
        for tokens in (1.0, 16.0):
            self._learn(tokens, tokens**2, linear * tokens + quadratic * tokens**2)

    def observe(self, behind: int, tokens: int, seconds: float) -> None:
        """Add a prefill of ``tokens`` tokens after a context of ``behind`` tokens, which took
        ``seconds``. A prefill without tokens, or shorter than ``SHORTEST_S``, is ignored."""
        if tokens > 0 and seconds >= SHORTEST_S:
            self.measured = True
            self._learn(*_terms(behind, tokens), seconds)

    def _learn(self, x: float, z: float, seconds: float) -> None:
        x, z = x / seconds, z / seconds
        fresh = (x * x, x * z, z * z, x, z)
        self._sums = [PREFILL_DECAY * old + new for old, new in zip(self._sums, fresh, strict=True)]
        xx, xz, zz, x1, z1 = self._sums
        determinant = xx * zz - xz * xz
        if determinant > 1e-9 * xx * zz:
            linear = (x1 * zz - z1 * xz) / determinant
            quadratic = (z1 * xx - x1 * xz) / determinant
        else:
            linear, quadratic = x1 / xx, 0.0
        if quadratic < 0:
            linear, quadratic = x1 / xx, 0.0
        elif linear < 0:
            linear, quadratic = 0.0, z1 / zz
        self._linear, self._quadratic = linear, quadratic

    def seconds(self, behind: int, tokens: int) -> float:
        """Return the time to prefill ``tokens`` tokens after a context of ``behind`` tokens,
        seconds; 0 while unknown."""
        x, z = _terms(behind, tokens)
        return self._linear * x + self._quadratic * z


def _terms(behind: int, tokens: int) -> tuple[float, float]:
    begin, end = behind / _TOKENS, (behind + tokens) / _TOKENS
    return end - begin, end * end - begin * begin


class QueueDelay:
    """T: mean admission wait of the last 100 turns whose KV had left VRAM, seconds; 0 before the
    first such turn."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=WINDOW)
        self.mean_s = 0.0

    def observe(self, seconds: float) -> None:
        self._last.append(seconds)
        self.mean_s = math.fsum(self._last) / len(self._last)


class Survival:
    """Moving average of the fraction of the KV outside VRAM that still existed when its job
    returned.

    Args:
        share: initial value of the average.
    """

    def __init__(self, share: float) -> None:
        self.share = share

    def observe(self, found: int, wanted: int) -> None:
        """Add a returning job that needed the KV of ``wanted`` tokens from outside VRAM, of which
        the KV of ``found`` tokens still existed."""
        if wanted > 0:
            share = min(1.0, max(0.0, found / wanted))
            self.share += SURVIVAL_STEP * (share - self.share)


class Memoryfulness:
    """η = -Corr(k, N-k) over the turns of all finished jobs, where a job has N turns, and k of them
    have been served. η is 1 if all jobs have the same length, or if only one has finished. It is 0
    if k does not predict N-k, and never negative."""

    def __init__(self) -> None:
        self._count = self._served = self._left = 0.0
        self._served2 = self._left2 = self._product = 0.0
        self.value = 1.0

    def observe(self, turns: int) -> None:
        """Add a job that ended after ``turns`` turns."""
        n = float(turns)
        if n < 1:
            return
        first = n * (n + 1) / 2  # sum of k
        second = first * (2 * n + 1) / 3  # sum of k²
        self._count += n
        self._served += first
        self._served2 += second
        self._left += n * n - first
        self._left2 += n**3 - 2 * n * first + second
        self._product += n * first - second
        self.value = min(1.0, max(0.0, -self._correlation()))

    def _correlation(self) -> float:
        n = self._count
        spread = (self._served2 - self._served**2 / n) * (self._left2 - self._left**2 / n)
        if spread <= 1e-12:
            return -1.0
        return (self._product - self._served * self._left / n) / math.sqrt(spread)


class ShadowPrice:
    """λ, seconds charged per second in VRAM: 0 while VRAM has space for the forecast demand in
    addition to the pins, otherwise ``PRICE``.

    The forecast is the highest recent demand: blocks in use without pins, plus blocks that waiting
    requests need. It decays with a half-life of ten seconds.
    """

    def __init__(self) -> None:
        self._peak = 0.0
        self._seen_at = 0.0

    def observe(self, demand: int, now: float) -> None:
        """Record the demand at time ``now`` (monotonic seconds): blocks in use without pins, plus
        blocks that waiting requests need."""
        fade = 0.5 ** (max(0.0, now - self._seen_at) / PEAK_HALF_LIFE_S)
        self._peak = max(float(demand), self._peak * fade)
        self._seen_at = now

    @staticmethod
    def of(demand: float, blocks: int, held_up: float = 1.0) -> float:
        """Return λ for a projected demand of all jobs, which includes their pins.

        Args:
            demand: projected demand of the jobs, blocks.
            blocks: size of the pool, blocks.
            held_up: number of requests that lose B without a pin. U counts B only once, so λ is
                divided by this number. 0 counts as 1.
        """
        return PRICE / (held_up or 1.0) if demand > blocks else 0.0

    def price(self, blocks: int, pinned: int, own: int = 0) -> float:
        """Return λ if ``pinned`` of the pool's ``blocks`` are pinned.

        Args:
            own: blocks of the job whose pin is priced. They were part of the demand while its turn
                ran, and are subtracted from it.
        """
        return PRICE if pinned > blocks - max(0.0, self._peak - own) else 0.0

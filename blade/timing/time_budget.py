# SPDX-License-Identifier: Apache-2.0
"""The time budget of a search: how long ``optimize`` may look for a faster module (``Config.time_budget``).

    budget = TimeBudget(config.time_budget)          # the clock runs from here
    if (sentence := budget.why_not(backend.estimate_s(cluster))) is not None: ...

The first backend of a cluster may begin until twice the time, and that of the largest whenever. Part of the budget is
kept for timing the converted engines: an engine that was not timed cannot be chosen.
"""

import math
from collections.abc import Callable
from time import monotonic

FOR_TIMING = 0.25  # share of the budget


class TimeBudget:
    """Remaining seconds, for use from any thread; ``seconds=None`` is no limit."""

    def __init__(self, seconds: float | None, clock: Callable[[], float] = monotonic) -> None:
        self.seconds = seconds
        self._clock = clock
        self._start = clock()
        self._cancelled = False

    def cancel(self) -> None:
        """End the budget: nothing is left from now on."""
        self._cancelled = True

    @property
    def is_cancelled(self) -> bool:
        return self._cancelled

    def left(self) -> float:
        """Return the remaining seconds, at least 0; infinite without a limit."""
        return self._until(1.0)

    def left_to_convert(self) -> float:
        """Return the remaining seconds without those kept for timing."""
        return self._until(1.0 - FOR_TIMING)

    def is_used(self, part: float) -> bool:
        """Whether more than ``part`` of the seconds is over."""
        return self._until(part) <= 0.0

    def why_not(self, estimate_s: float) -> str | None:
        """Return ``None`` if a conversion of about ``estimate_s`` seconds fits, else the reason."""
        left = self.left_to_convert()
        if left > 0 and estimate_s <= left:
            return None
        if self._cancelled:
            return "the search was ended before its conversion began."
        return (
            f"converting takes it about {estimate_s:.0f} s and {left:.0f} s of Config.time_budget="
            f"{self.seconds:g} are left for that: {self._enough(estimate_s)}"
        )

    def why_ended(self, what: str) -> str:
        """Return the sentence on work that was running, or next, when the budget ended."""
        if self._cancelled:
            return f"the search was ended before {what}."
        return f"Config.time_budget={self.seconds:g} s ended before {what}: {self._enough(0.0)}"

    def says_cut_short(self, count: int) -> str:
        """Return the sentence on a search that left out ``count`` engines or comparisons."""
        left_out = (
            f"{count} engines were neither built nor measured" if count else "not all was compared"
        )
        if self._cancelled:
            return f"The search was ended: {left_out}."
        return (
            f"The search was cut short by Config.time_budget={self.seconds:g} s: {left_out}. What was best by then "
            "serves, also in the next optimize; a larger time_budget, or None, searches further."
        )

    def _enough(self, estimate_s: float) -> str:
        needed = (self._clock() - self._start + estimate_s) / (1.0 - FOR_TIMING)
        return f"time_budget={math.ceil(needed)} or more, or None, would let it."

    def _until(self, part: float) -> float:
        if self._cancelled:
            return 0.0
        if self.seconds is None:
            return math.inf
        return max(0.0, self._start + part * self.seconds - self._clock())


UNLIMITED = TimeBudget(None)

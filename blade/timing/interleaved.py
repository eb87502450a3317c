# SPDX-License-Identifier: Apache-2.0
"""Time functions in interleaved rounds, for all comparisons of speed in this package.

    timing = measure(engine, original, inputs, rounds=15)      # Timing: medians, ratio, its interval
    decide([timing], weights).serves                            # of decision.py: whether that is a win

Every round calls all functions, in an order that alternates, so that slow phases of the machine affect all of
them. Each turn waits until the threads of the turn before it are idle (thread pools spin after their last
work) and begins with untimed calls. Without that, two libraries in turns take up to 2.5 times as long as each
takes alone.

Rounds that other processes disturb are repeated: ``neighbours`` tells what they took, ``decision`` which rounds
count. The median of the ratios per round decides, with its confidence interval (Georges et al., OOPSLA 2007,
argue for intervals). Rounds end when it is narrow, or with the budget.

A function that writes to its inputs or to a state is timed call by call: ``restore`` undoes what each call
wrote, outside the timed span, so that a counter does not run on and a full cache does not overflow.

Kernels of one GPU are timed by ``cuda_graph`` instead, where a call is too short for a clock of the host.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf, log
from statistics import median
from time import perf_counter, process_time, sleep
from typing import Any

import torch

from blade.core.pytree import tensors_in
from blade.core.torchscript import op_by_op
from blade.report import Timing
from blade.timing.decision import MIN_ROUNDS, PRECISION, Ratio, Turn, compare, is_quiet
from blade.timing.neighbours import NEIGHBOURS, QUIET, Machine
from blade.timing.one_thread import one_thread

# Rounds and their length.
BUDGET_S = 1.5  # seconds per sample and pair, beyond MIN_ROUNDS: the wait for one candidate
PATIENCE = 2  # factor to the rounds, and to BUDGET_S, where neighbours disturb most of them
ROUND_S = 0.004  # seconds of one turn, at least: calls shorter than that are repeated
SPANS = 8  # of a turn, at most; each is timed
LONGEST = 4  # factor to ROUND_S after which a turn of stalled calls ends
FASTER_ONCE = 0.8  # factor to the seconds of a call that are known, below which they were wrong
MORE = 4  # factor to the number of rounds where noise hides a possible win
ALONE_ROUNDS = 5  # with one thread, where neighbours disturbed the rounds
EARLY_EXIT_S = 0.1  # the early exit of measurements that delay a call of the user

# Rest before a turn, and untimed calls.
REST_S = 0.05  # seconds at most: threads that spin longer are not waited for
STEP_S = 5e-4  # seconds between two checks for working threads
UNTIMED = (
    0.02,
    0.05,
)  # seconds; a turn begins with one untimed call for each of these that a call is shorter than

# When rounds end.
EVIDENT = 10.0  # factor to its noise at which a speed-up needs no further rounds
CLEAR_WIN = 1.1  # a speed-up that a single round shows
SURE_WIN = 1.25  # a speed-up that needs no further rounds if all its interval is above, however wide that is
FEW_ROUNDS = 2  # enough for a sure win where rounds are so long that the budget is over
HOPELESS = 10.0  # factor to the original's seconds; one call of HOPELESS_S beyond it is enough
HOPELESS_S = 0.2
LONG_S = 0.1
"""Seconds of a call from which two warm it up, unless the second is longer than expected."""
AS_BEFORE = 1.2
"""Factor to the seconds of the original's first call, up to which the second is as expected."""
COMPILES_S = 2.0  # seconds of a second call that may be TorchScript's compiling, or the capture of CUDA graphs

Inputs = Sequence[Any]
Clock = Callable[[], float]
Fn = Callable[..., Any]
Restore = Callable[[], bool]
"""Undo what calls have written since it was last called; return whether there was anything."""


def measure(
    engine: Fn,
    original: Fn,
    inputs: Inputs,
    rounds: int,
    clock: Clock = perf_counter,
    early_exit_s: float = inf,
    restore: Restore | None = None,
    machine: Machine | None = None,
) -> Timing:
    """Measure the median seconds of both on ``inputs``, in at most ``rounds`` interleaved rounds that nothing
    disturbed.

    ``early_exit_s``: after these seconds one round is enough if the engine was clearly faster in every round; if it
    is 0, the round begins at once, without calls that warm up. ``restore`` undoes the writes of either. ``machine``
    tells what disturbs; by default, the one that ``clock`` is of.
    """
    both = [inputs] * 2
    [timing] = measure_all([engine], original, both, rounds, clock, early_exit_s, restore, machine)
    return timing


def measure_all(
    engines: Sequence[Fn],
    original: Fn,
    inputs: Sequence[Inputs],
    rounds: int,
    clock: Clock = perf_counter,
    early_exit_s: float = inf,
    restore: Restore | None = None,
    machine: Machine | None = None,
) -> list[Timing]:
    """Measure several engines; ``inputs`` are equal ones, for the original and then for each engine.

    An engine that another one has beaten drops out: most rounds are spent on close candidates. On a GPU the
    original runs op by op, as eager mode does. ``restore`` undoes the writes of any of them. What a function
    raises passes: the caller then restores, too.
    """
    if machine is None:
        machine = NEIGHBOURS if clock is perf_counter else QUIET
    with torch.no_grad():
        on_gpu = any(t.is_cuda for t in tensors_in(list(inputs[0])))
        functions = [op_by_op(original) if on_gpu else original, *engines]
        sides = [
            _Side(f, x, clock, machine, restore) for f, x in zip(functions, inputs, strict=True)
        ]
        start = clock()
        end = start + early_exit_s
        first = sides[0].warm_up(end) if early_exit_s else inf
        for side in sides[1:] if early_exit_s else ():
            side.warm_up(end, first)
        racing = [k for k, side in enumerate(sides) if k and not _is_hopeless(side.once, first)]
        _run_rounds(sides, racing, rounds, end, clock() - start)
        _without_barriers(sides)
    return [_timing(inputs[0], sides[0], side) for side in sides[1:]]


def _run_rounds(
    sides: Sequence["_Side"], racing: list[int], rounds: int, end: float, waited: float
) -> None:
    """Add rounds of the original (0) and of those ``racing`` until their ratios are known, or the budget is over;
    of a sure win it includes what was ``waited`` for before."""
    left = BUDGET_S * (1 + len(racing)) / 2
    more = (PATIENCE - 1) * left  # while neighbours leave too few rounds
    turns = [side.turns for side in sides]
    machine, most = sides[0].machine, rounds
    while racing:
        slowdown = machine.slowdown()
        turn = [0, *racing]
        for k in turn if len(turns[0]) % 2 else turn[::-1]:
            left -= sides[k].take_turn(slowdown)
        done = len(turns[0])
        quiet = min(compare(turns[k], turns[0]).quiet for k in racing)
        if done >= MIN_ROUNDS:
            is_over = left <= (0 if quiet >= MIN_ROUNDS else -more)
            racing = [] if is_over else _undecided(turns, racing)
            is_last = quiet >= rounds or done >= PATIENCE * rounds
            if is_last and _may_hide_a_win(turns, racing):
                most = MORE * rounds
        elif _is_early_win(turns, racing, sides[0].clock() > end, left <= waited):
            racing = []
        if quiet >= most or done >= PATIENCE * most:
            racing = []


def _without_barriers(sides: Sequence["_Side"]) -> None:
    """Where neighbours disturbed the rounds, let each function know its fastest call with one thread, too.

    A barrier of threads that wait for each other may stall every call, by a factor of thousands, while the
    neighbours stay. With one thread there is none, and on a quiet machine several threads are faster than one.
    """
    found = [compare(side.turns, sides[0].turns) for side in sides if side.turns]
    if not any(one.disturbed and one.quiet < MIN_ROUNDS for one in found):
        return
    with one_thread() as is_one:
        for side in sides if is_one else ():
            calls = ALONE_ROUNDS if side.once < LONG_S else 1  # what takes so long varies by little
            for _ in range(calls if side.turns else 0):
                side.take_fastest()


@dataclass
class _Side:
    """One of the functions that are timed side by side, with the times of its calls."""

    fn: Fn
    inputs: Inputs
    clock: Clock
    machine: Machine
    restore: Restore | None = None
    once: float = inf  # seconds of a call after warming up, the fastest so far
    turns: list[Turn] = field(default_factory=list)  # by round
    writes: bool = False  # whether a call left something to restore
    restoring: float = 0.0  # seconds of restoring, for a function that writes

    def __post_init__(self) -> None:
        self._streams = _streams(self.inputs)

    def warm_up(self, end: float, original: float | None = None) -> float:
        """Return the seconds of one call, after the calls in which TorchScript profiles and specializes.

        A function whose second call is far slower than ``original``, and too slow to be compiling, is not called
        again; after ``end`` no function is. Nor is a long one that no longer compiles: it takes no longer than
        ``original``, or, if it is the original, than before.
        """
        self.once = self._time_span(1)  # includes lazy loading
        if self.clock() > end:
            return self.once
        expected = AS_BEFORE * self.once if original is None else original
        self.once = self._time_span(1)
        if self.clock() > end or (original is not None and _gives_up(self.once, original)):
            return self.once
        if LONG_S <= self.once <= expected:
            return self.once
        if self.once < max(UNTIMED):
            self._call()
        self.once = self._time_span(1)
        return self.once

    def take_turn(self, slowdown: float) -> float:
        """Add the seconds of one round; return the approximate seconds of all its calls."""
        rest()
        untimed = sum(self.once < limit for limit in UNTIMED)
        for _ in range(untimed):
            self._call()
        mark = self.machine.mark()
        spans = self._time(repeats_for(self.once + self.restoring))
        taken, busy = self.machine.since(mark)
        each = [seconds / calls for seconds, calls in spans]
        if min(each) < FASTER_ONCE * self.once:
            self.once = min(each)  # the call that warmed it up was disturbed
        self.turns.append(Turn(median(each), min(each), taken, busy, slowdown))
        calls = untimed + sum(calls for _, calls in spans)
        return calls * (sum(seconds for seconds, _ in spans) / (calls - untimed) + self.restoring)

    def take_fastest(self) -> None:
        """Let the last turn know the fastest of some more calls."""
        self._call()
        spans = self._time(repeats_for(self.once + self.restoring))
        fastest = min(seconds / calls for seconds, calls in spans)
        if fastest < FASTER_ONCE * self.once:
            self.once = fastest
        self.turns[-1] = replace(self.turns[-1], fastest=min(self.turns[-1].fastest, fastest))

    def _call(self) -> None:
        self.fn(*self.inputs)
        self._undo()

    def _time(self, repeats: int) -> list[tuple[float, int]]:
        """Return seconds and calls of each span; for a GPU until its work is done, not until the launch returns."""
        longest = 1 if self.writes else repeats if self._streams else -(-repeats // SPANS)
        spans: list[tuple[float, int]] = []
        left, spent = repeats, 0.0
        while left > 0 and spent < LONGEST * ROUND_S:
            calls = min(longest, left)
            spans.append((self._time_span(calls), calls))
            left, spent = left - calls, spent + spans[-1][0]
        return spans

    def _time_span(self, calls: int) -> float:
        self._synchronize()
        start = self.clock()
        for _ in range(calls):
            self.fn(*self.inputs)
        self._synchronize()
        seconds = self.clock() - start
        self._undo()
        return seconds

    def _undo(self) -> None:
        if self.restore is None:
            return
        start = self.clock()
        if self.restore():
            self._synchronize()
            self.writes, self.restoring = True, self.clock() - start

    def _synchronize(self) -> None:
        for stream in self._streams:
            stream.synchronize()


def repeats_for(seconds: float) -> int:
    """Return how many calls of ``seconds`` make a turn long enough to be timed."""
    return max(1, int(ROUND_S / max(seconds, 1e-7)))


def rest() -> None:
    """Wait until no thread of this process works, ``REST_S`` at most."""
    end = perf_counter() + REST_S
    while perf_counter() < end:
        before = process_time()
        sleep(STEP_S)
        if process_time() - before < 0.4 * STEP_S:
            return


def _streams(inputs: Inputs) -> list[torch.cuda.Stream]:
    """Return the current stream of every GPU that ``inputs`` lie on."""
    if not torch.cuda.is_initialized():
        return []
    devices = dict.fromkeys(t.device for t in tensors_in(tuple(inputs)) if t.is_cuda)
    return [torch.cuda.current_stream(device) for device in devices]


def _is_early_win(
    turns: Sequence[Sequence[Turn]], racing: Sequence[int], is_late: bool, is_over: bool
) -> bool:
    """Whether fewer than ``MIN_ROUNDS`` show that all those ``racing`` win. ``is_late``: the early exit has come;
    ``is_over``: the budget is used up."""
    if is_late and all(_always_faster(turns, k) for k in racing):
        return True
    if len(turns[0]) < FEW_ROUNDS or len(racing) > 1 or not (is_late or is_over):
        return False
    return compare(turns[racing[0]], turns[0]).low > SURE_WIN


def _always_faster(turns: Sequence[Sequence[Turn]], k: int) -> bool:
    """Whether engine ``k`` was clearly faster in every round, and nothing disturbed the last one."""
    pairs = zip(turns[0], turns[k], strict=True)
    known = is_quiet(turns[0]) and is_quiet(turns[k])
    return known and all(mine.seconds * CLEAR_WIN < theirs.seconds for theirs, mine in pairs)


def _undecided(turns: Sequence[Sequence[Turn]], racing: Sequence[int]) -> list[int]:
    """Return the engines that need further rounds: none, or all unbeaten ones; 0 is the original.

    An engine is beaten if it takes longer than another one over the whole interval of their ratio.
    """
    good = [
        k
        for k in racing
        if all(j == k or compare(turns[k], turns[j]).high > 1 - PRECISION for j in racing)
    ]
    pairs = [(j, k) for j in good for k in good if j < k]
    is_alone = len(good) == 1  # its speed decides no other choice
    settled = all(_is_clear(compare(turns[k], turns[0]), is_alone) for k in good) and all(
        compare(turns[k], turns[j]).spread <= PRECISION for j, k in pairs
    )
    return [] if settled else good


def _may_hide_a_win(turns: Sequence[Sequence[Turn]], racing: Sequence[int]) -> bool:
    """Whether no engine is known to be faster than the original, but one may be."""
    found = [compare(turns[k], turns[0]) for k in racing]
    return all(one.low <= 1 for one in found) and any(one.middle > 1 + PRECISION for one in found)


def _is_clear(ratio: Ratio, is_alone: bool) -> bool:
    """Whether the ratio is known to ``PRECISION``; of an engine ``is_alone``, whether it is a sure win, or its
    logarithm is ``EVIDENT`` times its noise. Further rounds of such noise turn no win into a loss."""
    if is_alone and ratio.low > SURE_WIN:
        return True
    enough = 2 if ratio.spread <= PRECISION else EVIDENT if is_alone else inf
    return abs(log(ratio.middle)) > enough * ratio.spread


def _is_hopeless(seconds: float, original: float) -> bool:
    return seconds > HOPELESS_S and seconds > HOPELESS * original


def _gives_up(seconds: float, original: float) -> bool:
    return seconds > COMPILES_S and _is_hopeless(seconds, original)


def _timing(inputs: Inputs, original: _Side, engine: _Side) -> Timing:
    """Make a Timing from the rounds that both took part in; of an engine that was hopeless, from one call."""
    mine, theirs = engine.turns, original.turns
    if not mine:
        mine, theirs = [Turn(engine.once, engine.once)], [Turn(original.once, original.once)]
    ratio = compare(mine, theirs)
    milliseconds = 1e3 * ratio.seconds
    return Timing(
        shapes=tuple(tuple(t.shape) for t in tensors_in(tuple(inputs))),
        original_ms=milliseconds * ratio.middle,
        engine_ms=milliseconds,
        spread=ratio.spread,
        below=ratio.below,
        above=ratio.above,
        rounds=ratio.rounds,
        disturbed=ratio.disturbed,
    )

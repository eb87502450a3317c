# SPDX-License-Identifier: Apache-2.0
"""Peers prepared one after the other and then asked in turns, all within a limit of time.

    runners = prepared(peers, make, clock, console)       # {"eager": Runner(...), ...}; a failed one says why
    in_turns(runners, clock, rounds, lambda remote, limit: remote.ask("time", limit, seconds=0.1))

A peer that fails, or takes longer than what is left, is out; the others go on. Peers live in processes of
their own, so ``blade.timing``, which times functions of one process side by side, does not serve here.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from gpu.remote import PeerFailed, Remote


class Clock:
    """Seconds that are left of ``seconds``."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        return self._end - time.monotonic()


@dataclass
class Runner:
    """A peer; ``answer`` is what it said when it was prepared."""

    peer: str
    remote: Remote
    answer: dict[str, Any] = field(default_factory=dict)
    failed: str = ""

    def ask(self, command: str, limit: float, **kwargs: Any) -> Any:
        """The answer, or ``None`` if the peer has failed, now or before."""
        if self.failed:
            return None
        try:
            return self.remote.ask(command, limit, **kwargs)
        except PeerFailed as error:
            self.failed = f"{command}: {error}" if command not in str(error) else str(error)
            return None


def started(
    peers: Sequence[str], make: Callable[[str], Remote], clock: Clock, console: Console
) -> dict[str, Runner]:
    """All processes at once: they import side by side, and wait."""
    runners = {peer: Runner(peer, make(peer)) for peer in peers}
    begin = time.monotonic()
    for runner in runners.values():
        runner.ask("hello", limit=clock.left())
    console.print(f"{len(runners)} processes up in {time.monotonic() - begin:.1f} s", style="dim")
    return runners


def prepared(
    runners: dict[str, Runner],
    clock: Clock,
    reserve: float,
    console: Console,
    command: str = "prepare",
    **kwargs: Any,
) -> None:
    """Each is asked for ``command``, alone; ``reserve``: the seconds that must be left for what follows."""
    for runner in runners.values():
        limit = clock.left() - reserve
        if runner.failed:
            continue
        if limit < 5:
            runner.failed = "left out: no time was left to compile it"
            continue
        begin = time.monotonic()
        runner.answer = runner.ask(command, limit, **kwargs) or {}
        took = time.monotonic() - begin
        said = runner.failed or "ok"
        console.print(f"{runner.peer}: {said} ({took:.1f} s)", style="dim", markup=False)


def in_turns(
    runners: dict[str, Runner],
    clock: Clock,
    rounds: int,
    one: Callable[[Runner, float], None],
) -> int:
    """``one`` for each peer, beginning with another one in every round; how many rounds there was time for."""
    for number in range(rounds):
        alive = [r for r in runners.values() if not r.failed]
        start = number % max(1, len(alive))
        begin = time.monotonic()
        for runner in alive[start:] + alive[:start]:
            one(runner, max(5.0, clock.left()))
        if clock.left() < 1.5 * (time.monotonic() - begin):
            return number + 1
    return rounds


def close(runners: dict[str, Runner]) -> None:
    for runner in runners.values():
        runner.remote.close()

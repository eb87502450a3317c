# SPDX-License-Identifier: Apache-2.0
"""Work to do while another process works for this one.

with overlapping(prepare):
    ...; ask(); run_while_waiting(); answer = wait()          # the caller need not know about ``prepare``
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Work = Callable[[], object]

_work: ContextVar[Work | None] = ContextVar("work", default=None)


@contextmanager
def overlapping(work: Work) -> Iterator[None]:
    """The first ``run_while_waiting`` inside the block runs ``work``; without one it is not run."""
    token = _work.set(work)
    try:
        yield
    finally:
        _work.reset(token)


def run_while_waiting() -> None:
    """Run the registered work; call this just before waiting."""
    work = _work.get()
    if work is not None:
        _work.set(None)
        work()

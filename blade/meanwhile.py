# SPDX-License-Identifier: Apache-2.0
"""What there is to do while another process works for this one.

with meanwhile(prepare):
    ...; ask(); do_meanwhile(); answer = wait()          # whoever asks need not know what is prepared
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Work = Callable[[], object]

_work: ContextVar[Work | None] = ContextVar("work", default=None)


@contextmanager
def meanwhile(work: Work) -> Iterator[None]:
    """``work`` is done by the first ``do_meanwhile`` in here, or not at all."""
    token = _work.set(work)
    try:
        yield
    finally:
        _work.reset(token)


def do_meanwhile() -> None:
    """To be called by who waits next."""
    work = _work.get()
    if work is not None:
        _work.set(None)
        work()

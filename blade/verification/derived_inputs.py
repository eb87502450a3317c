# SPDX-License-Identifier: Apache-2.0
"""Try the derived inputs of verification on the original in a forked process first.

    begin(cluster, run, kinds)                # forks, and returns at once; conversion may go on meanwhile
    survives(cluster, case)                   # False: the case is left out, for the original and for engines
    answer(cluster, case)                     # the original's answer there, or None
    crashes(cluster.gm)                       # a Reason for each case that is left out
    end(cluster.gm)                           # by the caller of begin

Only the cases that ``verification_cases`` derives are tried: the samples are the user's, and capture tried
the probes. The results for a cluster hold for all of its engines. Clusters on a GPU are not tried: CUDA
cannot be used in a forked process.

The process keeps what the original answered, up to ``KEPT`` bytes, so that it is not asked again. It sends the
answers when the first is wanted: before, nothing would read them. A cluster that draws random numbers is asked again,
as it answers from the state of the generators.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils import _pytree as pytree

from blade.core.attempt import attempt
from blade.core.cluster import Cluster, has_late_sizes
from blade.core.reason import Code, Reason, Stage
from blade.process.forked_trial import ForkedRunner
from blade.report import shape_text
from blade.verification import index_guard as bounds
from blade.verification.cases import Case, derived_shapes, verification_cases
from blade.verification.rng_replay import draws

GIVEN = ("sample", "probe")
KEPT = 256 << 20  # bytes of answers

Tensors = Sequence[torch.Tensor]
Run = Callable[[Case], Tensors | None]


class _DerivedTrials:
    """The derived cases of one cluster, in their order, and their results so far."""

    def __init__(self, cluster: Cluster, run: Run, kinds: frozenset[str]) -> None:
        self._name, self._kinds = cluster.name, kinds
        self._inputs = cluster.samples, cluster.probes
        self._selects = has_late_sizes(cluster)
        self._run: Run | None = run
        planned = derived_shapes(*self._inputs, selects=self._selects)
        self._shapes = {name: shape_text(of) for kind, name, of in planned if kind in kinds}
        self._left = list(self._shapes)
        # only forked processes take any, each from the first on
        self._cases = enumerate(self._derived())
        self._kept: dict[int, Tensors] = {}  # there as well
        self._known: dict[str, str | None] = {}
        self._answers: dict[str, Tensors] = {}
        self._may_answer = not draws(cluster.gm)
        self._lock = threading.Lock()
        self._apart = ForkedRunner(self._try, answers=True)
        self.reasons: list[Reason] = []
        self._apart.post(*range(len(self._left)))

    @property
    def is_cut_short(self) -> bool:
        """Whether the trial ended before all results were known."""
        return self._run is None and bool(self._left)

    def end(self) -> None:
        """End the process, and release the inputs, the answers and the original."""
        self._close()
        self._answers = {}

    def _close(self) -> None:
        self._apart.close()
        self._run, self._inputs, self._may_answer = None, ((), ()), False
        self._cases = enumerate(())

    def survives(self, name: str) -> bool:
        """Wait for the result of the case; true for a name that is no derived case."""
        is_over = True
        with self._lock:
            try:
                while name in self._left:
                    self._learn_next()
                is_over = not self._left and not self._may_answer
            finally:
                if is_over:  # or interrupted
                    self._close()
            return self._known.get(name) is None

    def answer(self, name: str) -> Tensors | None:
        """What the original answered at the case; ``None`` where it raised, or if that is not known."""
        with self._lock:
            if self._may_answer:
                try:
                    self._fetch()
                finally:  # nothing more is wanted from the process
                    self._close()
            return self._answers.get(name)

    def _fetch(self) -> None:
        """Get all answers, once all results are known."""
        while self._left:
            self._learn_next()
        for name in self._shapes:
            self._apart.post(name)
            tried = self._apart.result()
            if not tried.answers:  # the process is gone, or its answer cannot be sent
                return
            [found] = tried.answers
            if found is not None:
                self._answers[name] = tuple(found)

    def _learn_next(self) -> None:
        self._learn(self._left[0], self._apart.result().why)
        self._left.pop(0)

    def left_out(self) -> frozenset[str]:
        """Names of all cases that the original does not survive."""
        return frozenset(name for name in self._shapes if not self.survives(name))

    def _learn(self, name: str, why: str | None) -> None:
        self._known[name] = why
        if why is not None:
            where = f"At {name} ({self._shapes[name]}), in a process apart,"
            detail = f"{where} the original {why}; nothing is verified there."
            self.reasons.append(Reason(Stage.VERIFY, Code.PROBE_CRASHED, None, self._name, detail))

    def _derived(self) -> Iterator[Case]:
        """Yield the cases that ``_shapes`` names."""
        every = verification_cases(*self._inputs, selects=self._selects)
        return (case for case in every if case.kind in self._kinds)

    def _try(self, item: int | str) -> Tensors | None:
        """Run a case by its place, or return what was kept of one by its name."""
        assert self._run is not None
        if isinstance(item, str):
            return self._kept.get(list(self._shapes).index(item))
        found = self._run(next(case for place, case in self._cases if place == item))
        if found is not None and self._may_answer:
            self._kept[item] = found
            if (
                sum(t.numel() * t.element_size() for kept in self._kept.values() for t in kept)
                > KEPT
            ):
                del self._kept[item]
        return None


def begin(cluster: Cluster, run: Run, kinds: frozenset[str]) -> None:
    """Try the derived cases of ``cluster`` that are of ``kinds``, once for all engines."""
    with _lock:
        known = _surveys.get(cluster.gm)
        if (known is not None and not known.is_cut_short) or not cluster.samples:
            return
        weights = (*cluster.gm.parameters(), *cluster.gm.buffers())
        if not can_try([*cluster.samples, *weights]):
            return
        found = attempt(
            Stage.VERIFY, None, cluster.name, lambda: _DerivedTrials(cluster, run, kinds)
        )
        if isinstance(found, _DerivedTrials):
            _surveys[cluster.gm] = found


def survives(cluster: Cluster, case: Case) -> bool:
    """Whether the original returned from ``case``; true also where nothing could be tried."""
    survey = _surveys.get(cluster.gm)
    return case.kind in GIVEN or survey is None or survey.survives(case.name)


def answer(cluster: Cluster, case: Case) -> Tensors | None:
    """The original's answer at a derived ``case`` that it survived; ``None`` if there is none, or it is unknown."""
    survey = _surveys.get(cluster.gm)
    return None if survey is None or case.kind in GIVEN else survey.answer(case.name)


def end(gm: torch.fx.GraphModule) -> None:
    """End the trial; results not known yet are not waited for, and ``begin`` would start again."""
    if (survey := _surveys.get(gm)) is not None:
        survey.end()


def left_out(gm: torch.fx.GraphModule) -> frozenset[str]:
    """Return the names of the cases at which the original ends the process."""
    survey = _surveys.get(gm)
    return frozenset() if survey is None else survey.left_out()


def crashes(gm: torch.fx.GraphModule) -> tuple[Reason, ...]:
    """Return the Reasons found so far."""
    survey = _surveys.get(gm)
    return () if survey is None else tuple(survey.reasons)


_lock = threading.Lock()
_surveys: WeakKeyDictionary[torch.nn.Module, _DerivedTrials] = WeakKeyDictionary()


def can_try(values: Iterable[Any]) -> bool:
    """Whether a forked process can use every tensor anywhere in ``values``."""
    tensors = (x for x in pytree.tree_leaves(list(values)) if isinstance(x, torch.Tensor))
    return not any(bounds.asserts(x.device) for x in tensors)

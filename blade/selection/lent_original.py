# SPDX-License-Identifier: Apache-2.0
"""The original as it answers the calls that no captured path does, until one of them changes it.

    lent = LentOriginal(captured)
    lent(inputs)                  # the tensors of its output
    lent.has_changed              # it has to answer all calls from now on

The paths hold the state at capture: a buffer that the original writes in a branch that no sample took is a constant of
theirs. A change of an attribute alone may show nowhere, as that of a table that grows with the inputs. Then the paths
stay, as long as the original answers the samples as before.
"""

import threading
from collections.abc import Sequence
from typing import Any

import torch

from blade.capture.equivalence import find_differences
from blade.capture.held_state import Changes, HeldState
from blade.capture.reference_model import ReferenceModel
from blade.capture.references import IN_A_ROW
from blade.core.captured import Reference
from blade.errors import InputError, warn_user
from blade.runtime.originals import give_up_paths


class LentOriginal:
    """Answers for ``number`` with a copy of ``original``: what it writes is not for the search that may still run.

    ``references``: its answers at capture.
    """

    def __init__(
        self, number: int, original: ReferenceModel, references: Sequence[Reference]
    ) -> None:
        self.model = original.sharing_weights()
        self.has_changed = False
        self._number, self._references = number, references[:IN_A_ROW]
        self._held = HeldState(self.model.module)
        self._lock = threading.Lock()

    def __call__(self, inputs: tuple[Any, ...]) -> list[torch.Tensor]:
        """The tensors of the output at ``inputs``, the entries of a sample."""
        try:
            return self.model.leaves(inputs)
        finally:
            self._look_for_changes()

    def _look_for_changes(self) -> None:
        with self._lock:
            changes = None if self.has_changed else self._held.changes()
            if changes is None:
                return
            self.has_changed = self._shows(changes)
            self._held = HeldState(self.model.module)
        if self.has_changed:
            give_up_paths(self._number)
            warn_user(
                f"A call that no captured path answers changed the state of {self.model.name}: the original model "
                "answers all calls from now on. Optimize it in this state, or with a sample that changes it."
            )

    def _shows(self, changes: Changes) -> bool:
        if changes.weights:
            return True
        if changes.attributes <= self.model.forgotten:
            return False
        try:
            now = self.model.sharing_weights()
        except InputError:  # it holds what cannot be copied
            return True
        return bool(find_differences(now.module, self._references, forward=now))

# SPDX-License-Identifier: Apache-2.0
"""Drop-ins for the modules of a program: a pipeline of diffusers or transformers, or any object that holds modules.

    pipe = accelerated_program(pipe, None, config, ())         # a copy, whose unet, vae.decoder, .. become drop-ins

The copy is a shallow one; its modules are copies that share the memory of the weights.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from blade.config import Config
from blade.core.reason import Code, Reason, Stage
from blade.dropin.drop_in import DropIn, state_of
from blade.dropin.recording import calls_of
from blade.dropin.sharing_copy import sharing_copy
from blade.dropin.state import PartDropIns, report_of_parts, stats_of_parts
from blade.dropin.swap_parts import PartSwapper
from blade.errors import InputError
from blade.report import DROP_IN, Report, rearm

COPY_ERRORS = (AttributeError, RuntimeError, TypeError, ValueError, NotImplementedError)


class ProgramState:
    """What ``blade.report``, ``stats``, ``wait`` and ``rearm`` ask of a program whose parts are drop-ins."""

    def __init__(self, name: str, parts: PartDropIns, reasons: Sequence[Reason] = ()) -> None:
        self.name = name
        self.parts = parts
        self.reasons = list(reasons)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy's parts are drop-ins of their own."""

    def __reduce__(self) -> Any:
        return type(None), ()

    def report(self) -> Report:
        return report_of_parts(self.name, self.reasons, self.parts, False)

    def stats(self) -> dict[str, dict[str, int]]:
        return stats_of_parts(self.parts)

    def wait(self, timeout: float | None) -> bool:
        return self.parts.wait(timeout)

    def rearm(self) -> None:
        for part in self.parts.drop_ins.values():
            rearm(part)


def modules_of(program: Any) -> dict[str, nn.Module]:
    """The modules that are attributes of ``program``, each once."""
    held = vars(program) if hasattr(program, "__dict__") else {}
    found: dict[int, str] = {}
    for name, value in held.items():
        if isinstance(value, nn.Module):
            found.setdefault(id(value), name)
    return {name: held[name] for name in found.values()}


def accelerated_program(
    program: Any, samples: Mapping[str, Any] | None, config: Config, names: Sequence[str]
) -> Any:
    """A copy of ``program`` with drop-ins for the modules it calls.

    With ``samples`` by part, or ``names`` of parts, for these; else for those that a measurement of its calls finds.
    Raises ``InputError`` if a part is no module.
    """
    own = copy.copy(program)
    reasons: list[Reason] = []
    roots: dict[str, nn.Module] = {}
    for name, module in modules_of(program).items():
        made = _copied(name, module, reasons)
        if made is not None:
            roots[name] = made
            for other, value in list(vars(program).items()):
                if value is module:
                    setattr(own, other, made)
    parts = PartSwapper(roots, config, own)
    wanted = [*names, *(samples or {})]
    for name in dict.fromkeys(wanted):
        swap_now(parts, name, None if samples is None else samples.get(name))
    if not wanted:
        parts.start()
    vars(own)[DROP_IN] = ProgramState(type(program).__name__, parts, reasons)
    return own


def swap_now(parts: PartSwapper, name: str, samples: Any) -> None:
    """Put a drop-in in the place of the part ``name``, optimized for ``samples`` if there are any.

    Raises ``InputError`` if there is no such part, or it cannot be a drop-in.
    """
    if not parts.knows(name):
        raise InputError(f"parts: there is no submodule {name!r}{parts.known_roots()}.")
    if not parts.swap(name):
        raise InputError(f"parts: {parts.reasons[-1].detail}")
    if samples is not None:
        state_of(parts.drop_ins[name]).optimize(calls_of(samples))


def _copied(name: str, module: nn.Module, reasons: list[Reason]) -> nn.Module | None:
    if isinstance(module, DropIn):
        return None
    try:
        return sharing_copy(module)
    except COPY_ERRORS as error:
        detail = f"{name} stays as it is: it cannot be deep-copied ({error})."
        reasons.append(
            Reason(Stage.CAPTURE, Code.UNKNOWN_TYPE, None, type(module).__name__, detail)
        )
        return None

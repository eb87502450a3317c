# SPDX-License-Identifier: Apache-2.0
"""Notes for reports, which follow an engine's program and are saved with it.

    program = annotated(program, layers)                 # the precision of each layer
    layers = precision_of(program)                       # () of an engine that was not quantized
    program = with_kernel_ops(program, {"loop_5f3a": "add relu"})
    kernel_ops_of(program)["loop_5f3a"]                  # "add relu"
    program = with_left_targets(program, {"sm_80": "Triton could not compile a kernel: .."})
    left_targets_of(program)                             # why it has no code for some of Config.gpu_targets

The runtime reads a program up to its ``end``. Each note is one line after it: a keyword and JSON.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from blade.report import LayerPrecision

_PRECISION, _KERNELS, _LEFT = "precision", "kernels", "left_targets"


def annotated(program: str, layers: Sequence[LayerPrecision]) -> str:
    """``program`` with a note of ``layers``."""
    return _with_note(program, _PRECISION, [asdict(layer) for layer in layers])


def precision_of(program: str) -> tuple[LayerPrecision, ...]:
    """The layers that ``annotated`` wrote into ``program``."""
    return tuple(LayerPrecision(**one) for one in _note(program, _PRECISION) or ())


def with_kernel_ops(program: str, ops: Mapping[str, str]) -> str:
    """``program`` with a note of the ops that each fused kernel computes."""
    return _with_note(program, _KERNELS, dict(ops)) if ops else program


def kernel_ops_of(program: str) -> dict[str, str]:
    """The ops that ``with_kernel_ops`` wrote into ``program``."""
    return dict(_note(program, _KERNELS) or {})


def with_left_targets(program: str, left: Mapping[str, str]) -> str:
    """``program`` with a note of the GPUs that it has no code for although it was asked to, and why."""
    return _with_note(program, _LEFT, dict(left)) if left else program


def left_targets_of(program: str) -> dict[str, str]:
    """The reasons that ``with_left_targets`` wrote into ``program``, by target."""
    return dict(_note(program, _LEFT) or {})


def _with_note(program: str, keyword: str, data: object) -> str:
    return f"{program.rstrip()}\n{keyword} {json.dumps(data, allow_nan=False)}\n"


def _note(program: str, keyword: str) -> Any:
    """The note with ``keyword``; ``None`` if there is none."""
    _, _, notes = program.partition("\nend\n")
    for line in notes.splitlines():
        found, _, text = line.partition(" ")
        if found == keyword:
            return json.loads(text)
    return None

# SPDX-License-Identifier: Apache-2.0
"""What was decided of each layer, written behind an engine's program, where it travels with the engine.

    program = annotated(program, layers)
    layers = precision_of(program)           # () of an engine that was not quantized

The runtime reads a program up to its ``end``; one line after it is ``precision`` and JSON.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict

from blade.report import LayerPrecision

_KEYWORD = "precision "


def annotated(program: str, layers: Sequence[LayerPrecision]) -> str:
    """``program`` with a note of ``layers``."""
    text = json.dumps([asdict(layer) for layer in layers], allow_nan=False)
    return f"{program.rstrip()}\n{_KEYWORD}{text}\n"


def precision_of(program: str) -> tuple[LayerPrecision, ...]:
    """What ``annotated`` wrote into ``program``."""
    _, found, text = program.rpartition(f"\nend\n{_KEYWORD}")
    return tuple(LayerPrecision(**one) for one in json.loads(text)) if found else ()

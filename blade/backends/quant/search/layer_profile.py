# SPDX-License-Identifier: Apache-2.0
"""The share of each layer in an engine's time, from the profile of its instructions.

    taken = profile_layers(engine, {"linear_3": weight}, inputs)
    taken.layers["linear_3"], taken.rest                  # seconds per call

An instruction belongs to the layers whose weights it reads, directly or packed. The time of one that reads
several (merged products) is split by their sizes. All other instructions are the rest: norms, attention,
quantization.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import torch

from blade.backends.quant.analysis.simulate import Inputs
from blade.timing.instruction_profile import profile


@dataclass(frozen=True)
class LayerProfile:
    """Seconds per call: ``layers`` by name, if some instruction reads their weight; ``rest``: all others."""

    layers: Mapping[str, float]
    rest: float


def profile_layers(
    engine: Any, weights: Mapping[str, torch.Tensor], inputs: Inputs
) -> LayerProfile:
    """The profile of a DISC engine; ``weights``: per layer, a constant of the engine or a view of one."""
    _, (_, _, program, *_), _, tensors = engine._get_method("__getstate__")()
    owners: dict[int, list[str]] = {}
    for layer, weight in weights.items():
        owners.setdefault(_address(weight), []).append(layer)
    constants = [owners.get(_address(t), []) for t in tensors[1:]]
    texts, seconds = profile(engine, inputs, inf)
    readers = _ConstantReaders(program, len(constants))
    layers: dict[str, float] = {}
    rest = 0.0
    for text, taken in zip(texts, seconds, strict=True):
        read = [layer for index in readers.constants(text) for layer in constants[index]]
        total = sum(weights[layer].numel() for layer in read)
        for layer in read:
            share = taken * weights[layer].numel() / total
            layers[layer] = layers.get(layer, 0.0) + share
        rest += 0.0 if read else taken
    return LayerProfile(layers, rest)


def _address(tensor: torch.Tensor) -> int:
    """The address of the first element, equal for all views that begin at the same element."""
    return tensor.data_ptr()


class _ConstantReaders:
    """The constants of a program (FORMAT.md) that an instruction reads."""

    def __init__(self, program: str, constants: int) -> None:
        self._packs: list[list[int]] = []
        self._slots: dict[int, list[int]] = {}
        for line in program.splitlines():
            words = line.split()
            if words[0] == "pack":
                self._packs.append(list(_filled(words)))
            elif words[0] == "slot" and words[2] == "const":
                index = int(words[3])
                known = [index] if index < constants else self._packs[index - constants]
                self._slots[int(words[1])] = known
            elif words[0] == "slot" and words[2] == "view":
                self._slots[int(words[1])] = self._slots.get(int(words[3]), [])
            elif words[0] == "end":
                return

    def constants(self, instruction: str) -> list[int]:
        """The constants, each once, in the order of the operands."""
        found = [c for slot in _operands(instruction.split()) for c in self._slots.get(slot, [])]
        return list(dict.fromkeys(found))


def _filled(pack: Sequence[str]) -> Iterator[int]:
    """``pack NAME DTYPE NUMEL NFILL`` and per fill ``C EXTENT NINT int..``: the constants C."""
    at = 5
    for _ in range(int(pack[4])):
        yield int(pack[at])
        at += 3 + int(pack[at + 2])


def _operands(words: Sequence[str]) -> Iterator[int]:
    """The slots of ``kernel NAME EXTENT COST SCRATCH NPTR slot..``, ``launch NAME GX GY GZ NPTR slot..`` or the
    tensors of ``call``, under a condition (``when R``) or not."""
    if words[0] == "when":
        words = words[2:]
    if words[0] in ("kernel", "launch"):
        yield from map(int, words[6 : 6 + int(words[5])])
        return
    for word in words[1:]:
        kind, _, text = word.partition(":")
        if kind in ("t", "lt", "lo") and text:
            yield from (int(one) for one in text.split(",") if one.isdecimal())

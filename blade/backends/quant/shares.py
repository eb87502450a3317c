# SPDX-License-Identifier: Apache-2.0
"""What each layer takes of an engine's time, from the profile of its instructions.

    taken = layer_seconds(engine, {"linear_3": weight}, inputs)
    taken.layers["linear_3"], taken.rest                  # seconds per call

An instruction belongs to the layers whose weights it reads, as they are or packed; one that reads several
(merged products) is shared by their sizes. What reads none is the rest: norms, attention, quantizing.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from blade.backends.quant.simulate import Inputs

ROUNDS = 5
ROUND_S = 0.002  # what a round takes at least


@dataclass(frozen=True)
class Taken:
    """Seconds per call: ``layers`` by name, those whose weight some instruction reads; ``rest`` is all else."""

    layers: Mapping[str, float]
    rest: float


def layer_seconds(engine: Any, weights: Mapping[str, torch.Tensor], inputs: Inputs) -> Taken:
    """Of an engine of DISC; ``weights`` are by layer, each one a constant of the engine or a view of one."""
    _, (_, _, program), _, tensors = engine._get_method("__getstate__")()
    owners: dict[int, list[str]] = {}
    for layer, weight in weights.items():
        owners.setdefault(_address(weight), []).append(layer)
    constants = [owners.get(_address(t), []) for t in tensors[1:]]
    texts, seconds = _profile(engine, inputs)
    readers = _Readers(program, len(constants))
    layers: dict[str, float] = {}
    rest = 0.0
    for text, taken in zip(texts, seconds, strict=True):
        read = [layer for index in readers.constants(text) for layer in constants[index]]
        total = sum(weights[layer].numel() for layer in read)
        for layer in read:
            share = taken * weights[layer].numel() / total
            layers[layer] = layers.get(layer, 0.0) + share
        rest += 0.0 if read else taken
    return Taken(layers, rest)


def _profile(engine: Any, inputs: Inputs) -> tuple[Sequence[str], list[float]]:
    """The instructions, and the median over rounds of their seconds."""
    with torch.no_grad():
        texts, once = engine.profile(list(inputs), 1)
        repeats = max(1, int(ROUND_S / max(sum(once), 1e-7)))
        rounds = [engine.profile(list(inputs), repeats)[1] for _ in range(ROUNDS)]
    return texts, [median(every) for every in zip(*rounds, strict=True)]


def _address(tensor: torch.Tensor) -> int:
    """The same for all views of a tensor that begin where it does."""
    return tensor.data_ptr()


class _Readers:
    """Which constants of a program (FORMAT.md) an instruction reads."""

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
        """Each once, in the order of the operands."""
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

# SPDX-License-Identifier: Apache-2.0
"""What a saved engine of AOTInductor consists of, besides the weights.

    data = Package(orders, names, constants, recipes, {"model.so": code}).to_bytes()
    package = read_package(data)        # BackendError: damaged, or not for this process

The library calls torch's C++ symbols and is compiled for the CPU at hand, so it serves the very version of
torch it was built with; what the CPU must have is in the program's ``isa`` line.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch

from blade.backends.archive import Archive, read
from blade.backends.inductor.folding import Recipes

LIBRARY = "model.so"
CALLS = "model.json"  # where AOTInductor looks for the calls of ops that it has no C interface of


@dataclass(frozen=True)
class Package:
    """``orders``: of the axes in memory, per input, as the code reads them (``None``: row-major).

    ``names``: what the code calls a constant -> what the graph called it. ``constants``: the graph's names of
    the engine's constants, in their order; ``recipes``: of all others.
    """

    orders: tuple[tuple[int, ...] | None, ...]
    names: Mapping[str, str]
    constants: tuple[str, ...]
    recipes: Recipes
    files: Mapping[str, bytes]

    def to_bytes(self) -> bytes:
        facts = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "files"}
        return Archive(_stamp(), facts, self.files).to_bytes()


def read_package(data: bytes) -> Package:
    """Raises ``BackendError`` for what this process cannot load."""
    archive = read(data, _stamp(), "AOTInductor")
    return Package(**{**archive.facts, "files": archive.files})


def _stamp() -> dict[str, str]:
    return {"torch": torch.__version__}

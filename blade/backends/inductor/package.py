# SPDX-License-Identifier: Apache-2.0
"""The payload of AOTInductor's engines: everything except the weights.

    data = InductorPackage(orders, names, constants, recipes, {"model.so": code}).to_bytes()
    package = read_package(data, 2)        # BackendError: damaged, or not for this process

The library calls torch's C++ symbols, so it runs only with the version of torch that built it. It is compiled
for this CPU; the program's ``isa`` line lists the features it needs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from blade.backends.inductor.folding import Recipes
from blade.backends.shared.archive import EngineArchive, read
from blade.backends.shared.library_payload import why_no_orders
from blade.errors import BackendError

LIBRARY = "model.so"
CALLS = "model.json"  # AOTInductor's file with calls of ops that lack a C interface


@dataclass(frozen=True)
class InductorPackage:
    """``orders``: per input, the order of axes in memory that the code reads (``None``: row-major).

    ``names``: the code's name of a constant -> the graph's. ``constants``: the graph's names of the engine's
    constants, in order. ``recipes``: how all other constants are computed.
    """

    orders: tuple[tuple[int, ...] | None, ...]
    names: Mapping[str, str]
    constants: tuple[str, ...]
    recipes: Recipes
    files: Mapping[str, bytes]

    def to_bytes(self) -> bytes:
        facts = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "files"}
        return EngineArchive(_stamp(), facts, self.files).to_bytes()


def read_package(data: bytes, constants: int) -> InductorPackage:
    """Read a package of an engine with ``constants`` constants; ``BackendError`` if it cannot run here."""
    archive = read(data, _stamp(), "AOTInductor", {LIBRARY, CALLS})
    facts, known = archive.facts, {one.name for one in fields(InductorPackage)} - {"files"}
    if set(facts) != known or LIBRARY not in archive.files or not _is_in_form(facts, constants):
        raise BackendError("what AOTInductor compiled is damaged (its head is in another form).")
    return InductorPackage(**facts, files=archive.files)


def _is_in_form(facts: Mapping[str, Any], constants: int) -> bool:
    """Whether orders, names and recipes are well-formed; ``folding`` checks the ops that recipes call."""
    names, own, recipes = facts["names"], facts["constants"], facts["recipes"]
    texts = isinstance(own, list) and all(isinstance(one, str) for one in own)
    return (
        why_no_orders(facts["orders"]) is None
        and (texts and len(own) == constants == len(set(own)))
        and (isinstance(names, dict) and all(isinstance(one, str) for one in names.values()))
        and isinstance(recipes, dict)
        and all(isinstance(steps, list) and all(map(_is_step, steps)) for steps in recipes.values())
    )


def _is_step(step: Any) -> bool:
    """Whether ``step`` is [name of an op, arguments, keyword arguments]."""
    kinds = (str, list, dict)
    return isinstance(step, list) and len(step) == 3 and all(map(isinstance, step, kinds))


def _stamp() -> dict[str, str]:
    return {"torch": torch.__version__}

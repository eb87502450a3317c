# SPDX-License-Identifier: Apache-2.0
"""Compile a cluster ahead of time with Inductor: C++, a shared library, and the list of weights it reads.

    compiled = compile_cluster(cluster)
    compiled.package, compiled.constants

Weights are not in the library: it receives those of the engine at load. Assumptions of Inductor about sizes
become guards of ``cluster.shape_env``, as in ``torch.compile``.
"""

import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from blade.backends.inductor.folding import Recipes, constants_read, needed_for, recorded
from blade.backends.inductor.package import CALLS, LIBRARY, InductorPackage
from blade.core.cluster import Cluster
from blade.core.reason import Code
from blade.core.torch_modes import oblivious_to_sizes
from blade.errors import Refused
from blade.graph.fx.exported_program import to_exported
from blade.graph.shapes.memory_format import order_of

_OPTIONS: dict[str, Any] = {
    "aot_inductor.package": True,  # lists all files it made
    "aot_inductor.package_constants_in_so": False,
    "cpp.dynamic_threads": True,  # torch.set_num_threads keeps its meaning
    "freezing": True,  # weights are constants, and packed
    "compile_threads": 1,  # no processes of its own
}
_UNGUARDED = "ignored_backward_guard"


@dataclass(frozen=True)
class CompiledPackage:
    """``constants``: the cluster's constants that the code reads, or that others are computed from."""

    package: InductorPackage
    constants: tuple[torch.Tensor, ...]


def compile_cluster(cluster: Cluster) -> CompiledPackage:
    """Compile ``cluster``. Raises what Inductor raises, and ``Refused`` if an assumption cannot be checked."""
    from torch._inductor import aot_compile

    program = to_exported(cluster)
    for node in program.graph.find_nodes(op="placeholder"):
        node.meta["val"].fake_mode.allow_non_fake_inputs = True  # as torch.export does
    unguarded = cluster.shape_env.counter[_UNGUARDED]
    # a size whose hint is 2 may be 1 all the same
    oblivious = oblivious_to_sizes()
    folders = tempfile.TemporaryDirectory(prefix="blade-inductor-")
    with oblivious, folders as folder, recorded() as recipes, torch.no_grad():
        options = {**_OPTIONS, "aot_inductor.output_path": folder}
        made: Any = aot_compile(
            program.module(check_guards=False), cluster.samples[0], options=options
        )
        library = next(Path(f) for f in made if isinstance(f, str) and f.endswith(".so"))
        files = {LIBRARY: _stripped(library)}
        if (calls := library.with_suffix(".json")).exists():
            files[CALLS] = calls.read_bytes()
        names = _names(library)
    if cluster.shape_env.counter[_UNGUARDED] != unguarded:
        detail = "Inductor relies on facts about sizes that it left no guard for."
        raise Refused(Code.CONVERSION_FAILED, detail)
    return _assemble(cluster, files, names, recipes)


def _stripped(library: Path) -> bytes:
    """The library without symbols and line numbers, which are most of it; compilers come with ``strip``."""
    stripped = library.with_suffix(".stripped")
    subprocess.run(["strip", "--strip-unneeded", "-o", stripped, library], check=True)
    return stripped.read_bytes()


def _names(library: Path) -> dict[str, str]:
    """The code's name of each constant -> the graph's name."""
    runner = torch._C._aoti.AOTIModelContainerRunnerCpu(str(library), 1)
    return runner.get_constant_names_to_original_fqns()


def _assemble(
    cluster: Cluster,
    files: Mapping[str, bytes],
    names: Mapping[str, str],
    recipes: Recipes,
) -> CompiledPackage:
    own = {str(n.target) for n in cluster.gm.graph.nodes if n.op == "get_attr"}
    recipes = needed_for(set(names.values()), recipes)
    read = (constants_read(recipes) | set(names.values())) - set(recipes)
    if unknown := read - own:
        detail = f"Inductor made constants whose origin is unknown: {', '.join(sorted(unknown))}."
        raise Refused(Code.CONVERSION_FAILED, detail)
    constants = {name: attrgetter(name)(cluster.gm) for name in sorted(read)}
    inputs = [n.meta["val"] for n in cluster.gm.graph.nodes if n.op == "placeholder"]
    orders = tuple(map(_order, inputs))
    package = InductorPackage(orders, names, tuple(constants), recipes, files)
    return CompiledPackage(package, tuple(constants.values()))


def _order(fake: torch.Tensor) -> tuple[int, ...] | None:
    shape, stride = ([_hint(n) for n in sizes] for sizes in (fake.shape, fake.stride()))
    return order_of(torch.empty_strided(shape, stride, device="meta"))


def _hint(size: int | torch.SymInt) -> int:
    return int(size.node.hint) if isinstance(size, torch.SymInt) else size

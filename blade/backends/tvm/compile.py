# SPDX-License-Identifier: Apache-2.0
"""Compile a cluster with TVM: exported program -> Relax -> schedules -> one shared library.

    compiled = compile_cluster(cluster)
    compiled.library, compiled.weights

Weights are parameters of the compiled function. Small constants are part of the code, so that TVM can fold them.
"""

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from blade.backends.tvm.schedule import schedules
from blade.core.cluster import Cluster
from blade.core.torch_modes import oblivious_to_sizes
from blade.graph.fx.exported_program import to_exported
from blade.runtime.engine import isa_features

# LLVM's names of vector instructions begin so
_VECTORS = ("avx", "amx", "fma", "f16c", "gfni", "vaes", "vpclmulqdq")
SMALL = 1024  # bytes; constants up to this size are part of the code


@dataclass(frozen=True)
class CompiledModule:
    """``weights`` are the function's parameters after the inputs; ``folded`` constants are in the code."""

    library: bytes
    weights: tuple[torch.Tensor, ...]
    folded: tuple[torch.Tensor, ...]


def compile_cluster(cluster: Cluster) -> CompiledModule:
    """Compile ``cluster``. Raises what TVM raises for ops and shapes that its converter does not support."""
    from tvm.relax.frontend.torch import from_exported_program

    # a size whose hint is 2 may be 1 all the same
    with oblivious_to_sizes():
        program = to_exported(cluster, row_major=True).run_decompositions(_foreign())
    _settle_sizes(program)
    names = _lift_weights(program)
    module = from_exported_program(
        program, keep_params_as_input=True, run_ep_decomposition=False, no_bind_return_tuple=False
    )
    held = dict(program.state_dict)
    weights = tuple(held.pop(name) for name in names)
    return CompiledModule(_build(module), weights, tuple(held.values()))


def _foreign() -> Any:
    """Decompositions of the ops that TVM's converter does not support."""
    from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter

    known = ExportedProgramImporter().create_convert_map()
    table = torch.export.default_decompositions()
    for op in list(table):
        if str(op).removeprefix("aten.") in known:
            del table[op]
    return table


def _settle_sizes(program: ExportedProgram) -> None:
    """Replace symbols that are known to be constant by numbers: TVM treats all others as variables."""
    for node in program.graph.find_nodes(op="placeholder"):
        fake = node.meta["val"]
        node.meta.pop("tensor_meta", None)  # has precedence over ``val``
        with fake.fake_mode:
            sizes = [_settled(size) for size in fake.shape]
            node.meta["val"] = torch.empty(sizes, dtype=fake.dtype, device=fake.device)


def _settled(size: int | torch.SymInt) -> int | torch.SymInt:
    if isinstance(size, int):
        return size
    number = size.node.shape_env.simplify(size.node.expr)
    return int(number) if number.is_Integer else size


def _lift_weights(program: ExportedProgram) -> list[str]:
    """Turn large buffers into parameters, in order; the converter can keep these out of the code."""
    names = []
    for spec in program.graph_signature.input_specs:
        if spec.kind is not InputKind.BUFFER or spec.target is None:
            continue
        if program.state_dict[spec.target].nbytes > SMALL:
            spec.kind, spec.persistent = InputKind.PARAMETER, None
            names.append(spec.target)
    return names


def _build(module: Any) -> bytes:
    import tvm

    target = host_target()
    with target:
        executable = tvm.compile(module, target=target, relax_pipeline=_pipeline(target))
    with tempfile.TemporaryDirectory(prefix="blade-tvm-") as folder:
        path = Path(folder, "model.so")
        executable.export_library(str(path))
        return path.read_bytes()


def host_target() -> Any:
    """This machine as a target of TVM's code generator.

    LLVM knows it by its model. Vector instructions of that model which this machine does not have, as a
    hypervisor can hide them, are switched off.
    """
    import tvm
    from tvm.target.codegen import llvm_get_cpu_features, llvm_get_system_cpu

    model = {"kind": "llvm", "mcpu": str(llvm_get_system_cpu())}
    features = map(str, llvm_get_cpu_features(tvm.target.Target(model)))
    hidden = _not_here([name for name in features if name.startswith(_VECTORS)])
    return tvm.target.Target(
        {**model, "mattr": [f"-{name}" for name in hidden]} if hidden else model
    )


def _not_here(features: Iterable[str]) -> list[str]:
    """Those of LLVM's ``features`` that this CPU lacks, sorted; Linux has ``avx512_bf16`` for ``avx512bf16``."""
    here = {name.replace("_", "") for name in isa_features()}
    return sorted(name for name in features if name.replace("-", "") not in here)


def _pipeline(target: Any) -> Any:
    """TVM's pipeline for CPUs, with our schedules between fusion and lowering."""
    import tvm
    from tvm.relax.backend.cpu_generic import pipeline

    @tvm.transform.module_pass(opt_level=0)  # type: ignore[untyped-decorator]
    def run(module: Any, context: Any) -> Any:
        passes = [
            *pipeline.library_dispatch_passes(target),
            *pipeline.legalize_passes(target),
            schedules(),
            *pipeline.dataflow_lower_passes(target),
            *pipeline.finalize_passes(target),
        ]
        return tvm.transform.Sequential(passes)(module)

    return run

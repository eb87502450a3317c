# SPDX-License-Identifier: Apache-2.0
"""Optimized modules and drop-ins as an ExportedProgram, and that as a file.

write_exported(exported(for_export(optimized)), "model.pt2")
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree

from blade.core.examples import samples_from
from blade.dropin.drop_in import DropIn
from blade.errors import InputError
from blade.report import EXAMPLES, READY, report
from blade.saving.derive_results import Sample
from blade.saving.whole_model import WholeModel, whole_model


def for_export(module: nn.Module) -> WholeModel:
    """``module`` for ``torch.export``; raises ``InputError`` if it has no such form."""
    optimized = module.optimized if isinstance(module, DropIn) else module
    if report(optimized).state != READY:
        raise InputError(
            "module: its engines are still being made: wait for them with blade.wait(module)."
        )
    assert isinstance(optimized, torch.jit.ScriptModule)
    return whole_model(optimized, _samples(optimized))


def _samples(module: torch.jit.ScriptModule) -> list[Sample]:
    text = getattr(module, EXAMPLES, None)
    if not isinstance(text, str):
        raise InputError(
            "module: it carries no sizes of its samples: their arguments hold more than tensors, constants, tuples, "
            "lists and dicts, or an older version optimized it. Optimize it again, or save it as TorchScript "
            "(format='torchscript')."
        )
    return samples_from(text)


def exported(whole: WholeModel) -> ExportedProgram:
    """The program of ``whole``: every size is dynamic but those that the module takes for numbers."""
    tensors = iter(range(len(pytree.tree_leaves(whole.sample))))

    def dynamic(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return None
        index = next(tensors)
        axes = [axis for axis in range(leaf.dim()) if (index, axis) not in whole.fixed]
        return dict.fromkeys(axes, Dim.DYNAMIC) or None

    shapes = pytree.tree_map(dynamic, whole.sample)
    with torch.no_grad():
        return torch.export.export(whole, whole.sample, dynamic_shapes=shapes, strict=False)


def write_exported(program: ExportedProgram, path: str | os.PathLike[str]) -> None:
    """Write the archive of ``torch.export.save``."""
    torch.export.save(program, path)


def write_package(program: ExportedProgram, path: str | os.PathLike[str]) -> None:
    """Compile ``program`` and write the package, which ``torch::inductor::AOTIModelPackageLoader`` reads."""
    torch._inductor.aoti_compile_and_package(program, package_path=os.fspath(path))

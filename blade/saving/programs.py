# SPDX-License-Identifier: Apache-2.0
"""Optimized modules and drop-ins as an ExportedProgram, and that as a file.

write_exported(exported(for_export(optimized)), "model.pt2")
"""

from __future__ import annotations

import inspect
import os
import warnings
from typing import Any

import torch
from torch import nn
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree

from blade.core.examples import samples_from
from blade.core.torch_modes import oblivious_to_sizes
from blade.dropin.drop_in import DropIn
from blade.errors import InputError
from blade.report import EXAMPLES, READY, report
from blade.saving.derive_results import Sample
from blade.saving.drop_in_model import DropInModel, drop_in_model
from blade.saving.parts import PartsModel, parts_model
from blade.saving.whole_model import WholeModel, whole_model

Exportable = WholeModel | DropInModel | PartsModel


def for_export(module: nn.Module, compile_glue: bool = False) -> Exportable:
    """``module`` for ``torch.export``; raises ``InputError`` if it has no such form.

    ``compile_glue``: the ops between its clusters are ops of the program.
    """
    optimized = module.optimized if isinstance(module, DropIn) else module
    if report(optimized).state != READY:
        raise InputError(
            "module: its engines are still being made: wait for them with blade.wait(module)."
        )
    assert isinstance(optimized, torch.jit.ScriptModule)
    samples = _samples(optimized)
    if compile_glue:
        return parts_model(optimized, samples)
    if isinstance(module, DropIn):
        return drop_in_model(module, samples)
    return whole_model(optimized, samples)


def _samples(module: torch.jit.ScriptModule) -> list[Sample]:
    text = getattr(module, EXAMPLES, None)
    if not isinstance(text, str):
        raise InputError(
            "module: it carries no sizes of its samples: their arguments hold more than tensors, constants, tuples, "
            "lists and dicts, or an older version optimized it. Optimize it again, or save it as TorchScript "
            "(format='torchscript')."
        )
    return samples_from(text)


def exported(module: Exportable) -> ExportedProgram:
    """The program of ``module``: every size is dynamic but those that the module takes for numbers."""
    whole = module.whole if isinstance(module, DropInModel) else module
    args, kwargs = module.sample if isinstance(module, DropInModel) else (module.sample, {})
    tensors = [x for x in pytree.tree_leaves(whole.sample) if isinstance(x, torch.Tensor)]
    places = {id(tensor): place for place, tensor in enumerate(tensors)}

    # the ops between clusters take some sizes for numbers, or for equal
    kind = Dim.AUTO if isinstance(module, PartsModel) else Dim.DYNAMIC

    def dynamic(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return None
        axes = [a for a in range(leaf.dim()) if (places[id(leaf)], a) not in whole.fixed]
        return dict.fromkeys(axes, kind) or None

    given = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    shapes = {name: pytree.tree_map(dynamic, value) for name, value in given.items()}
    # without it every size but 0 and 1 would be promised, and checked, to be neither
    oblivious = oblivious_to_sizes()
    with oblivious, torch.no_grad():
        return torch.export.export(module, args, kwargs, dynamic_shapes=shapes, strict=False)


def write_exported(program: ExportedProgram, path: str | os.PathLike[str]) -> None:
    """Write the archive of ``torch.export.save``."""
    torch.export.save(program, path)


def write_package(program: ExportedProgram, path: str | os.PathLike[str]) -> None:
    """Compile ``program`` and write the package, which ``torch::inductor::AOTIModelPackageLoader`` reads."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's own uses of what it deprecates
        torch._inductor.aoti_compile_and_package(program, package_path=os.fspath(path))

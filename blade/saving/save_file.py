# SPDX-License-Identifier: Apache-2.0
"""``blade.save``: optimized modules and drop-ins as files, in four formats.

blade.save(optimized, "model.pt")                      # TorchScript, as torch.jit.save
blade.save(optimized, "model.pt2")                     # an archive of torch.export
blade.save(optimized, "model.pt2", format="aoti")      # a package of AOTInductor, for C++ without Python
blade.save(accelerated, "model.blade")                 # a drop-in
model = blade.load(path)                               # any of them
"""

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from blade.core import torchscript
from blade.dropin.drop_in import DropIn, state_of
from blade.dropin.files import save as save_drop_in
from blade.errors import ConfigError, InputError
from blade.report import report
from blade.saving.programs import exported, for_export, write_exported, write_package

FilePath = str | os.PathLike[str]

FORMATS = ("torchscript", "pt2", "aoti", "blade")
_SUFFIXES: Mapping[str, str] = {".pt2": "pt2"}


def save(
    module: nn.Module, path: FilePath, format: str | None = None, *, compile_glue: bool = False
) -> None:
    """Write what ``blade.optimize`` or ``blade.accelerate`` returned to ``path``, with its weights, engines, guards
    and originals.

    ``format`` is one of

    * ``"torchscript"``: the file of ``torch.jit.save``; the default of optimized modules.
    * ``"pt2"``: an archive of ``torch.export``, for ``torch.export.load`` after ``import blade``; the default of
      paths that end in ``.pt2``.
    * ``"aoti"``: a package of AOTInductor, for ``torch._inductor.aoti_load_package`` and for C++ without Python
      (``torch::inductor::AOTIModelPackageLoader``). It needs a C++ compiler here, and none where it is loaded.
    * ``"blade"``: a drop-in with its structures of arguments and outputs; the default of drop-ins.

    ``"pt2"`` and ``"aoti"`` hold the whole module in one op, ``blade::run_model``: where an engine does not answer (a
    guard, another CPU, a missing library) the original does, as in TorchScript. Of a drop-in they hold the calls
    of the kind that is called most. Results have no gradients. A size is dynamic unless the module takes it for a
    number; arguments that are no tensors are constants of the program.

    ``compile_glue``, with ``"aoti"``: AOTInductor compiles the ops between the clusters, and each cluster is an op that
    owns its engine and its original. Such a package raises at sizes between which other relations hold than at the
    sample; a module of several paths has none.

    Raises ``ConfigError`` for an unknown format, and ``InputError`` for a module that has no such form.
    """
    known = _format(module, path, format)
    if compile_glue and known != "aoti":
        raise ConfigError(f"compile_glue: it goes with format='aoti', not with {known!r}.")
    if known == "blade":
        save_drop_in(module, path)
    elif known == "torchscript":
        torchscript.save(_optimized(module), path)
    else:
        program = exported(for_export(module, compile_glue))
        (write_exported if known == "pt2" else write_package)(program, path)


def _format(module: nn.Module, path: FilePath, format: str | None) -> str:
    is_drop_in = isinstance(module, DropIn)
    if not is_drop_in and not isinstance(module, torch.jit.ScriptModule):
        state_of(module)  # raises
    if format is None:
        suffix = Path(path).suffix.lower()
        return _SUFFIXES.get(suffix, "blade" if is_drop_in else "torchscript")
    if format not in FORMATS:
        raise ConfigError(f"format: {format!r} is none of {', '.join(map(repr, FORMATS))}.")
    if format == "blade" and not is_drop_in:
        raise InputError(
            "module: the format 'blade' is of drop-ins of blade.accelerate; an optimized module is saved as "
            "'torchscript', 'pt2' or 'aoti'."
        )
    return format


def _optimized(module: nn.Module) -> torch.jit.ScriptModule:
    """The optimized module to save as TorchScript."""
    if isinstance(module, DropIn):
        return module.optimized
    report(module)
    assert isinstance(module, torch.jit.ScriptModule)
    return module

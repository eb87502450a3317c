# SPDX-License-Identifier: Apache-2.0
"""``blade.load``: every file of ``blade.save``, by what is in it.

    model = blade.load("model.pt2")

A process that only runs files does not import the compiler.
"""

import os
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from blade.core import torchscript
from blade.errors import InputError

if TYPE_CHECKING:
    from blade.config import Config

FilePath = str | os.PathLike[str]


def load(path: FilePath, model: nn.Module | None = None, config: "Config | None" = None) -> Any:
    """Read a file of ``blade.save``, in whatever format it is.

    Of TorchScript it returns the ``ScriptModule``, of ``"pt2"`` and ``"aoti"`` a module that is called like it, with
    positional or keyword arguments. All of these work with ``blade.report``, ``blade.stats`` and ``blade.rearm``.

    Of a drop-in: with ``model``, of the same weights, return its drop-in, as ``blade.accelerate`` does. Without it
    return a module that answers the kinds of calls in the file and raises ``RuntimeError`` at others. A file is a
    program: load only those that you trust.

    Raises ``InputError`` if ``path`` is no such file, if ``model`` is given for another format, if its weights are
    others, or if a class of the outputs is not imported in this process.
    """
    known = format_of(path)
    if known == "blade":
        from blade.dropin.files import (
            load as load_drop_in,
        )  # late: the compiler, which other files need not

        return load_drop_in(path, model, config)
    if model is not None or config is not None:
        raise InputError(
            f"model: {os.fspath(path)} is of the format {known!r}, which answers without the model; model and config "
            "go with files of drop-ins (format 'blade')."
        )
    if known == "torchscript":
        return torchscript.load(path)
    from blade.saving.loaded import (
        load_exported,
        load_package,
    )  # late: torch.export takes long to import

    return load_exported(path) if known == "pt2" else load_package(path)


def format_of(path: FilePath) -> str:
    """The format of a file, by what is in it. Raises ``InputError``."""
    where = Path(path)
    if not where.is_file():
        what = "this is a folder" if where.is_dir() else "there is no such file"
        raise InputError(f"path: {where}: {what}.")
    try:
        with zipfile.ZipFile(where) as archive:
            names = archive.namelist()
    except zipfile.BadZipFile as error:
        raise InputError(f"path: {where} is no file of blade.save ({error}).") from error
    if "dropin.json" in names:
        return "blade"
    inside = {name.partition("/")[2] for name in names}
    if any(name.startswith("data/aotinductor/") for name in inside):
        return "aoti"
    if any(name.startswith("models/") for name in inside):
        return "pt2"
    if {"data.pkl", "constants.pkl"} <= inside:
        return "torchscript"
    raise InputError(
        f"path: {where} is no file of blade.save: it holds {', '.join(sorted(names)[:3])}, .. Checkpoints of weights "
        "(state_dict) are loaded by torch.load."
    )

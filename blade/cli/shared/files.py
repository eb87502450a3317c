# SPDX-License-Identifier: Apache-2.0
"""Read and write models, samples and optimized modules; anything wrong with a file raises ``InputError``.

model = read_model(Path("MODEL.pt"), allow_pickle=False)     # may run code of the file, as calling it does
shown = read_report(Path("OUT.pt"))                          # runs nothing
samples = read_samples(Path("SAMPLES.pt"), allow_pickle=False)
write(Path("OUT.pt"), lambda path: torch.jit.save(optimized, path), force=False)
"""

import os
import pickle
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from blade.core import torchscript
from blade.core.attempt import attempt
from blade.core.reason import Code, Reason, Stage
from blade.errors import InputError
from blade.program.saved_file import read_saved
from blade.report import Report

SAMPLES = (
    "a torch.save of a tensor, a tuple of positional arguments, a dict of keyword arguments, or a "
    "list of such samples"
)


def read_model(path: Path, *, allow_pickle: bool, to_eval: bool = False) -> torch.nn.Module:
    """The model in ``path``, on this machine's devices."""
    kind = kind_of(path)
    model: torch.nn.Module
    if kind == "torchscript":
        model = read_torchscript(path)
    elif kind == "pickle":
        model = _read_pickled(path, allow_pickle)
    else:
        raise InputError(
            f"{path}: this is {kind}; a TorchScript file (torch.jit.save of a traced or scripted model) or, with "
            "--allow-pickle, a torch.save of an nn.Module is expected"
        )
    return model.eval() if to_eval else model


def read_torchscript(path: Path) -> torch.jit.ScriptModule:
    """Read a TorchScript file; tensors of a device that this machine lacks are loaded to the CPU."""
    device = None if torch.cuda.is_available() else "cpu"
    found = _tried(path, lambda: torchscript.load(path, device))
    if isinstance(found, Reason):
        raise InputError(f"{path}: this TorchScript file cannot be loaded: {_why(found)}")
    assert isinstance(found, torch.jit.ScriptModule)
    return found


def read_report(path: Path) -> Report:
    """The report in a file that ``optimize`` wrote. Nothing in the file is executed."""
    if kind_of(path) != "torchscript":
        raise InputError(f"{path}: {_not_optimized}")
    text = read_saved(path).report
    if text is None:
        raise InputError(f"{path}: {_not_optimized}")
    try:
        return Report.from_json(text)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{path}: its report cannot be read ({error}); it was written by another version of blade, "
            "so optimize the model again"
        ) from error


_not_optimized = (
    "a file written by `python -m blade optimize` (or torch.jit.save of what blade.optimize returned) is "
    "expected, and this one carries no report of blade"
)


def read_samples(path: Path, *, allow_pickle: bool) -> Any:
    """Samples as ``blade.optimize`` takes them."""
    if (kind := kind_of(path)) != "pickle":
        what = "a model in TorchScript" if kind == "torchscript" else kind
        raise InputError(f"{path}: {SAMPLES} is expected, and this is {what}")
    found = _tried(path, lambda: _load(path, weights_only=not allow_pickle))
    if isinstance(found, Reason):
        hint = "" if allow_pickle else "; objects of other classes need --allow-pickle"
        raise InputError(f"{path}: {SAMPLES} is expected{hint} ({_why(found)})")
    for one in found if isinstance(found, list) else [found]:
        if not isinstance(one, (torch.Tensor, tuple, Mapping)):
            what = "a list with a" if isinstance(found, list) else "a"
            raise InputError(
                f"{path}: {SAMPLES} is expected, and it holds {what} {type(one).__name__}"
            )
    if found == []:
        raise InputError(f"{path}: it holds an empty list; give at least one sample")
    return found


def check_output(path: Path, *, force: bool) -> None:
    """Raise ``InputError`` before any work if the result could not be written."""
    if path.is_dir():
        raise InputError(f"{path}: this is a folder; name the file to write")
    if path.exists() and not force:
        raise InputError(f"{path}: the file exists; give another name, or --force to overwrite it")
    folder = path.resolve().parent
    if not folder.is_dir():
        raise InputError(f"{path}: there is no folder {folder}; create it first")
    if not os.access(folder, os.W_OK):
        raise InputError(f"{path}: the folder {folder} is not writable")


def write(path: Path, save: Callable[[Path], object], *, force: bool) -> None:
    """Call ``save`` with another name in the same folder, then rename: readers never see a partial file."""
    check_output(path, force=force)
    target = path.resolve()
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    os.close(handle)
    try:
        save(Path(name))
        os.chmod(name, 0o666 & ~_umask())
        check_output(path, force=force)  # it may have appeared meanwhile
        os.replace(name, target)
    except OSError as error:
        raise InputError(f"{path}: it cannot be written: {error}") from error
    finally:
        with suppress(OSError):
            os.unlink(name)


def check_readable(path: Path) -> None:
    if path.is_dir():
        raise InputError(f"{path}: this is a folder, not a file")
    if not path.exists():
        raise InputError(f"{path}: there is no such file")
    if not os.access(path, os.R_OK):
        raise InputError(f"{path}: the file is not readable by this user")


def kind_of(path: Path) -> str:
    """``"torchscript"``, ``"pickle"`` (torch.save), or a phrase that describes the file otherwise."""
    check_readable(path)
    if not zipfile.is_zipfile(path):
        with path.open("rb") as file:
            head = file.read(16)
        if head[:1] == b"\x80":  # torch.save before 1.6
            return "pickle"
        if path.suffix == ".safetensors" or head[8:9] == b"{":
            return "a file of weights alone (safetensors)"
        return "neither TorchScript nor written by torch.save"
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
    if any("/code/" in name for name in names) and any(n.endswith("constants.pkl") for n in names):
        return "torchscript"
    if any("archive_format" in name or "exported_program" in name for name in names):
        return "a program of torch.export"
    if any(name.endswith("data.pkl") for name in names):
        return "pickle"
    return "an archive that is neither TorchScript nor written by torch.save"


def _read_pickled(path: Path, allow_pickle: bool) -> torch.nn.Module:
    plain = _tried(path, lambda: _load(path, weights_only=True))
    if not isinstance(plain, Reason):
        what = "only weights" if isinstance(plain, Mapping) else f"a {type(plain).__name__}"
        raise InputError(
            f"{path}: the file holds {what}, not a model; load them into the model in Python and save "
            "torch.jit.trace(model.eval(), sample) or torch.jit.script(model.eval())"
        )
    if not allow_pickle:
        raise InputError(
            f"{path}: this is a pickled object, and reading it would run code that the file contains; "
            "add --allow-pickle if you trust it, or save the model as TorchScript"
        )
    found = _tried(path, lambda: _load(path, weights_only=False))
    if isinstance(found, Reason):
        raise InputError(
            f"{path}: the pickled model cannot be read: {_why(found)}; the module that defines its class "
            "has to be importable (PYTHONPATH) under the name it was saved with"
        )
    if not isinstance(found, torch.nn.Module):
        raise InputError(
            f"{path}: the file holds a {type(found).__name__}, not a torch.nn.Module; save the model itself"
        )
    return found


def _load(path: Path, *, weights_only: bool) -> Any:
    device = None if torch.cuda.is_available() else "cpu"
    return torch.load(path, map_location=device, weights_only=weights_only)


def _tried(path: Path, fn: Callable[[], Any]) -> Any:
    """Call ``fn``; reading may run code of the file, so it may raise anything."""
    return attempt(Stage.LOAD, None, str(path), fn, code=Code.CORRUPT_PAYLOAD)


def _why(reason: Reason) -> str:
    """The error of ``reason`` in one line."""
    text = (reason.error or reason.detail).partition("\n  at ")[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0][:300] if lines else pickle.UnpicklingError.__name__


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask

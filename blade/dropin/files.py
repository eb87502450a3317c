# SPDX-License-Identifier: Apache-2.0
"""``blade.save`` and ``blade.load``: what ``blade.accelerate`` made, in a file without code of the model's.

    blade.save(accelerated, "model.blade")
    model = blade.load("model.blade", model)       # a drop-in again: what the file does not answer, ``model`` does
    model = blade.load("model.blade")              # without the model: other calls raise

The file is a zip archive: ``dropin.json``, and for each kind of call a TorchScript file.
"""

import inspect
import io
import json
import os
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from blade.config import Config
from blade.core import torchscript
from blade.core.structure import class_named
from blade.dropin.accelerate import drop_in_of
from blade.dropin.call_kind import CallKind, CallReader
from blade.dropin.drop_in import state_of
from blade.dropin.nested import FIELDS, NotNested, Structure
from blade.dropin.prepare import Prepared
from blade.errors import InputError

FORMAT = 2
_INDEX = "dropin.json"
_ITEMS: Mapping[str, type] = {"tuple": tuple, "list": list}
_CONSTANTS: Mapping[str, type] = {
    "NoneType": type(None),
    "bool": bool,
    "int": int,
    "float": float,
    "str": str,
}
_PLACES = {kind.name: kind for kind in inspect._ParameterKind}

Path = str | os.PathLike[str]


def save(module: nn.Module, path: Path) -> None:
    """Write what ``blade.accelerate`` returned to ``path``: the optimized modules, with their weights, and the
    structures of arguments and outputs.

    Raises ``InputError`` for anything else, and while no call is optimized yet.
    """
    state = state_of(module)
    found = state.most_called()
    if not found:
        raise InputError(
            "module: no call is optimized yet, so there is nothing to save. Call it, then blade.wait(module)."
        )
    index = {
        "format": FORMAT,
        "model": type(module).__name__,
        "parameters": _parameters(inspect.signature(state.model.forward)),
        "weights": _checksums(state.model),
        "kinds": [_written(one) for one in found],
    }
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(_INDEX, json.dumps(index, allow_nan=False))
        for place, one in enumerate(found):
            archive.writestr(f"kind_{place}.pt", torchscript.to_bytes(one.module))


def load(path: Path, model: nn.Module | None = None, config: Config | None = None) -> Any:
    """Read a file of ``blade.save``.

    With ``model``, of the same weights, return its drop-in, as ``blade.accelerate`` does. Without it return a module
    that answers the kinds of calls in the file and raises ``RuntimeError`` at others. A file is a program: load
    only those that you trust.

    Raises ``InputError`` if ``path`` is no such file, if the weights of ``model`` are others, or if a class of the
    outputs is not imported in this process.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            index = json.loads(archive.read(_INDEX))
            if index["format"] != FORMAT:
                raise InputError(
                    f"path: {os.fspath(path)} has format {index['format']}; this version reads {FORMAT}."
                )
            prepared = [
                _read(one, archive.read(f"kind_{place}.pt"))
                for place, one in enumerate(index["kinds"])
            ]
    except (zipfile.BadZipFile, KeyError, json.JSONDecodeError) as error:
        raise InputError(
            f"path: {os.fspath(path)} is no file of blade.save ({error}). torch.jit.load reads those of "
            "torch.jit.save."
        ) from error
    if model is None:
        return LoadedDropIn(index["model"], _signature(index["parameters"]), prepared)
    if not isinstance(model, nn.Module):
        raise InputError(f"model: a torch.nn.Module is expected, got {type(model).__name__}.")
    if (other := _first_difference(index["weights"], _checksums(model))) is not None:
        raise InputError(
            f"model: {other!r} has other values than in {os.fspath(path)}; give the model that was saved."
        )
    return drop_in_of(model, prepared, config)


class LoadedDropIn(nn.Module):
    """Answers the calls that a file has optimized modules for, as the model did; it has no other attributes."""

    def __init__(self, name: str, signature: inspect.Signature, prepared: list[Prepared]) -> None:
        super().__init__()
        self._name = name
        self._reader = CallReader(signature)
        self._reader.numbers = frozenset().union(*(one.kind.numbers() for one in prepared))
        self._prepared = {one.kind: one for one in prepared}
        self.__signature__ = signature
        self.training = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        try:
            call = self._reader.read(args, kwargs)
        except NotNested as error:
            raise RuntimeError(f"{self._name}: the file answers no call with {error}.") from error
        found = self._prepared.get(call.kind)
        if found is None:
            known = "; ".join(map(str, self._prepared))
            raise RuntimeError(
                f"{self._name}: the file answers no call {call.kind}. It answers: {known}. "
                "blade.load(path, model) lets the model answer others."
            )
        return found.restored(call, found.module(*call.tensors))

    def extra_repr(self) -> str:
        return "\n".join([self._name, *map(str, self._prepared)])


def _written(prepared: Prepared) -> dict[str, Any]:
    kind, (structure, after) = prepared.kind, prepared.outcome
    return {
        "names": kind.names,
        "structures": [_text(one) for one in kind.structures],
        "tensors": [[_name(dtype), str(device), rank] for dtype, device, rank in kind.tensors],
        "output": _text(structure),
        "after": after,
    }


def _read(written: Mapping[str, Any], saved: bytes) -> Prepared:
    kind = CallKind(
        tuple(written["names"]),
        tuple(map(_structure, written["structures"])),
        tuple(
            (getattr(torch, dtype), torch.device(device), rank)
            for dtype, device, rank in written["tensors"]
        ),
    )
    module = torchscript.load(io.BytesIO(saved))
    outcome = (_structure(written["output"]), _tuples(written["after"]))
    return Prepared(kind, module, outcome, 0)


def _text(structure: Structure) -> list[Any]:
    how = structure[0]
    if how == "constant":
        _, kind, value = structure
        if kind is torch.dtype:
            return [how, "dtype", _name(value)]
        return [how, "device", str(value)] if kind is torch.device else [how, kind.__name__, value]
    if how == "items":
        return [how, structure[1].__name__, [_text(part) for part in structure[2]]]
    if how == "cache":
        return [how, _class_name(structure[1]), structure[2]]
    if how in FIELDS:
        parts = [_text(part) for part in structure[3]]
        return [how, _class_name(structure[1]), structure[2], parts]
    return list(structure)


def _structure(text: list[Any]) -> Structure:
    how = text[0]
    if how == "constant":
        _, kind, value = text
        if kind == "dtype":
            return (how, torch.dtype, getattr(torch, value))
        if kind == "device":
            return (how, torch.device, torch.device(value))
        return (how, _CONSTANTS[kind], value)
    if how == "items":
        return (how, _ITEMS[text[1]], tuple(map(_structure, text[2])))
    if how == "cache":
        return (
            how,
            class_named(text[1], ("DynamicCache", "StaticCache", "EncoderDecoderCache")),
            _tuples(text[2]),
        )
    if how in FIELDS:
        kind = dict if text[1] == "builtins:dict" else class_named(text[1])
        return (how, kind, tuple(text[2]), tuple(map(_structure, text[3])))
    return tuple(text)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _class_name(kind: type) -> str:
    if "<locals>" in kind.__qualname__:
        raise InputError(
            f"module: {kind.__qualname__} is defined in a function, so that no file can name it; define it in a module."
        )
    return f"{kind.__module__}:{kind.__qualname__}"


def _parameters(signature: inspect.Signature) -> list[list[Any]]:
    found = []
    for one in signature.parameters.values():
        default = one.default if one.default in (None, True, False) else ...
        has_plain = default is None or isinstance(default, bool)
        found.append([one.name, one.kind.name, [default] if has_plain else []])
    return found


def _signature(parameters: list[list[Any]]) -> inspect.Signature:
    empty = inspect.Parameter.empty
    return inspect.Signature(
        [
            inspect.Parameter(name, _PLACES[place], default=default[0] if default else empty)
            for name, place, default in parameters
        ],
        __validate_parameters__=False,
    )


def _checksums(model: nn.Module) -> dict[str, int]:
    return dict(_each_checksum(model))


def _each_checksum(model: nn.Module) -> Iterator[tuple[str, int]]:
    for name, tensor in model.state_dict().items():
        if isinstance(tensor, torch.Tensor):
            flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            yield name, zlib.crc32(flat.numpy().data)


def _first_difference(known: Mapping[str, int], given: Mapping[str, int]) -> str | None:
    return next((name for name in {**known, **given} if known.get(name) != given.get(name)), None)

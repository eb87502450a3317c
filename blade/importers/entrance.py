# SPDX-License-Identifier: Apache-2.0
"""What ``blade.optimize`` does with a model that is not PyTorch's: a path, a ``ModelProto``, a Keras model.

foreign = import_foreign("model.onnx", {"input_ids": ids})
foreign.module, foreign.inputs      # a ScriptModule, and the samples under the names of its arguments
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from blade.core.reason import Code, Reason, Stage
from blade.core.structure import structure_of
from blade.errors import InputError


@dataclass(frozen=True)
class ForeignModel:
    """``structure`` names the outputs, as ``blade.core.structure`` writes it; ``reasons`` say what was left out."""

    module: torch.jit.ScriptModule
    inputs: Any
    structure: str | None
    reasons: tuple[Reason, ...]


def is_foreign(model: Any) -> bool:
    """Whether ``model`` is a path, a ``ModelProto``, or a model of Keras. Imports nothing."""
    if isinstance(model, (str, Path)):
        return True
    return _is_proto(model) or _is_keras(model)


def import_foreign(model: Any, inputs: Any, sizes: Mapping[str, int] | None = None) -> ForeignModel:
    """Import ``model``; ``inputs`` are samples as ``blade.optimize`` takes them, arrays of numpy included.

    Without ``inputs`` random ones are made of the sizes that the model declares, and of ``sizes`` for those that
    have only a name. Raises ``InputError`` for what cannot be imported.
    """
    if isinstance(model, (str, Path)):
        path = Path(model)
        if _is_tensorflow(path):
            return _from_tensorflow(path, inputs, sizes)
        _check_path(model)
    elif _is_keras(model):
        return _from_tensorflow(model, inputs, sizes)
    return _from_onnx(model, inputs, sizes)


def _from_onnx(source: Any, inputs: Any, sizes: Mapping[str, int] | None = None) -> ForeignModel:
    if importlib.util.find_spec("onnx") is None:
        raise InputError("model: reading ONNX models needs the package onnx: pip install onnx")
    from blade.importers.onnx.example_inputs import example_inputs
    from blade.importers.onnx.import_model import import_model

    made = import_model(source)
    if inputs is None:
        inputs = example_inputs(made, sizes or {})
    samples = _renamed(inputs, made.arguments)
    device = _device(samples)
    if device is not None and device.type != "cpu":
        made.module.to(device)
    outputs = {name: torch.empty(0) for name in made.outputs}
    is_plain = made.returns_tensors and len(outputs) == len(made.outputs)
    return ForeignModel(
        made.module,
        samples,
        structure_of(outputs) if is_plain else None,
        tuple(_in_runtime(op, count) for op, count in sorted(made.in_runtime.items())),
    )


def _from_tensorflow(
    source: Any, inputs: Any, sizes: Mapping[str, int] | None = None
) -> ForeignModel:
    from blade.importers.tensorflow import converted

    with converted(source) as path:
        return _from_onnx(path, inputs, sizes)


def _in_runtime(op: str, count: int) -> Reason:
    what = f"{count} node(s) {op} have no translation: ONNX Runtime runs them, one call each."
    return Reason(Stage.CAPTURE, Code.RUNTIME_NODE, None, op, what)


def _is_proto(model: Any) -> bool:
    kind = type(model)
    return kind.__name__ == "ModelProto" and kind.__module__.startswith("onnx")


def _is_keras(model: Any) -> bool:
    names = {one.__module__.partition(".")[0] for one in type(model).__mro__}
    return bool(names & {"keras", "tf_keras"}) and hasattr(model, "save")


def _is_tensorflow(path: Path) -> bool:
    if path.is_dir():
        return (path / "saved_model.pb").exists()
    return path.suffix in (".keras", ".h5", ".hdf5")


def _check_path(model: str | Path) -> None:
    """Raise for a path that cannot be an ONNX model's, and say what it may be."""
    path = Path(model)
    if path.is_dir():
        raise InputError(
            f"model: {path} is a folder without saved_model.pb; give an .onnx file, a SavedModel of TensorFlow, or a "
            "model in memory."
        )
    if path.suffix in (".pt", ".pth", ".pt2", ".ckpt", ".bin", ".safetensors"):
        raise InputError(
            f"model: {path} is named like a file of PyTorch, got {type(model).__name__}; load the file first, with "
            "torch.jit.load or torch.export.load say. Paths of ONNX and TensorFlow models are read."
        )
    if not path.exists():
        raise InputError(f"model: there is no file {path}.")


def _renamed(inputs: Any, arguments: Mapping[str, str]) -> Any:
    """``inputs`` under the names that the module's arguments have, arrays as tensors."""
    if isinstance(inputs, list):
        return [_renamed(one, arguments) for one in inputs]
    if isinstance(inputs, Mapping):
        unknown = [
            name for name in inputs if name not in arguments and name not in arguments.values()
        ]
        if unknown:
            known = ", ".join(map(repr, arguments))
            raise InputError(
                f"inputs: the model has no input {unknown[0]!r}; its inputs are {known}."
            )
        return {arguments.get(name, name): _tensor(one) for name, one in inputs.items()}
    if isinstance(inputs, tuple) and not hasattr(inputs, "_fields"):
        return tuple(_tensor(one) for one in inputs)
    return _tensor(inputs)


def _tensor(value: Any) -> Any:
    is_array = type(value).__module__ == "numpy" and hasattr(value, "dtype")
    return torch.as_tensor(value) if is_array else value


def _device(inputs: Any) -> torch.device | None:
    """The device of the first tensor."""
    for leaf in torch.utils._pytree.tree_leaves(inputs):
        if isinstance(leaf, torch.Tensor):
            return leaf.device
    return None

# SPDX-License-Identifier: Apache-2.0
"""A ScriptModule with the parameters, buffers and constants of an exported program, and an empty forward.

    module = module_with(tensors, "Bert", {"input_ids": "Tensor"}, "Tensor")
    Weights(module, tensors).read(writer, "encoder.weight")      # prim::GetAttr, once per tensor

The module holds ``tensors`` themselves, under their names.
"""

from collections.abc import Mapping
from functools import reduce
from typing import Any

import torch
from torch import nn

from blade.core import torchscript
from blade.graph.torchscript.extract import clear, get_attribute
from blade.graph.torchscript.writer import TENSOR, ScriptWriter


def module_with(
    tensors: Mapping[str, torch.Tensor], name: str, inputs: Mapping[str, str], returned: str
) -> torch.jit.ScriptModule:
    """A module of class ``name`` in eval mode.

    ``inputs`` are the names and types of forward's arguments, ``returned`` is the type of its result.
    Its graph has inputs and nothing else.
    """
    root = type(name, (nn.Module,), {})()
    for path, tensor in tensors.items():
        owner = root
        *parts, leaf = path.split(".")
        for part in parts:
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        if isinstance(tensor, nn.Parameter):
            owner.register_parameter(leaf, tensor)
        else:
            owner.register_buffer(leaf, tensor.detach())
    module = torchscript.without_methods(root.eval())
    parameters = "".join(f", {one}: {kind}" for one, kind in inputs.items())
    module.define(f"def forward(self{parameters}) -> {returned}:\n    raise RuntimeError('')\n")
    clear(module.graph)
    return module


class Weights:
    """Reads the ``tensors`` of ``module`` in its graph; each once, whatever its names."""

    def __init__(self, module: torch.jit.ScriptModule, tensors: Mapping[str, torch.Tensor]) -> None:
        self._module = module
        self._read: dict[str, torch._C.Value] = {"": next(iter(module.graph.inputs()))}
        first: dict[int, str] = {}
        self._name = {path: first.setdefault(id(one), path) for path, one in tensors.items()}

    def read(self, writer: ScriptWriter, path: str) -> torch._C.Value:
        """The tensor called ``path``."""
        path = self._name[path]
        if path not in self._read:
            owner, _, leaf = path.rpartition(".")
            self._read[path] = get_attribute(writer.graph, self._owner(writer, owner), leaf, TENSOR)
        return self._read[path]

    def _owner(self, writer: ScriptWriter, path: str) -> torch._C.Value:
        if path not in self._read:
            owner, _, leaf = path.rpartition(".")
            part: Any = reduce(getattr, path.split("."), self._module)
            above = self._owner(writer, owner)
            self._read[path] = get_attribute(writer.graph, above, leaf, part._c._type())
        return self._read[path]

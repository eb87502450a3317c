# SPDX-License-Identifier: Apache-2.0
"""An ``ExportedProgram`` as a model: what it answers, how it is called, and its ScriptModule."""

import inspect
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from blade.capture.exported.interface import Interface, bind_by_name
from blade.capture.exported.to_script import name_of, to_script
from blade.capture.inputs import CallSignature, Sample
from blade.capture.model import private_copy
from blade.capture.outputs import tensors_of
from blade.core.attempt import attempt
from blade.core.reason import Code, Reason, Stage
from blade.errors import InputError


def module_of(program: ExportedProgram) -> nn.Module:
    """Return a private copy of ``program.module()``, which raises where a guard of ``program`` does not hold.

    Its class, which every ``GraphModule`` has to itself, gets the name of the model's.
    """
    module = private_copy(program.module())
    type(module).__name__ = name_of(program)
    return module


def inputs_of(program: ExportedProgram, module: nn.Module) -> Any:
    """Return the example inputs of ``program`` by name; raises ``InputError`` if it has none."""
    if program.example_inputs is None:
        raise InputError("inputs: this ExportedProgram has no example_inputs; give samples.")
    args, kwargs = program.example_inputs
    return dict(inspect.signature(module.forward).bind(*args, **kwargs).arguments)


def interface_of(
    program: ExportedProgram, module: nn.Module, call: CallSignature, sample: Sample
) -> Interface:
    """Return how the ScriptModule of ``program`` is called for ``call``, a call of ``module``."""
    signature = inspect.signature(module.forward)

    def bind(entries: Sample) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = call.bind(entries)
        given = signature.bind(*args, **kwargs).arguments
        return bind_by_name(program, list(signature.parameters), given)

    return Interface(call.names, sample, bind, tensors_of)


def script_exported(
    program: ExportedProgram, module: nn.Module, interface: Interface
) -> torch.jit.ScriptModule:
    """Return ``program`` as a ScriptModule over the parameters and buffers of ``module``.

    Raises ``InputError`` for a program that has no form in TorchScript.
    """
    convert = partial(to_script, program, interface, holder=module)
    made = attempt(Stage.CAPTURE, None, "ExportedProgram", convert, code=Code.EXPORT_FAILED)
    if isinstance(made, Reason):
        raise InputError(f"model: this ExportedProgram cannot be converted. {made.detail}")
    return made

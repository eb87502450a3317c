# SPDX-License-Identifier: Apache-2.0
"""``torch.classes.blade.Model``, an optimized module as one value, and what ``torch.export`` has to know of its op.

model = make_model(script)                           # a ScriptModule: methods of List[Tensor], forms
torch.ops.blade.run_model(model, "forward", [x])     # [y]
"""

from typing import Any, Protocol, cast

import torch

from blade.core import torchscript
from blade.runtime.engine import library
from blade.runtime.result_form import forms_from

# Attributes of the script in a model: the names of its arguments; and the pytrees of arguments and results, if the op
# is all that a program does.
NAMES = "arguments"
PYTREES = "pytrees"
SIZES = "sizes"  # the method that checks the inputs of a graph around the model's parts


class Model(Protocol):
    """``torch.classes.blade.Model``; ``csrc/model/model.h`` documents it."""

    def run(self, method: str, inputs: list[torch.Tensor]) -> list[torch.Tensor]: ...

    def form(self, method: str) -> str: ...

    def stats(self) -> dict[str, dict[str, int]]: ...

    def module(self) -> Any: ...

    def number(self) -> int: ...


def make_model(script: torch.jit.ScriptModule) -> Model:
    """A copy of ``script``, as from a file: engines count from 0."""
    saved: bytes = script.save_to_buffer()
    file = torch.frombuffer(bytearray(saved), dtype=torch.uint8)
    return cast(Model, torch.classes.blade.Model(file))


def script_in(model: Model) -> torch.jit.ScriptModule:
    """The module inside."""
    return torchscript.wrapped(model.module())


def models_read() -> list[Model]:
    """The models that were read from files and live in this process, the oldest first."""
    return list(torch.ops.blade.live_models())


def _fake_results(model: Model, method: str, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    if method == SIZES:
        return [torch.empty(0)]
    return [form.empty(inputs) for form in forms_from(model.form(method))]


torch.library.register_fake("blade::run_model", _fake_results, lib=library)

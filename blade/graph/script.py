# SPDX-License-Identifier: Apache-2.0
"""A graph without attributes as the forward of a ScriptModule of its own.

module = script_of(graph, "BertModel", ["input_ids"], {"embeddings.weight": tensor})
module(input_ids)
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from blade.graph.extract import clear

_BY_NAME: Mapping[str, torch.Tensor] = {}
_OF_TENSORS = re.compile(r"(?:(?:Tensor|Tuple|List|Dict|str|int)\b|[\[\], ])+")


def script_of(
    graph: torch._C.Graph,
    name: str,
    inputs: Sequence[str],
    constants: Mapping[str, torch.Tensor | None] = _BY_NAME,
) -> torch.jit.ScriptModule:
    """A module without attributes; ``name`` is that of its class.

    The first values that ``graph`` takes are the module's ``inputs``, the others its ``constants``, where ``None``
    stands for one that nothing reads. ``graph`` returns one value, and is left as it is.
    """
    holder = type(name, (nn.Module,), {})().eval()
    # Equal modules share one TorchScript class by default, and filling one would fill them all.
    script = torch.jit._recursive.create_script_module(holder, lambda _: (), share_types=False)
    script.define(_stub(graph, inputs))
    module = _frozen(script)  # without the attributes of every nn.Module
    target: Any = module.graph
    clear(target)
    target.setInsertPoint(target.block())
    parameters = list(target.inputs())[1:]
    for value, called in zip(parameters, inputs, strict=True):
        value.setDebugName(called)
    given = [_placed(target, *constant) for constant in constants.items()]
    [result] = target.insertGraph(graph, [*parameters, *given])
    target.registerOutput(result)
    torch._C._jit_pass_dce(target)
    target.lint()
    return module


def copy_of_script(module: torch.jit.ScriptModule) -> torch.jit.ScriptModule | None:
    """A copy of ``module`` with a class and a graph of its own; ``None`` if it takes or returns more than tensors, or
    if its forward has defaults.

    ``module`` has a forward and no attributes. The tensors are shared, and no pass of torch's compares them.
    """
    given: Any = module.graph.inputs()
    this, *inputs = given
    arguments = module._c._get_method("forward").schema.arguments[1:]
    kinds = [value.type().annotation_str for value in (*inputs, *module.graph.outputs())]
    defaults = any(argument.has_default_value() for argument in arguments)
    if this.uses() or defaults or not all(map(_OF_TENSORS.fullmatch, kinds)):
        return None
    graph: Any = module.graph.copy()
    graph.eraseInput(0)
    return script_of(graph, module.original_name, [argument.name for argument in arguments])


def simplified(graph: torch._C.Graph, inputs: Sequence[str]) -> torch._C.Graph:
    """``graph``, which takes ``inputs``, as freezing leaves it: inlined, with nothing in it twice or for nothing."""
    made: Any = _frozen(script_of(graph, "Simplified", inputs)).graph.copy()
    made.eraseInput(0)
    return made  # type: ignore[no-any-return]


def _frozen(script: torch.jit.ScriptModule) -> torch.jit.ScriptModule:
    frozen = torch._C._freeze_module(script._c, [], True, True)
    wrapped: torch.jit.ScriptModule = torch.jit._recursive.wrap_cpp_module(frozen)
    return wrapped


def _placed(graph: Any, name: str, tensor: torch.Tensor | None) -> Any:
    value = graph.insertConstant(tensor)
    value.setDebugName(f"self.{name}")
    return value


def _stub(graph: torch._C.Graph, inputs: Sequence[str]) -> str:
    """Source of a forward of the types of ``graph``."""
    given: Any = list(graph.inputs())[: len(inputs)]
    kinds = [value.type().annotation_str for value in given]
    parameters = "".join(f", {name}: {kind}" for name, kind in zip(inputs, kinds, strict=True))
    made: Any = next(iter(graph.outputs()))
    result = made.type().annotation_str
    return f"def forward(self{parameters}) -> {result}:\n    raise RuntimeError('')\n"

# SPDX-License-Identifier: Apache-2.0
"""Types for a cluster's fallback: TorchScript does not inline a method called through an interface.

    holder.fallback = original                # any module with forward(x0: Tensor, x1: Tensor) -> Tensor
    torchscript.without_methods(holder, {"fallback": interface(inputs=2, outputs=1)})

If it were inlined, TorchScript would profile, specialize and compile the original's hundreds of ops in the
first two calls of every process, for an answer that is rarely needed.
"""

import ast
from functools import cache
from typing import Any, cast

import torch
from torch._C._jit_tree_views import ClassDef, Ident, Stmt
from torch._sources import SourceContext
from torch.jit import frontend

_NAME = "__torch__.blade.fallback.interface.Original{inputs}to{outputs}"


def signature(inputs: int, outputs: int) -> str:
    """Return ``forward`` of ``inputs`` tensors x0, x1, ...; one output is a tensor, several are a tuple."""
    parameters = "".join(f", x{i}: Tensor" for i in range(inputs))
    result = "Tensor" if outputs == 1 else f"Tuple[{', '.join(['Tensor'] * outputs)}]"
    return f"def forward(self{parameters}) -> {result}:"


@cache
def interface(inputs: int, outputs: int) -> type[torch.nn.Module]:
    """Return a ``torch.jit.interface`` with that ``forward``, made without a source file."""
    text = f"{signature(inputs, outputs)}\n    pass\n"
    context = SourceContext(text, "blade", 0, 0)
    function = cast(ast.FunctionDef, ast.parse(text).body[0])
    method = frontend.build_def(context, function, None, "forward", "self")
    name = _NAME.format(inputs=inputs, outputs=outputs)
    tree = ClassDef(Ident(method.range(), name.rpartition(".")[2]), [Stmt(method)], [], [])
    compiles: Any = torch._C._jit_script_interface_compile
    mangled = compiles(name, tree, lambda name: None, True)
    return type("Original", (torch.nn.Module,), {"__torch_script_interface__": mangled})

# SPDX-License-Identifier: Apache-2.0
"""What blade takes from inside ``torch.jit``, a function each: scripting, saving and loading, modules, passes.

    save(module, "model.pt"); load("model.pt")(x)      # torch.jit.save and torch.jit.load

From torch 2.14 on, each entry point of ``torch.jit`` begins with a FutureWarning, which users could do nothing about
where blade is the caller. What the entry points call is called here instead: a filter of warnings would hold for the
whole process, other threads and the user's own calls included.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import IO, Any

import torch
from torch import nn
from torch.jit._fuser import optimized_execution
from torch.jit._recursive import create_script_module, wrap_cpp_module
from torch.jit._script import _script_impl  # type: ignore[attr-defined]
from torch.jit._serialization import validate_map_location

Place = str | os.PathLike[str]


def script(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function without closures. Raises what ``torch.jit.script`` raises."""
    compiled: Callable[..., Any] = _script_impl(function, _frames_up=1)
    return compiled


def save(module: torch.jit.ScriptModule, place: Place) -> None:
    """Write the file of ``torch.jit.save``."""
    module.save(os.fspath(place))


def to_bytes(module: torch.jit.ScriptModule) -> bytes:
    """The contents of the file of ``torch.jit.save``."""
    saved: bytes = module.save_to_buffer()
    return saved


def load(source: Place | IO[bytes], map_location: str | None = None) -> torch.jit.ScriptModule:
    """Read what ``torch.jit.save`` wrote. Raises RuntimeError for a file that is none of its."""
    native: Any = torch._C  # its stubs lack arguments
    rest: Any = (validate_map_location(map_location), {}, False)
    unit = native.CompilationUnit()
    if isinstance(source, (str, os.PathLike)):
        return wrapped(native.import_ir_module(unit, os.fspath(source), *rest))
    return wrapped(native.import_ir_module_from_buffer(unit, source.read(), *rest))


def wrapped(native: Any) -> torch.jit.ScriptModule:
    """The ScriptModule around a module of C++."""
    module: torch.jit.ScriptModule = wrap_cpp_module(native)
    return module


def without_methods(
    holder: nn.Module, types: Mapping[str, Any] | None = None
) -> torch.jit.ScriptModule:
    """A ScriptModule with the attributes of ``holder``, none of its methods, and a class of its own.

    By default equal modules share one TorchScript class, and a method of one would be a method of all. ``types`` are
    of attributes whose values do not say it: annotations of a class that ``holder`` gets, as torch 2.15 does not look
    for those of the object.
    """
    if types:
        kind = type(holder)
        named = {"__module__": kind.__module__, "__annotations__": dict(types)}
        holder.__class__ = type(kind.__name__, (kind,), named)
    made: torch.jit.ScriptModule = create_script_module(holder, lambda _: (), share_types=False)
    return made


def frozen(
    native: Any, kept: Sequence[str], interfaces: bool = True, parameters: bool = True
) -> Any:
    """A frozen copy of a module of C++ with the attributes and methods ``kept``.

    ``interfaces``: freeze submodules behind interfaces, too; ``parameters``: make parameters constants.
    """
    return torch._C._freeze_module(native, list(kept), interfaces, parameters)


def function_of(name: str, graph: torch._C.Graph) -> Callable[..., Any]:
    """``graph`` as a function with an executor of its own."""
    made: Callable[..., Any] = torch._C._create_function_from_graph(name, graph)
    return made


def unoptimized() -> AbstractContextManager[None]:
    """Run TorchScript without the profiling executor, which would specialize at the sizes of every call."""
    return optimized_execution(False)


def op_by_op(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, whose TorchScript runs kernel by kernel, as eager mode does.

    On a GPU the profiling executor has its own compiler for chains of ops, which takes minutes for a long
    `cat` (DenseNet-121: more than two).
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        with unoptimized():
            return function(*args, **kwargs)

    return run


def inferred_type(value: Any) -> Any:
    """``success()``, ``type()`` and ``reason()``: the type of ``value`` in TorchScript, or why it has none."""
    return torch._C._jit_try_infer_type(value)


def schemas_of(kind: str) -> Sequence[torch._C.FunctionSchema]:
    """The schemas of an op ``namespace::name``; none if TorchScript does not know it."""
    found: Sequence[torch._C.FunctionSchema] = torch._C._jit_get_schemas_for_operator(kind)
    return found


def is_tracing() -> bool:
    """Whether this thread is in ``torch.jit.trace``."""
    return torch._C._is_tracing()


def inline(graph: torch._C.Graph) -> None:
    """Inline all calls, in place."""
    torch._C._jit_pass_inline(graph)


def remove_dead_code(graph: torch._C.Graph) -> None:
    """Remove what has no users and no effects, in place."""
    torch._C._jit_pass_dce(graph)


def propagate_constants(graph: torch._C.Graph) -> None:
    """Compute what follows from constants, in place."""
    torch._C._jit_pass_constant_propagation(graph)


def forget_shapes(graph: torch._C.Graph) -> None:
    """Remove the sizes that the tracer notes on every value but the inputs, in place."""
    torch._C._jit_erase_non_input_shape_information(graph)

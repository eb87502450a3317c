# SPDX-License-Identifier: Apache-2.0
"""What is used of torch's private parts is listed, is used in one place, and exists in the torch that is installed."""

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import private_uses
import pytest
import sympy
import torch
from private_uses import IN_STUBS_ALONE, SEEN, TABLE, is_vocabulary

ROWS = dict(line.split("  ") for line in TABLE.read_text(encoding="utf-8").splitlines())
DOTTED = [name for name in ROWS if not name.startswith((".", IN_STUBS_ALONE))]
NO_CUDA = pytest.mark.skipif(
    torch.version.cuda is None, reason="this torch is a build without CUDA"
)


def _script() -> Any:
    return torch.jit.trace(torch.nn.Linear(2, 2).eval(), torch.ones(1, 2))


def _program() -> Any:
    return torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),))


def _symbolic() -> Any:
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

    env, source = ShapeEnv(), ConstantSource("n")
    symbol = env.create_symbol(7, source, dynamic_dim=DimDynamic.DYNAMIC)
    assert isinstance(symbol, sympy.Symbol)
    return env.create_symintnode(symbol, hint=7, source=source)


# Objects that have the attributes of the table.
OBJECTS: dict[str, Callable[[], Any]] = {
    "._buffers": _script,
    "._c": _script,
    "._cdata": lambda: torch.ones(1).untyped_storage(),
    "._dispatch_cache": lambda: torch.ops.aten.add.Tensor,
    "._expr": lambda: _symbolic().node,
    "._find_builtin": lambda: torch.jit._builtins,
    "._forward_hooks": _script,
    "._forward_pre_hooks": _script,
    "._get_builtin_table": lambda: torch.jit._builtins,
    "._get_method": lambda: _script()._c,
    "._get_value_trace": lambda: torch._C,
    "._guards_code": _program,
    "._has_method": lambda: _script()._c,
    "._maybe_evaluate_static": lambda: _symbolic().node.shape_env,
    "._method_names": lambda: _script()._c,
    "._modules": _script,
    "._overloadname": lambda: torch.ops.aten.add.Tensor,
    "._overloadpacket": lambda: torch.ops.aten.add.Tensor,
    "._register_attribute": lambda: _script()._c,
    "._register_builtin": lambda: torch.jit._builtins,
    "._set_tracing_state": lambda: torch._C,
}


def _resolved(name: str) -> Any:
    """What a dotted name stands for; raises ImportError or AttributeError."""
    parts = name.split(".")
    found = importlib.import_module(parts[0])
    for k, part in enumerate(parts[1:], 2):
        if not hasattr(found, part):
            importlib.import_module(".".join(parts[:k]))
        found = getattr(found, part)
    return found


def test_every_use_is_listed() -> None:
    """`python tests/private_uses.py` writes the table. Is there a public way? Do other files use the name?"""
    assert private_uses.table(private_uses.found()).splitlines() == TABLE.read_text().splitlines()


def test_what_is_not_vocabulary_is_used_in_one_file() -> None:
    """Where several need it, it is a function in core/torchscript.py or core/torch_modes.py."""
    several = [
        name
        for name in DOTTED
        if not is_vocabulary(name) and " " in ROWS[name] and not _is_module(_resolved(name))
    ]
    assert several == []


def _is_module(found: Any) -> bool:
    return isinstance(found, ModuleType)


def test_the_vocabulary_is_used() -> None:
    unused = [v for v in private_uses.VOCABULARY if not any(n.startswith(v) for n in ROWS)]
    assert unused == []


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=NO_CUDA) if "._cuda_" in n else n for n in DOTTED]
)
def test_a_name_exists(name: str) -> None:
    if name.startswith("torch.onnx._internal"):
        pytest.importorskip("onnxscript")
    _resolved(name)


def test_attributes_of_torchs_objects_exist() -> None:
    hidden = {name for name in ROWS if name.startswith(".")}
    assert hidden == set(OBJECTS)
    missing = [name for name, make in OBJECTS.items() if not hasattr(make(), name[1:])]
    assert missing == []


def test_this_torch_is_one_that_was_seen() -> None:
    """If all other tests here pass with a new torch, add it to ``private_uses.SEEN``."""
    assert ".".join(torch.__version__.split(".")[:2]) in SEEN

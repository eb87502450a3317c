# SPDX-License-Identifier: Apache-2.0
"""Private switches and questions of torch that several modules use, a function each.

with oblivious_to_sizes(), fake_mode, dispatched_in_python():
    op(*args)
"""

from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import tracing
from torch.fx.experimental import _config as symbolic_config
from torch.utils._python_dispatch import _disable_current_modes

SYM_SQRT: Any = torch._sym_sqrt  # type: ignore[attr-defined]
"""The square root of a symbolic size."""


def oblivious_to_sizes(enabled: bool = True) -> AbstractContextManager[Any]:
    """Symbolic sizes with a sample value are treated as if they could be 0 or 1."""
    patched: AbstractContextManager[Any] = symbolic_config.patch(backed_size_oblivious=enabled)  # type: ignore[attr-defined]
    return patched


def dispatched_in_python() -> AbstractContextManager[Any]:
    """Composite ops are decomposed by their Python kernels, which take symbolic sizes."""
    return enable_python_dispatcher()


def without_modes() -> AbstractContextManager[Any]:
    """Tensors are real inside the block, though a fake mode be active outside."""
    return _disable_current_modes()


def out_of_compilation() -> AbstractContextManager[Any]:
    """Tensors are real inside the block, though Dynamo or AOTAutograd be compiling outside."""
    stack = ExitStack()
    stack.enter_context(without_modes())
    stack.enter_context(tracing(None))
    return stack


def has_kernel(name: str, key: Any) -> bool:
    """Whether the op ``namespace::name.overload`` has a kernel of its own for a dispatch key or its name."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, key))


def is_composite(name: str) -> bool:
    """Whether the op ``namespace::name.overload`` is a function of other ops, for all devices and for autograd."""
    return has_kernel(name, "CompositeImplicitAutograd")


def takes_numbers(name: str) -> bool:
    """Whether the op ``namespace::name`` accepts Python numbers for tensors."""
    return bool(torch._C._should_allow_numbers_as_tensors(name))

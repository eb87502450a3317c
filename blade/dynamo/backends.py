# SPDX-License-Identifier: Apache-2.0
"""The backends ``disc`` and ``aot_disc`` of torch.compile.

Both go through AOTAutograd, which makes Dynamo's graph functional: in-place ops, views and aliases become
values, and what has to be written is written at the end. Where no gradient is needed there is one graph, else a
forward and a backward one. ``disc`` is for inference: it takes the model's parameters for constants, which it
lays out as its kernels like them. ``aot_disc`` is for training, where they change with every step.
"""

import gc
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from functorch.compile import make_boxed_func  # type: ignore[import-untyped]
from torch._dynamo.backends.common import aot_autograd
from torch._guards import tracing
from torch.fx import GraphModule
from torch.utils._python_dispatch import _disable_current_modes

from blade.backends.disc.decompositions import decompositions, resampling_kept_whole
from blade.config import Config
from blade.dynamo.bound import Bound
from blade.dynamo.graph import compile_fx
from blade.dynamo.options import config_of
from blade.dynamo.partition import partition

Compiler = Callable[..., Any]
_numbers = itertools.count()


def disc(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a graph of Dynamo's for inference; a graph that needs gradients is compiled as by ``aot_disc``."""
    return _compile(gm, example_inputs, config_of(mode, options), binds=True)


def aot_disc(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a graph of Dynamo's for training: forward and backward.

    ``torch.compile(optimizer.step, backend="aot_disc")`` is one more graph. Its learning rate may follow a scheduler:
    AdamW is compiled once more when it first changes. SGD takes a plain number for a constant (torch does, whatever
    the backend) and would be compiled for each: give it ``lr=torch.tensor(...)``, which schedulers fill in place.
    """
    return _compile(gm, example_inputs, config_of(mode, options), binds=False)


def _compile(
    gm: GraphModule, example_inputs: Sequence[Any], config: Config, binds: bool
) -> Callable[..., Any]:
    number = next(_numbers)

    def compiler(kind: str) -> Compiler:
        def compile_one(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            name = f"graph_{number}{kind}"
            # AOTAutograd calls under the fake mode it traces with; engines are made of real tensors
            with _disable_current_modes(), tracing(None):
                if kind or not binds:
                    made = compile_fx(graph, config, name, {}, training=bool(kind))
                    return make_boxed_func(made)  # type: ignore[no-any-return]
                return make_boxed_func(Bound(graph, example_inputs, config, name))  # type: ignore[no-any-return]

        return compile_one

    through = aot_autograd(
        fw_compiler=compiler(".forward"),
        bw_compiler=compiler(".backward"),
        inference_compiler=compiler(""),
        decompositions=decompositions(),
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )
    with resampling_kept_whole(), _without_collecting():
        return through(gm, example_inputs)


@contextmanager
def _without_collecting() -> Iterator[None]:
    """Graphs are many small objects that stay: looking for garbage among them takes a tenth of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()

# SPDX-License-Identifier: Apache-2.0
"""The backends ``disc`` and ``aot_disc`` of torch.compile.

Both use AOTAutograd, which makes Dynamo's graph functional: in-place ops, views and aliases become values,
and mutated inputs are written at the end. Without gradients there is one graph, else a forward and a backward
graph. ``disc`` is for inference: it treats the model's parameters as constants and packs them for its
kernels. ``aot_disc`` is for training, where parameters change with every step.
"""

import gc
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch._functorch.config as functorch_config
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule
from torch.nn import Parameter

from blade.backends.disc.frontend.aot_decompositions import decompositions, known_gradients
from blade.config import Config
from blade.core.reason import Reason
from blade.core.torch_modes import out_of_compilation, without_modes
from blade.dynamo.bound_parameters import BoundParameters, bindable
from blade.dynamo.compile_graph import CompiledGraph, compile_fx
from blade.dynamo.flex_attention import lower_flex_attention
from blade.dynamo.forward_backward import is_saved, partition
from blade.dynamo.options import config_of
from blade.dynamo.select_ahead import select_engines
from blade.dynamo.true_masks import drop_true_masks
from blade.graph.fx.kept_views import mark_shared_results

Compiler = Callable[..., Any]
_numbers = itertools.count()


def disc(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a graph of Dynamo's for inference; if it needs gradients, compile it as ``aot_disc`` does."""
    return _compile(gm, example_inputs, config_of(mode, options), binds=True)


def aot_disc(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a graph of Dynamo's for training: forward and backward.

    ``torch.compile(optimizer.step, backend="aot_disc")`` is one more graph. Its learning rate may follow a
    scheduler: AdamW is compiled once more at the first change. For SGD, torch specializes on a plain number
    with any backend and recompiles at each change: use ``lr=torch.tensor(...)``, which schedulers fill in
    place.
    """
    return _compile(gm, example_inputs, config_of(mode, options), binds=False)


def _compile(
    gm: GraphModule, example_inputs: Sequence[Any], config: Config, binds: bool
) -> Callable[..., Any]:
    number, saving = next(_numbers), _is_saving()
    alone: list[CompiledGraph | BoundParameters] = []  # for inference there is one graph

    def compiler(kind: str) -> Compiler:
        def compile_one(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            binding = binds and not kind
            if kind != ".backward":  # gradients are accumulated in place: each has its own memory
                results = graph.graph.output_node().all_input_nodes
                mark_shared_results([node for node in results if not is_saved(node)])
            job = _GraphJob(graph, f"graph_{number}{kind}", config, binding, example_inputs)
            # AOTAutograd calls this under its fake mode; engines are made from real tensors
            with out_of_compilation():
                if saving:
                    return cast(Callable[..., Any], job.to_save())
                if config.background:
                    return _boxed(job.later())
                made = job.compile()
                alone.extend(() if kind else (made,))
                return _boxed(made)

        return compile_one

    through = aot_autograd(
        fw_compiler=compiler(".forward"),
        bw_compiler=compiler(".backward"),
        inference_compiler=compiler(""),
        decompositions=decompositions(),
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )
    is_lowered = lower_flex_attention(gm)
    drop_true_masks(gm)
    with known_gradients(), _gc_paused():
        compiled = through(gm, example_inputs)
    if not saving:
        # the graph that was lowered still makes block masks
        return _while_served(compiled, gm, alone[0]) if alone and not is_lowered else compiled
    from blade.dynamo.aot_compile import CompiledFunction

    return CompiledFunction(compiled)


def _boxed(compiled: Callable[..., Any]) -> Callable[[list[Any]], Any]:
    """Return ``compiled`` as AOTAutograd calls it: with a list.

    The first call is under a mode of torch that knows no subclasses of tensors, not even those that change no op: it
    gets plain tensors of the same memory.
    """
    is_first = True

    def call(args: list[Any]) -> Any:
        nonlocal is_first
        if is_first:
            is_first = False
            with without_modes():
                args[:] = [_plain(one) for one in args]
        return compiled(*args)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def _plain(value: Any) -> Any:
    kind = type(value)
    if kind in (Tensor, Parameter) or not isinstance(value, Tensor):
        return value
    keeps_ops = kind.__torch_dispatch__ is Tensor.__torch_dispatch__
    return value.as_subclass(Tensor) if keeps_ops else value


def _while_served(
    compiled: Callable[..., Any], gm: GraphModule, graph: "CompiledGraph | BoundParameters"
) -> Callable[..., Any]:
    """Return ``compiled``, unless its first call leaves ``graph`` without engines: then ``gm``, Dynamo's own graph.

    A functional graph is slower than its original where no engine serves: ops are decomposed, and some writes to a part
    of a tensor copy the whole.
    """
    chosen: list[Callable[..., Any]] = []

    def call(*args: Any) -> Any:
        if chosen:
            return chosen[0](*args)
        answer = compiled(*args)
        if (is_served := graph.is_served()) is not None:
            chosen.append(compiled if is_served else gm)
        return answer

    return call


@dataclass(frozen=True)
class _GraphJob:
    """A graph to compile. ``binds``: parameters are constants, taken from ``given``, the inputs of Dynamo's graph."""

    graph: GraphModule
    name: str
    config: Config
    binds: bool
    given: Sequence[Any]

    def compile(self, *notes: Reason) -> "CompiledGraph | BoundParameters":
        """The compiled graph, with ``notes`` in its report."""
        if self.binds:
            return BoundParameters(self.graph, self.given, self.config, self.name, notes)
        training = self.name.endswith(("forward", "backward"))
        return compile_fx(self.graph, self.config, self.name, {}, training, notes)

    def later(self) -> Any:
        """The original graph, which a thread compiles."""
        from blade.dynamo.background import IN_FOREGROUND, BackgroundGraph, draws

        if draws(self.graph):
            return self.compile(IN_FOREGROUND)
        kept = bindable(self.graph, self.given) if self.binds else []
        return BackgroundGraph(self.graph, self.name, self.compile, kept, self.config.strict)

    def to_save(self) -> Any:
        """The compiled graph in the form that ``aot_compile`` saves."""
        from blade.dynamo.aot_compile import SavableCode

        made = self.compile()
        if self.name.endswith(("forward", "backward")):
            return SavableCode(made)
        select_engines(made, self.graph, self.given, self.config.strict)
        return SavableCode(made)


def _is_saving() -> bool:
    """Whether ``aot_compile`` asks for what is compiled now: it alone sets both. Seen in torch 2.13."""
    config: Any = functorch_config
    return bool(
        getattr(config, "bundled_autograd_cache", False)
        and getattr(config, "bypass_autograd_cache_key", False)
    )


@contextmanager
def _gc_paused() -> Iterator[None]:
    """Pause garbage collection: graphs are many long-lived objects; scanning them takes 10% of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()

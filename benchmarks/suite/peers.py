# SPDX-License-Identifier: Apache-2.0
"""Who is measured, by device and mode: those of ``benchmarks/peers.py`` and ``gpu/peers.py``, and a few more.

On a CPU every peer is given the first shape and must serve all. On a GPU all shapes are given, and torch.compile
compiles anew for each: its fastest code.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import peers as on_cpu
import torch
from gpu import peers as on_gpu
from peers import Peer, Run
from zoo.model import Model, Tensors

AS_IT_COMES = "openvino_default"  # computes in bfloat16 where the processor has it


def _first(peer: Peer) -> Peer:
    """The same, given the first shape alone."""

    def prepare(model: Model, samples: Sequence[Tensors], threads: int) -> Run:
        return peer.prepare(model, samples[:1], threads)

    return replace(peer, prepare=prepare)


def _gpu(prepare: on_gpu.Prepare, *packages: str) -> Peer:
    def run(model: Model, samples: Sequence[Tensors], threads: int) -> Run:
        return prepare(model, samples)

    return Peer(run, ("torch", *packages))


def max_autotune(model: Model, samples: Sequence[Tensors]) -> Run:
    """torch.compile, compiled anew for every shape, with its slowest search and CUDA graphs."""
    torch._dynamo.config.recompile_limit = 512
    compiled = torch.compile(model.module, dynamic=False, mode="max-autotune")

    def run(*inputs: torch.Tensor) -> Tensors:
        torch.compiler.cudagraph_mark_step_begin()
        found: Tensors = compiled(*inputs)
        return found

    return run


INFERENCE: dict[str, dict[str, Peer]] = {
    "cpu": {
        **{name: _first(peer) for name, peer in on_cpu.PEERS.items()},
        AS_IT_COMES: _first(Peer(on_cpu.openvino_default, ("torch", "openvino"), max_error=0.1)),
    },
    "cuda": {
        "blade": _gpu(on_gpu.blade, "blade"),
        "eager": _gpu(on_gpu.eager),
        "inductor": _gpu(on_gpu.inductor_static, "triton"),
        "reduce_overhead": _gpu(on_gpu.reduce_overhead_static, "triton"),
        "max_autotune": _gpu(max_autotune, "triton"),
    },
}


def _compiled(**settings: Any) -> Callable[[Any], Any]:
    def run(module: Any) -> Any:
        torch._dynamo.config.recompile_limit = 64
        return torch.compile(module, **settings)

    return run


def _aot_disc(module: Any) -> Any:
    import blade

    return torch.compile(module, backend=blade.dynamo.aot_disc)


TRAINING: dict[str, Callable[[Any], Any]] = {
    "eager": lambda module: module,
    "blade": _aot_disc,
    "inductor": _compiled(dynamic=False),
    "reduce_overhead": _compiled(dynamic=False, mode="reduce-overhead"),
    "max_autotune": _compiled(dynamic=False, mode="max-autotune"),
}

# By device and mode, in the order in which they are prepared.
PEERS: dict[tuple[str, str], tuple[str, ...]] = {
    ("cpu", "inference"): (
        *("blade", "eager", "inductor", "onnxruntime", "openvino", "torchscript"),
        AS_IT_COMES,
    ),
    ("cuda", "inference"): ("blade", "eager", "reduce_overhead", "max_autotune", "inductor"),
    ("cpu", "training"): ("blade", "eager", "inductor"),
    ("cuda", "training"): ("blade", "eager", "inductor", "reduce_overhead"),
}
LESS_EXACT = (AS_IT_COMES,)  # shown, but not among the peers to beat in float32


def packages(device: str, mode: str, peer: str) -> tuple[str, ...]:
    """What ``peer`` is made of."""
    if mode == "training":
        return ("torch", "blade") if peer == "blade" else ("torch",)
    return INFERENCE[device][peer].packages

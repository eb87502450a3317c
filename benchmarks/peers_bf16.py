# SPDX-License-Identifier: Apache-2.0
"""bfloat16 peers, set up as their own documentation advises; the counterpart of peers.py.

    run = BF16_PEERS["openvino_bf16"].prepare(model, [sample, ...], threads)

Those that convert the model compute everything in bfloat16 and are given and return float32. blade_bf16 is the fp32
model with ``enable_bf16``; blade_bf16_model is what others measure, a converted model as it is.
"""

import copy
import os
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from peers import Peer, Run, example
from zoo.model import Model, Tensors

MAX_ERROR = 0.5  # relative to the largest value: whether it computes the same model at all


def _halved(tensors: Sequence[torch.Tensor]) -> Tensors:
    return tuple(t.bfloat16() if t.is_floating_point() else t for t in tensors)


def _converted(model: Model) -> torch.nn.Module:
    return copy.deepcopy(model.module).bfloat16()


def _on_halves(run: Any) -> Run:
    """``run`` of a converted model, with float32 in and out; the conversions are part of what is timed."""
    return lambda *inputs: tuple(
        t.float() if t.is_floating_point() else t for t in run(*_halved(inputs))
    )


def blade_bf16(model: Model, samples: Sequence[Tensors], threads: int) -> Run:
    """The fp32 model, with bfloat16 permitted, in the bounds of all peers."""
    return _blade(model, model.module, samples, enable_bf16=True, accuracy_budget=MAX_ERROR)


def blade_bf16_model(model: Model, samples: Sequence[Tensors], threads: int) -> Run:
    """The model in bfloat16, as it is."""
    return _on_halves(_blade(model, _converted(model), [*map(_halved, samples)]))


def _blade(model: Model, module: Any, samples: Sequence[Tensors], **permitted: Any) -> Any:
    import blade

    os.environ["BLADE_BACKENDS"] = "disc"  # our own kernels, not the fastest peer's
    os.environ["BLADE_CACHE_DIR"] = tempfile.mkdtemp(prefix="blade")  # compiling is measured
    declared = model.declared or None
    config = blade.Config(dynamic_shapes=declared, time_budget=None, **permitted)
    return blade.optimize(module, list(samples), config)


def eager_bf16(model: Model, samples: Sequence[Tensors], threads: int) -> Run:
    return _on_halves(_converted(model))


def inductor_bf16(model: Model, samples: Sequence[Tensors], threads: int) -> Run:
    """Weights frozen into the code."""
    import torch._inductor.config as inductor_config

    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", tempfile.mkdtemp(prefix="inductor"))
    inductor_config.freezing = True
    return _on_halves(torch.compile(_converted(model), dynamic=True))


def openvino_bf16(model: Model, samples: Sequence[Tensors], threads: int) -> Run:
    import openvino as ov
    from peers import openvino_runner

    converted = ov.convert_model(model.module, example_input=example(model))
    return openvino_runner(converted, threads, "bf16")


def zentorch_bf16(model: Model, samples: Sequence[Tensors], threads: int) -> Run:
    """AMD's compiler, weights frozen."""
    import torch._inductor.config as inductor_config
    import zentorch  # noqa: F401

    inductor_config.freezing = True
    return _on_halves(torch.compile(_converted(model), backend="zentorch"))


BF16_PEERS: dict[str, Peer] = {
    "blade_bf16": Peer(blade_bf16, ("torch", "blade"), MAX_ERROR),
    "blade_bf16_model": Peer(blade_bf16_model, ("torch", "blade"), MAX_ERROR),
    "eager_bf16": Peer(eager_bf16, ("torch",), MAX_ERROR),
    "inductor_bf16": Peer(inductor_bf16, ("torch",), MAX_ERROR),
    "openvino_bf16": Peer(openvino_bf16, ("torch", "openvino"), MAX_ERROR),
    "zentorch_bf16": Peer(zentorch_bf16, ("torch", "zentorch"), MAX_ERROR),
}

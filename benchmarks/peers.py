# SPDX-License-Identifier: Apache-2.0
"""What blade is measured against: one function each, set up as its own documentation advises.

    run = PEERS["onnxruntime"].prepare(model, [sample, ...], threads)
    run(*sample)                                    # a tuple of tensors

Every peer gets fp32, the same number of threads, and must serve every shape of the model. Those that are
allowed int8 are in peers_int8.py, those of bfloat16 in peers_bf16.py.
"""

import inspect
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from zoo.model import Model, Tensors

Run = Callable[..., Tensors]


@dataclass(frozen=True)
class Peer:
    """``packages``: what it is made of; missing ones skip it, and their versions are recorded.

    ``max_error``: the largest error against eager, relative to the largest value of the output.
    """

    prepare: Callable[[Model, Sequence[Tensors], int], Run]
    packages: tuple[str, ...] = ("torch",)
    max_error: float = 1e-4

    @property
    def is_exact(self) -> bool:
        return self.max_error <= 1e-4


def eager(model: Model, samples: Sequence[Tensors], threads: int) -> Run:
    return model.module


def torchscript(model: Model, samples: Sequence[Tensors], threads: int) -> Run:
    """Traced and frozen; the fuser specializes on the first calls of each shape."""
    traced = torch.jit.trace(model.module, samples[0], check_trace=False, strict=False)
    return torch.jit.freeze(traced)


def inductor(model: Model, samples: Sequence[Tensors], threads: int) -> Run:
    """Dynamic shapes, weights frozen into the code; caches off, so that compiling is measured."""
    import torch._inductor.config as inductor_config

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="inductor")
    inductor_config.force_disable_caches = True
    inductor_config.freezing = True
    return torch.compile(model.module, dynamic=True)


def onnxruntime(model: Model, samples: Sequence[Tensors], threads: int) -> Run:
    with tempfile.TemporaryDirectory() as folder:
        return session_runner(model, export_onnx(model, Path(folder)), threads)


def session_runner(model: Model, path: Path, threads: int) -> Run:
    """ONNX Runtime on the file at ``path``."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.intra_op_num_threads = threads
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    taken = [one.name for one in session.get_inputs()]  # an input that nothing reads is gone

    def run(*inputs: torch.Tensor) -> Tensors:
        given = dict(zip(model.names, inputs, strict=True))
        feed = {name: given[name].numpy() for name in taken}
        return tuple(map(torch.from_numpy, session.run(None, feed)))

    return run


def export_onnx(model: Model, folder: Path) -> Path:
    program = torch.onnx.export(
        model.module,
        example(model),
        dynamo=True,
        dynamic_shapes=_dynamic_shapes(model),
        input_names=list(model.names),
    )
    assert program is not None
    program.save(folder / "model.onnx", external_data=True)
    return folder / "model.onnx"


def _dynamic_shapes(model: Model) -> tuple[Any, ...]:
    """Per parameter of forward, the axes that vary; those of ``*past`` are one parameter's."""
    each = [dict.fromkeys(axes, torch.export.Dim.DYNAMIC) for axes in model.dynamic_axes()]
    kinds = [p.kind for p in inspect.signature(model.module.forward).parameters.values()]
    plain = sum(kind is not inspect.Parameter.VAR_POSITIONAL for kind in kinds)
    return tuple(each) if plain == len(kinds) else (*each[:plain], tuple(each[plain:]))


def example(model: Model) -> Tensors:
    """Sizes 0 and 1 are special to exporters, equal ones would be taken for one."""
    shape = tuple(a.low + (3 + 2 * k) * a.step for k, a in enumerate(model.axes))
    return model.inputs(shape, 0)


def openvino(model: Model, samples: Sequence[Tensors], threads: int) -> Run:
    import openvino as ov

    return openvino_runner(ov.convert_model(model.module, example_input=example(model)), threads)


def openvino_default(model: Model, samples: Sequence[Tensors], threads: int) -> Run:
    """Without a hint of precision: in bfloat16 where the processor has it."""
    import openvino as ov

    converted = ov.convert_model(model.module, example_input=example(model))
    return openvino_runner(converted, threads, precision=None)


def openvino_runner(converted: Any, threads: int, precision: str | None = "f32") -> Run:
    """OpenVINO's CPU plug-in on a model of its own."""
    import openvino as ov

    settings = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": threads}
    if precision is not None:
        settings["INFERENCE_PRECISION_HINT"] = precision
    compiled = ov.Core().compile_model(converted, "CPU", settings)
    request = compiled.create_infer_request()
    outputs = range(len(compiled.outputs))

    def run(*inputs: torch.Tensor) -> Tensors:
        feed = [tensor.numpy() for tensor in inputs]
        results = request.infer(feed, share_inputs=True, share_outputs=False)
        return tuple(torch.from_numpy(results[i]) for i in outputs)

    return run


def blade(model: Model, samples: Sequence[Tensors], threads: int) -> Run:
    """DISC alone, whatever other backends are installed."""
    return _optimized(model, samples, optimization_pipeline="DISC")


def blade_untimed(model: Model, samples: Sequence[Tensors], threads: int) -> Run:
    """Without timing candidates: what compiling alone costs."""
    return _optimized(model, samples, optimization_pipeline="DISC", timing=False)


def blade_auto(model: Model, samples: Sequence[Tensors], threads: int) -> Run:
    """Every backend that is installed, chosen per cluster by measurement, without a limit of time."""
    return _optimized(model, samples, time_budget=None)


def _alone(backend: str) -> Callable[[Model, Sequence[Tensors], int], Run]:
    """One backend under blade, as "auto" has it among its candidates."""
    return partial(_optimized_by, backend)


def _optimized_by(backend: str, model: Model, samples: Sequence[Tensors], threads: int) -> Run:
    return _optimized(model, samples, optimization_pipeline=backend)


def _optimized(model: Model, samples: Sequence[Tensors], **config: Any) -> Run:
    import blade

    os.environ["BLADE_CACHE_DIR"] = tempfile.mkdtemp(prefix="blade")  # compiling is measured
    made = blade.Config(dynamic_shapes=model.declared or None, **config)
    return blade.optimize(model.module, list(samples), made)


PEERS: dict[str, Peer] = {
    "blade": Peer(blade, ("torch", "blade")),
    "blade_untimed": Peer(blade_untimed, ("torch", "blade")),
    "blade_auto": Peer(blade_auto, ("torch", "blade")),
    "blade_onnxruntime": Peer(_alone("onnxruntime"), ("torch", "blade", "onnx", "onnxruntime")),
    "blade_openvino": Peer(_alone("openvino"), ("torch", "blade", "onnx", "openvino")),
    "blade_inductor": Peer(_alone("inductor"), ("torch", "blade")),
    "blade_tvm": Peer(_alone("tvm"), ("torch", "blade", "tvm")),
    "eager": Peer(eager),
    "torchscript": Peer(torchscript),
    "inductor": Peer(inductor),
    "onnxruntime": Peer(onnxruntime, ("torch", "onnx", "onnxscript", "onnxruntime")),
    "openvino": Peer(openvino, ("torch", "openvino")),
}

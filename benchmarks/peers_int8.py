# SPDX-License-Identifier: Apache-2.0
"""int8 peers, set up as their own documentation advises; the counterpart of peers.py.

    run = INT8_PEERS["onnxruntime_dynamic"].prepare(model, [sample, ...], threads)

Those that calibrate are given the samples to be measured and more of the same kind (``calibration``).
"""

import copy
import os
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peers import Peer, Run, export_onnx, openvino_runner, session_runner
from zoo.model import Model, Tensors

SEEDS = range(2, 10)
MAX_ERROR = 0.5  # relative to the largest value: whether it computes the same model at all


def calibration(model: Model, samples: Sequence[Tensors]) -> list[Tensors]:
    """``samples``, and others of the last one's size."""
    return [*samples, *(model.inputs(model.fixed[-1], seed) for seed in SEEDS)]


def blade_int8(model: Model, samples: Sequence[Tensors], threads: int) -> Run:
    import blade

    os.environ["BLADE_BACKENDS"] = "disc,quant"  # our own kernels, not the fastest peer's
    os.environ["BLADE_CACHE_DIR"] = tempfile.mkdtemp(prefix="blade")  # compiling is measured
    config = blade.Config(dynamic_shapes=model.declared or None, enable_int8=True, time_budget=None)
    return blade.optimize(model.module, calibration(model, samples), config)


def onnxruntime_dynamic(model: Model, samples: Sequence[Tensors], threads: int) -> Run:
    """Products with constant weights in int8, activations by tensor and call."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with tempfile.TemporaryDirectory() as folder:
        source = _prepared(model, Path(folder))
        made = Path(folder) / "int8.onnx"
        quantize_dynamic(source, made, weight_type=QuantType.QInt8, per_channel=True)
        return session_runner(model, made, threads)


def onnxruntime_static(model: Model, samples: Sequence[Tensors], threads: int) -> Run:
    """Q/DQ with ranges of the samples."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_static

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self._left = iter(calibration(model, samples))

        def get_next(self) -> dict[str, Any] | None:
            one = next(self._left, None)
            if one is None:
                return None
            return {n: t.numpy() for n, t in zip(model.names, one, strict=True)}

    with tempfile.TemporaryDirectory() as folder:
        source = _prepared(model, Path(folder))
        made = Path(folder) / "int8.onnx"
        kinds = ["MatMul", "Gemm", "Conv"]
        quantize_static(
            source,
            made,
            Reader(),
            quant_format=QuantFormat.QDQ,
            per_channel=True,
            op_types_to_quantize=kinds,
        )
        return session_runner(model, made, threads)


def _prepared(model: Model, folder: Path) -> Path:
    import onnx
    from onnxruntime.quantization.shape_inference import quant_pre_process

    whole, made = folder / "whole.onnx", folder / "prepared.onnx"
    onnx.save(onnx.load(export_onnx(model, folder)), whole)  # weights inside: it copies one file
    quant_pre_process(whole, made, skip_symbolic_shape=True)
    return made


def torch_dynamic(model: Model, samples: Sequence[Tensors], threads: int) -> Run:
    """FBGEMM's dynamic int8 for ``nn.Linear``, traced and frozen."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = torch.ao.quantization.quantize_dynamic(
            copy.deepcopy(model.module), {torch.nn.Linear}, dtype=torch.qint8
        )
    traced = torch.jit.trace(module.eval(), samples[0], check_trace=False, strict=False)
    return torch.jit.freeze(traced.eval())


def torchao_inductor(model: Model, samples: Sequence[Tensors], threads: int) -> Run:
    """int8 weights and activations per token, compiled with dynamic shapes."""
    import torch._inductor.config as inductor_config
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    # compiling takes minutes: whoever names a folder lets it be done before
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", tempfile.mkdtemp(prefix="inductor"))
    inductor_config.freezing = True
    module = copy.deepcopy(model.module)
    quantize_(module, Int8DynamicActivationInt8WeightConfig())
    return torch.compile(module, dynamic=True)


def openvino_nncf(model: Model, samples: Sequence[Tensors], threads: int) -> Run:
    """Post-training quantization of a transformer by NNCF, calibrated on the samples."""
    import nncf
    import openvino as ov

    converted = ov.convert_model(model.module, example_input=samples[0])
    data = nncf.Dataset(calibration(model, samples), lambda sample: [t.numpy() for t in sample])
    quantized = nncf.quantize(converted, data, model_type=nncf.ModelType.TRANSFORMER)
    return openvino_runner(quantized, threads)


INT8_PEERS: dict[str, Peer] = {
    "blade_int8": Peer(blade_int8, ("torch", "blade"), MAX_ERROR),
    "onnxruntime_dynamic": Peer(onnxruntime_dynamic, ("torch", "onnx", "onnxruntime"), MAX_ERROR),
    "onnxruntime_static": Peer(onnxruntime_static, ("torch", "onnx", "onnxruntime"), MAX_ERROR),
    "torch_dynamic": Peer(torch_dynamic, ("torch",), MAX_ERROR),
    "torchao_inductor": Peer(torchao_inductor, ("torch", "torchao"), MAX_ERROR),
    "openvino_nncf": Peer(openvino_nncf, ("torch", "openvino", "nncf"), MAX_ERROR),
}

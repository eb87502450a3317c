# SPDX-License-Identifier: Apache-2.0
"""Models in ONNX, imported and optimized, against ONNX Runtime and OpenVINO on the same file.

    python benchmarks/bench_onnx_models.py --models minilm resnet50 detr --rounds 20

Each model is exported by torch.onnx with free sizes. All run with the threads that torch has, in turns; the medians
are of milliseconds a call. "error" is the largest difference from ONNX Runtime, relative to the largest output.
"""

import argparse
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from models import MODELS

import blade


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["minilm", "resnet50", "detr"])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--time-budget", type=float, default=120.0)
    parser.add_argument("--folder", type=Path, help="where the .onnx files are kept")
    parser.add_argument(
        "--shapes", type=int, default=2, help="how many of the model's shapes are measured"
    )
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} thread(s), blade {blade.__version__}"
    )
    with tempfile.TemporaryDirectory() as made:
        for name in args.models:
            measure(name, args.folder or Path(made), args)


def measure(name: str, folder: Path, args: Any) -> None:
    """Print a line per shape of one model."""
    model = MODELS[name]()
    samples = [model.inputs(shape, 0) for shape in model.fixed[: args.shapes]]
    path = folder / f"{name}.onnx"
    if not path.exists():
        export(model, samples[0], path)
    start = time.perf_counter()
    config = blade.Config(time_budget=args.time_budget)
    optimized = blade.optimize(path, samples, config)
    took = time.perf_counter() - start
    chosen = [one.backend for one in blade.report(optimized).clusters]
    print(f"{name}: optimized in {took:.0f} s, clusters by {chosen}", flush=True)
    peers = {"onnxruntime": onnxruntime_call(path), "openvino": openvino_call(path)}
    for shape, sample in zip(model.fixed, samples):
        calls: dict[str, Callable[[], Any]] = {"blade": lambda x=sample: optimized(*x)}  # type: ignore[misc]
        calls |= {peer: lambda x=sample, f=call: f(x) for peer, call in peers.items()}  # type: ignore[misc]
        found = interleaved(calls, args.rounds)
        error = difference(calls["blade"](), calls["onnxruntime"]())
        shown = "  ".join(f"{peer} {ms:9.3f} ms" for peer, ms in found.items())
        best = min(ms for peer, ms in found.items() if peer != "blade")
        size = "x".join(map(str, shape))
        print(
            f"  {size:14} {shown}  {best / found['blade']:5.2f}x the faster peer  error {error:.1e}",
            flush=True,
        )


def export(model: Any, sample: Any, path: Path) -> None:
    axes = {
        name: {axis: f"{name}_{axis}" for axis in free}
        for name, free in zip(model.names, model.dynamic_axes())
    }
    with torch.no_grad():
        torch.onnx.export(
            model.module,
            tuple(sample),
            str(path),
            dynamo=False,
            opset_version=17,
            input_names=list(model.names),
            dynamic_axes=axes,
        )


def onnxruntime_call(path: Path) -> Callable[[Any], Any]:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 4
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]
    return lambda sample: session.run(None, {n: x.numpy() for n, x in zip(names, sample)})


def openvino_call(path: Path) -> Callable[[Any], Any]:
    import openvino as ov

    settings = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "INFERENCE_PRECISION_HINT": "f32"}
    compiled = ov.Core().compile_model(str(path), "CPU", settings)
    request = compiled.create_infer_request()
    return lambda sample: request.infer([x.numpy() for x in sample])


def interleaved(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median milliseconds of each; every round calls all of them."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    with torch.no_grad():
        for _ in range(3):
            for call in calls.values():
                call()
        for _ in range(rounds):
            for name, call in calls.items():
                start = time.perf_counter()
                call()
                taken[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(one) for name, one in taken.items()}


def difference(ours: Any, theirs: Any) -> float:
    """The largest difference relative to the largest element, over all outputs."""
    ours = ours if isinstance(ours, tuple) else (ours,)
    errors = []
    for a, b in zip(ours, theirs, strict=True):
        other = torch.from_numpy(b).double()
        errors.append(float((a.double() - other).abs().max() / other.abs().max().clamp(min=1e-30)))
    return max(errors)


if __name__ == "__main__":
    main()

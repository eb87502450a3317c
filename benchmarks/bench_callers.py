# SPDX-License-Identifier: Apache-2.0
"""One process, several libraries: calls in turns, and calls per second of many callers.

python benchmarks/bench_callers.py turns --rounds 5 --threads 2     # ms alone and in turns with each other one
python benchmarks/bench_callers.py callers --callers 1,2,8,64,200   # calls per second, the libraries in turns

BERT-mini with random weights at 1x16 by default. ``turns`` interleaves: each round times every library alone (after
a rest) and in turns with every other one; medians over rounds of the first quartile over calls, which other processes
on the machine hit least. The load is printed beside.
"""

import argparse
import io
import os
import threading
import time
from collections.abc import Callable
from itertools import permutations
from statistics import median, quantiles
from typing import Any

import torch

Call = Callable[[], Any]


def bert(hidden: int, layers: int) -> torch.nn.Module:
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        intermediate_size=4 * hidden,
        return_dict=False,
        attn_implementation="sdpa",
    )
    return BertModel(config, add_pooling_layer=False).eval()


def blade_side(model: torch.nn.Module, ids: torch.Tensor) -> Call:
    import blade

    config = blade.Config(optimization_pipeline="disc", timing=False)
    optimized = blade.optimize(model, ids, config)
    return lambda: optimized(ids)


def onnx_of(model: torch.nn.Module, ids: torch.Tensor) -> bytes:
    file = io.BytesIO()
    traced = torch.jit.trace(model, ids, strict=False)
    torch.onnx.export(traced, (ids,), file, dynamo=False, input_names=["ids"])
    return file.getvalue()


def onnxruntime_side(model: torch.nn.Module, ids: torch.Tensor, int8: bool = False) -> Call:
    import tempfile

    import onnxruntime

    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/model.onnx"
        with open(path, "wb") as file:
            file.write(onnx_of(model, ids))
        if int8:
            from onnxruntime.quantization import quantize_dynamic

            quantize_dynamic(path, path)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    feed = {"ids": ids.numpy()}
    return lambda: session.run(None, feed)


def openvino_side(model: torch.nn.Module, ids: torch.Tensor) -> Call:
    import openvino

    options = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "INFERENCE_PRECISION_HINT": "f32",
    }
    converted = openvino.convert_model(model, example_input=ids)
    request = openvino.Core().compile_model(converted, "CPU", options).create_infer_request()
    feed = [ids.numpy()]
    return lambda: request.infer(feed, share_inputs=True)


SIDES: dict[str, Callable[[torch.nn.Module, torch.Tensor], Call]] = {
    "blade": blade_side,
    "eager": lambda model, ids: lambda: model(ids),
    "ort": onnxruntime_side,
    "ort int8": lambda model, ids: onnxruntime_side(model, ids, int8=True),
    "openvino": openvino_side,
}


def timed(call: Call) -> float:
    start = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start)


def alone(call: Call, seconds: float) -> float:
    time.sleep(0.05)  # pools of the side before come to rest
    end = time.perf_counter() + seconds
    found = [timed(call)]
    while time.perf_counter() < end:
        found.append(timed(call))
    return quantiles(found, n=4)[0] if len(found) > 1 else found[0]


def in_turns(one: Call, other: Call, seconds: float) -> tuple[float, float]:
    time.sleep(0.05)
    end = time.perf_counter() + seconds
    found: list[tuple[float, float]] = []
    while time.perf_counter() < end or not found:
        found.append((timed(one), timed(other)))
    if len(found) == 1:
        return found[0]
    mine, theirs = zip(*found, strict=True)
    return quantiles(mine, n=4)[0], quantiles(theirs, n=4)[0]


def turns(sides: dict[str, Call], rounds: int, seconds: float) -> None:
    solo: dict[str, list[float]] = {name: [] for name in sides}
    both: dict[tuple[str, str], list[float]] = {pair: [] for pair in permutations(sides, 2)}
    for _ in range(rounds):
        for name, call in sides.items():
            solo[name].append(alone(call, seconds))
        names = list(sides)
        for i, a in enumerate(names):
            for b in names[i + 1 :]:
                mine, theirs = in_turns(sides[a], sides[b], seconds)
                both[a, b].append(mine)
                both[b, a].append(theirs)
    known = {name: median(found) for name, found in solo.items()}
    print("| side | alone, ms | " + " | ".join(f"with {name}" for name in sides) + " |")
    print("|---|--:|" + "--:|" * len(sides))
    for name in sides:
        cells = [
            "" if other == name else f"{median(both[name, other]) / known[name]:.2f}x"
            for other in sides
        ]
        print(f"| {name} | {known[name]:.3f} | " + " | ".join(cells) + " |")


def calls_per_second(call: Call, callers: int, seconds: float) -> float:
    start, counts = threading.Barrier(callers + 1), [0] * callers

    def run(k: int) -> None:
        with torch.no_grad():
            call()
            start.wait()
            end = time.perf_counter() + seconds
            while time.perf_counter() < end:
                call()
                counts[k] += 1

    threads = [threading.Thread(target=run, args=(k,)) for k in range(callers)]
    for thread in threads:
        thread.start()
    start.wait()
    begun = time.perf_counter()
    for thread in threads:
        thread.join()
    return sum(counts) / (time.perf_counter() - begun)


def callers(sides: dict[str, Call], counts: list[int], rounds: int, seconds: float) -> None:
    print("| callers | " + " | ".join(f"{name}, calls/s" for name in sides) + " |")
    print("|--:|" + "--:|" * len(sides))
    for count in counts:
        found: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(rounds):
            for name, call in sides.items():
                time.sleep(0.05)
                found[name].append(calls_per_second(call, count, seconds))
        cells = " | ".join(f"{median(each):.0f}" for each in found.values())
        print(f"| {count} | {cells} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=("turns", "callers"))
    parser.add_argument("--sides", default=",".join(SIDES))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.3)
    parser.add_argument("--callers", default="1,2,8,64,200")
    parser.add_argument("--shape", default="1x16")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = bert(args.hidden, args.layers)
    ids = torch.randint(0, 30000, tuple(map(int, args.shape.split("x"))))
    print(
        f"BERT {args.hidden}x{args.layers} at {args.shape}, {args.threads} threads, load {os.getloadavg()[0]:.1f}"
    )
    with torch.no_grad():
        sides = {name: SIDES[name](model, ids) for name in args.sides.split(",")}
        if args.mode == "turns":
            turns(sides, args.rounds, args.seconds)
        else:
            callers(sides, list(map(int, args.callers.split(","))), args.rounds, args.seconds)
    print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""onnx's own tests of backends, through the importer: how many nodes it translates, and what fails.

    python benchmarks/bench_onnx_nodes.py                  # a table, then every failure with its reason
    python benchmarks/bench_onnx_nodes.py --only resize    # the tests with this in their name
    python benchmarks/bench_onnx_nodes.py --kinds node simple

A test passes if the imported module gives the expected values within the test's own tolerance. "by a node of ONNX
Runtime": passes, and at least one node has no translation. "outside": types that torch lacks (strings, integers and
floats of 4 bits and fewer), images, the domains of classic machine learning, of training and of previews, and tests
that expect the random numbers of numpy.
"""

import argparse
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from onnx.backend.test.loader import load_model_tests
from onnx.backend.test.runner import Runner

from blade.importers.onnx.backend import OnnxBackend
from blade.importers.onnx.emit.dtypes import DTYPES

KINDS = ("node", "simple", "pytorch-converted", "pytorch-operator")
OUTSIDE_DOMAINS = ("ai.onnx.ml", "ai.onnx.preview", "ai.onnx.preview.training", "ai.onnx.training")
RANDOM = ("test_bernoulli", "test_training_dropout_default", "test_training_dropout_mask")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default="", help="tests with this in their name")
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    args = parser.parse_args()
    failures: list[str] = []
    runtime: Counter[str] = Counter()
    print(f"onnx {onnx.__version__}, torch {torch.__version__}")
    print(f"{'kind':18} {'passed':>7} {'by ORT':>7} {'failed':>7} {'outside':>8} {'rate':>8}")
    for kind in args.kinds:
        count: Counter[str] = Counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tests = load_model_tests(kind=kind)
        for test in sorted(tests, key=lambda one: str(one.name)):
            if args.only not in test.name or test.name.endswith("_cuda"):
                continue
            outcome, detail = run(test)
            count[outcome] += 1
            if outcome == "failed":
                failures.append(f"{test.name}: {detail}")
            if outcome == "by ORT":
                runtime[detail] += 1
        inside = count["passed"] + count["by ORT"] + count["failed"]
        rate = (count["passed"] + count["by ORT"]) / max(inside, 1)
        columns = [f"{count[one]:>7}" for one in ("passed", "by ORT", "failed")]
        print(f"{kind:18} {' '.join(columns)} {count['outside']:>8} {rate:>8.1%}", flush=True)
    print("\nby a node of ONNX Runtime:", ", ".join(f"{k} {n}" for k, n in sorted(runtime.items())))
    print("\nfailed:")
    print("\n".join(failures))


def run(test: Any) -> tuple[str, str]:
    """ "passed", "by ORT", "failed" or "outside", and a detail."""
    model = test.model
    if model is None:
        model = onnx.load(str(Path(test.model_dir) / "model.onnx"))
    is_random = test.name.startswith(RANDOM) or test.name == "test_training_dropout"
    if is_random or is_outside(model):
        return "outside", ""
    torch.manual_seed(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            prepared = OnnxBackend.prepare(model)
            for inputs, expected in test.data_sets or saved_data(Path(test.model_dir), model):
                given = [as_value(one) for one in inputs]
                wanted = [as_value(one) for one in expected]
                results = [with_axes(one) for one in prepared.run(given)]
                wanted = [with_axes(one) for one in wanted]
                Runner.assert_similar_outputs(wanted, results, test.rtol, test.atol)
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return "failed", f"{type(error).__name__}: {' '.join(lines)[-300:]}"
    nodes = prepared.imported.in_runtime
    return ("by ORT", "+".join(sorted(nodes))) if nodes else ("passed", "")


def with_axes(value: Any) -> Any:
    """Lists of numbers as lists of vectors: ``assert_similar_outputs`` takes the length of what is in a list."""
    return [np.atleast_1d(one) for one in value] if isinstance(value, list) else value


def as_value(item: Any) -> Any:
    """Arrays for what a test holds as protos."""
    if isinstance(item, onnx.TensorProto):
        return numpy_helper.to_array(item)
    if isinstance(item, onnx.SequenceProto):
        return numpy_helper.to_list(item)
    if isinstance(item, onnx.OptionalProto):
        return numpy_helper.to_optional(item)
    if isinstance(item, (list, tuple)):
        return [as_value(one) for one in item]
    return item


def saved_data(folder: Path, model: Any) -> Any:
    """The inputs and outputs of a test that is kept in files."""
    for one in sorted(folder.glob("test_data_set_*")):
        sides = []
        for name, infos in (("input", model.graph.input), ("output", model.graph.output)):
            count = len(list(one.glob(f"{name}_*.pb")))
            sides.append([_read(one / f"{name}_{k}.pb", infos[k].type) for k in range(count)])
        yield sides


def _read(path: Path, kind: onnx.TypeProto) -> Any:
    proto: Any = onnx.TensorProto()
    if kind.HasField("sequence_type"):
        proto = onnx.SequenceProto()
    elif kind.HasField("optional_type"):
        proto = onnx.OptionalProto()
    proto.ParseFromString(path.read_bytes())
    return as_value(proto)


def is_outside(model: onnx.ModelProto) -> bool:
    """Whether the model needs a type that torch lacks, or a domain that is no part of the importer."""
    nodes = list(_nodes(model.graph.node)) + [n for f in model.functions for n in f.node]
    if any(node.domain in OUTSIDE_DOMAINS or node.op_type == "ImageDecoder" for node in nodes):
        return True
    for info in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        if not _has_type(info.type):
            return True
    for node in nodes:
        for one in node.attribute:
            if node.op_type == "Cast" and one.name == "to" and one.i not in DTYPES:
                return True
            if one.HasField("t") and one.t.data_type not in DTYPES:
                return True
            if one.name in ("value_string", "value_strings"):
                return True
    return any(one.data_type not in DTYPES for one in model.graph.initializer)


def _nodes(nodes: Any) -> Any:
    for node in nodes:
        yield node
        for one in node.attribute:
            if one.HasField("g"):
                yield from _nodes(one.g.node)


def _has_type(proto: onnx.TypeProto) -> bool:
    kind = proto.WhichOneof("value")
    if kind == "optional_type":
        return _has_type(proto.optional_type.elem_type)
    if kind == "sequence_type":
        return _has_type(proto.sequence_type.elem_type)
    return kind is None or (kind == "tensor_type" and proto.tensor_type.elem_type in (0, *DTYPES))


if __name__ == "__main__":
    main()

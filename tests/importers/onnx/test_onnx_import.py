# SPDX-License-Identifier: Apache-2.0
"""``blade.optimize`` of ONNX models: files, weights, sizes, control flow, names, errors."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_backends import produces

import blade
from blade.core.reason import Code
from blade.core.structure import restored
from blade.errors import InputError

pytestmark = pytest.mark.needs("runtime", "onnx", "onnxruntime")

QUICK = blade.Config(timing=False, min_cluster_size=1, optimization_pipeline="disc")
HEAD = '<ir_version: 9, opset_import: ["" : 20, "com.microsoft" : 1]>'


def parsed(text: str, **weights: np.ndarray) -> Any:
    """A model from onnx's text form, with ``weights`` as initializers."""
    import onnx
    import onnx.parser

    model = onnx.parser.parse_model(f"{HEAD}\n{text}")
    for name, array in weights.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


def by_onnxruntime(model: Any, **inputs: torch.Tensor) -> list[torch.Tensor]:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(model.SerializeToString(), options)
    found = session.run(None, {name: one.numpy() for name, one in inputs.items()})
    return [torch.from_numpy(np.asarray(one)) for one in found]


def imported(model: Any) -> Any:
    from blade.importers.onnx.import_model import import_model

    return import_model(model)


def check(model: Any, tolerance: float = 1e-5, **inputs: torch.Tensor) -> Any:
    """The imported model, which answers like ONNX Runtime."""
    made = imported(model)
    result = made.module(*inputs.values())
    results = result if isinstance(result, tuple) else (result,)
    for ours, theirs in zip(results, by_onnxruntime(model, **inputs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    return made


def random(*sizes: int) -> Any:
    return np.random.default_rng(0).standard_normal(sizes).astype(np.float32)


def classifier() -> Any:
    text = """
    net (float[batch, 8] x) => (float[batch, 3] logits, float[batch, 16] hidden) {
        a = MatMul (x, w)
        b = Add (a, bias)
        hidden = Gelu (b)
        logits = Gemm <transB = 1> (hidden, v, c)
    }"""
    weights = {"w": random(8, 16), "bias": random(16), "v": random(3, 16), "c": random(3)}
    return parsed(text, **weights)


RESHAPED = """
heads (float[batch, length, 24] x) => (float[batch, length, 24] y) {
    shape = Shape (x)
    zero = Constant <value_int: int = 0> ()
    one = Constant <value_int: int = 1> ()
    b = Gather (shape, zero)
    n = Gather (shape, one)
    axes = Constant <value_ints: ints = [0]> ()
    b1 = Unsqueeze (b, axes)
    n1 = Unsqueeze (n, axes)
    rest = Constant <value_ints: ints = [4, 6]> ()
    split = Concat <axis = 0> (b1, n1, rest)
    h = Reshape (x, split)
    t = Transpose <perm = [0, 2, 1, 3]> (h)
    s = Softmax (t)
    u = Transpose <perm = [0, 2, 1, 3]> (s)
    y = Reshape (u, shape)
}"""


def test_a_path_is_optimized_saved_and_loaded_without_onnx(tmp_path: Path) -> None:
    import onnx

    model, path, out = classifier(), tmp_path / "classifier.onnx", tmp_path / "out.pt"
    onnx.save(model, path)
    x = torch.randn(4, 8)
    optimized = blade.optimize(str(path), {"x": x}, QUICK)
    for batch in (1, 9):
        y = torch.randn(batch, 8)
        for ours, theirs in zip(optimized(y), by_onnxruntime(model, x=y), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    named = restored(optimized.blade_structure, optimized(x))
    assert list(named) == ["logits", "hidden"] and named["logits"].shape == (4, 3)
    assert str(blade.report(optimized)).startswith("classifier")
    torch.jit.save(optimized, str(out))
    torch.save((x, optimized(x)[0]), tmp_path / "x.pt")
    code = (
        "import sys; sys.modules.update(onnx=None, onnxruntime=None)\n"
        "import torch, blade\n"
        f"x, y = torch.load({str(tmp_path / 'x.pt')!r})\n"
        f"torch.testing.assert_close(torch.jit.load({str(out)!r})(x)[0], y)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_a_model_in_memory_and_arrays_as_inputs() -> None:
    x = random(5, 8)
    optimized = blade.optimize(classifier(), {"x": x}, QUICK)
    wanted = by_onnxruntime(classifier(), x=torch.from_numpy(x))
    torch.testing.assert_close(optimized(torch.from_numpy(x))[0], wanted[0], rtol=1e-5, atol=1e-5)


def test_sizes_are_numbers_and_one_cluster_serves_all() -> None:
    model = parsed(RESHAPED)
    made = check(model, x=torch.randn(2, 5, 24))
    assert "torch.tensor" not in made.code and "tolist" not in made.code
    optimized = blade.optimize(model, torch.randn(2, 5, 24), QUICK)
    assert [one.backend for one in blade.report(optimized).clusters] == ["disc"]
    for sizes in ((1, 1), (3, 17)):
        x = torch.randn(*sizes, 24)
        torch.testing.assert_close(optimized(x), made.module(x))
    assert blade.stats(optimized)["cluster_0"]["fallbacks"] == 0


def test_other_sizes_than_declared_raise() -> None:
    module = imported(classifier()).module
    with pytest.raises(torch.jit.Error, match=r"x \[\?, 8\]"):
        module(torch.randn(2, 7))


def test_external_data_is_read_in_place(tmp_path: Path) -> None:
    import onnx

    model = classifier()
    path = tmp_path / "net.onnx"
    onnx.save(model, path, save_as_external_data=True, location="net.data", size_threshold=0)
    x = torch.randn(3, 8)
    made = imported(path)
    torch.testing.assert_close(made.module(x)[0], imported(classifier()).module(x)[0])
    (tmp_path / "net.data").unlink()
    with pytest.raises(InputError, match=r"net\.data, which does not exist"):
        imported(path)


def test_external_data_outside_of_the_folder_is_refused(tmp_path: Path) -> None:
    import onnx

    model = classifier()
    (tmp_path / "inside").mkdir()
    path = tmp_path / "inside" / "net.onnx"
    onnx.save(model, path, save_as_external_data=True, location="net.data", size_threshold=0)
    loaded = onnx.load(path, load_external_data=False)
    (tmp_path / "inside" / "net.data").rename(tmp_path / "net.data")
    for one in loaded.graph.initializer:
        for entry in one.external_data:
            entry.value = "../net.data" if entry.key == "location" else entry.value
    path.write_bytes(loaded.SerializeToString())
    with pytest.raises(InputError, match="outside of the folder"):
        imported(path)


def test_equal_initializers_are_held_once() -> None:
    made = imported(classifier())
    assert sorted(dict(made.module.named_buffers())) == ["bias", "c", "v", "w"]
    total = sum(one.numel() for one in made.module.buffers())
    assert total == 8 * 16 + 16 + 3 * 16 + 3


IF = """
choose (float[n] x, bool keep) => (float[n] y) {
    y = If (keep) <
        then_branch = first () => (float[n] a) { a = Abs (x) },
        else_branch = second () => (float[n] b) { c = Neg (x) b = Exp (c) }
    >
}"""

LOOP = """
powers (float[n] x, int64 count) => (float[n] last, float[m, n] all) {
    going = Constant <value: tensor = bool {1}> ()
    last, all = Loop (count, going, x) <
        body = step (int64 k, bool before, float[n] state) => (bool after, float[n] next, float[n] out) {
            after = Identity (before)
            next = Mul (state, x)
            half = Constant <value: tensor = float {0.5}> ()
            out = Mul (next, half)
        }
    >
}"""

UNTIL = """
double (float[n] x) => (float[n] y) {
    going = Constant <value: tensor = bool {1}> ()
    y = Loop (, going, x) <
        body = step (int64 k, bool before, float[n] state) => (bool after, float[n] next) {
            next = Add (state, state)
            total = ReduceMax <keepdims = 0> (next)
            limit = Constant <value: tensor = float {100}> ()
            after = Less (total, limit)
        }
    >
}"""

SCAN = """
sums (float[2] start, float[n, 2] items) => (float[2] final, float[n, 2] partial) {
    final, partial = Scan <num_scan_inputs = 1, body = step (float[2] s, float[2] x) => (float[2] t, float[2] o) {
        t = Add (s, x)
        o = Identity (t)
    }> (start, items)
}"""


def test_branches_and_loops() -> None:
    x = torch.randn(5)
    for keep in (True, False):
        made = check(parsed(IF), x=x, keep=torch.tensor(keep))
    assert "if bool" in made.code
    for count in (0, 1, 4):
        made = check(parsed(LOOP), x=x, count=torch.tensor(count))
    assert "for iteration in range" in made.code
    assert "while keep" in check(parsed(UNTIL), x=x.abs() + 1).code
    check(parsed(SCAN), start=torch.randn(2), items=torch.randn(4, 2))


def test_a_loop_is_optimized() -> None:
    x, count = torch.randn(5), torch.tensor(3)
    optimized = blade.optimize(parsed(LOOP), (x, count), QUICK)
    for steps in (0, 6):
        got = optimized(x, torch.tensor(steps))
        for ours, theirs in zip(got, by_onnxruntime(parsed(LOOP), x=x, count=torch.tensor(steps))):
            torch.testing.assert_close(ours, theirs)


def test_functions_of_the_model_are_inlined() -> None:
    import onnx
    import onnx.parser

    text = """
    <ir_version: 9, opset_import: ["" : 20, "own" : 1]>
    net (float[n] x) => (float[n] y) { y = own.twice <factor = 3> (x) }
    <domain: "own", opset_import: ["" : 20]>
    twice <factor> (a) => (b) {
        f = Constant <value_int: int = @factor> ()
        g = CastLike (f, a)
        b = Mul (a, g)
    }"""
    check(onnx.parser.parse_model(text), x=torch.randn(4))


@produces(Code.RUNTIME_NODE)
def test_an_op_without_a_row_runs_in_onnxruntime(tmp_path: Path) -> None:
    text = """
    counts (int64[n] ids) => (float[4] y) {
        c = TfIdfVectorizer <mode = "TF", min_gram_length = 1, max_gram_length = 1, max_skip_count = 0,
            ngram_counts = [0], ngram_indexes = [0, 1, 2, 3], pool_int64s = [5, 6, 7, 8]> (ids)
        y = Neg (c)
    }"""
    model, ids = parsed(text), torch.tensor([5, 6, 6, 8])
    optimized = blade.optimize(model, ids, QUICK)
    found = [one for one in blade.report(optimized).reasons if one.code is Code.RUNTIME_NODE]
    assert [one.subject for one in found] == ["TfIdfVectorizer"]
    torch.jit.save(optimized, str(tmp_path / "out.pt"))
    loaded = torch.jit.load(str(tmp_path / "out.pt"))
    for given in (ids, torch.tensor([8, 8])):
        torch.testing.assert_close(loaded(given), by_onnxruntime(model, ids=given)[0])


def quantized_product(scale: float, zero: int, scales: Any, rows: int = 8) -> Any:
    """A product of an input and a weight, both quantized; ``scales`` are the weight's, by column."""
    columns = len(scales)
    text = f"""
    net (float[n, {rows}] x) => (float[n, {columns}] y) {{
        q = QuantizeLinear (x, s, z)
        d = DequantizeLinear (q, s, z)
        w = DequantizeLinear <axis = 1> (wq, ws)
        y = MatMul (d, w)
    }}"""
    weights = {
        "s": np.float32(scale).reshape(()),
        "z": np.int8(zero).reshape(()),
        "wq": np.random.default_rng(0).integers(-127, 127, (rows, columns), np.int8),
        "ws": np.asarray(scales, np.float32),
    }
    return parsed(text, **weights)


def test_quantized_values_become_fake_quantization() -> None:
    model = quantized_product(0.05, 3, [0.01, 0.02, 0.03, 0.04])
    made = check(model, x=torch.randn(5, 8))
    assert "fake_quantize_per_tensor_affine" in made.code


def test_a_quantized_model_is_computed_in_integers() -> None:
    model, x = quantized_product(0.03, 0, [0.0005] * 64, rows=256), torch.randn(32, 256)
    config = QUICK.evolve(optimization_pipeline="quant", enable_int8=True)
    optimized = blade.optimize(model, [x, x + 1], config)
    assert "int8 as given" in blade.report(optimized).explain()
    torch.testing.assert_close(optimized(x), by_onnxruntime(model, x=x)[0], rtol=1e-5, atol=1e-5)
    assert blade.stats(optimized)["cluster_0"]["engine_runs"] == 1


def test_integer_products() -> None:
    text = """
    net (float[n, 8] x) => (int32[n, 4] y) {
        q, s, z = DynamicQuantizeLinear (x)
        y = MatMulInteger (q, w, z)
    }"""
    w = np.random.default_rng(0).integers(-127, 127, (8, 4), np.int8)
    check(parsed(text, w=w), x=torch.randn(5, 8))


MICROSOFT = {
    "gelu": "y = com.microsoft.Gelu (x)",
    "fast_gelu": "y = com.microsoft.FastGelu (x, bias)",
    "bias_gelu": "y = com.microsoft.BiasGelu (x, bias)",
    "quick_gelu": "y = com.microsoft.QuickGelu (x)",
    "fused_matmul": "y = com.microsoft.FusedMatMul <alpha = 0.5, transB = 1> (x, w)",
    "skip_layer_norm": "y = com.microsoft.SkipLayerNormalization (x, x, bias, bias)",
    "attention": "y = com.microsoft.Attention <num_heads = 2> (x, qkv, b3)",
    "multi_head": "y = com.microsoft.MultiHeadAttention <num_heads = 2> (x, x, x, b3)",
}


@pytest.mark.parametrize("name", MICROSOFT)
def test_ops_of_onnxruntime(name: str) -> None:
    text = f"net (float[batch, length, 8] x) => (float[batch, length, m] y) {{ {MICROSOFT[name]} }}"
    weights = {"bias": random(8), "w": random(8, 8), "qkv": random(8, 24), "b3": random(24)}
    used = {key: one for key, one in weights.items() if key in MICROSOFT[name]}
    made = check(parsed(text, **used), tolerance=2e-5, x=torch.randn(2, 3, 8))
    assert not made.in_runtime


def test_an_op_of_onnxruntime_without_a_row_keeps_its_type() -> None:
    model = parsed(
        """
    net (float[batch, 8] x) => (float[batch, 8] y) {
        h = com.microsoft.Inverse (m)
        p = MatMul (x, h)
        y = Relu (p)
    }""",
        m=random(8, 8) + 8 * np.eye(8, dtype=np.float32),
    )
    made = check(model, tolerance=1e-4, x=torch.randn(3, 8))
    assert made.in_runtime == {"Inverse": 1}


def test_errors_say_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import onnx

    x = torch.randn(2, 8)
    with pytest.raises(InputError, match=r"there is no file .*nothing\.onnx"):
        blade.optimize(tmp_path / "nothing.onnx", x)
    with pytest.raises(InputError, match=r"a folder without saved_model\.pb"):
        blade.optimize(tmp_path, x)
    (tmp_path / "text.onnx").write_text("this is no model")
    with pytest.raises(InputError, match=r"no ONNX model|no graph"):
        blade.optimize(tmp_path / "text.onnx", x)
    with pytest.raises(InputError, match="load the file first"):
        blade.optimize("model.pt", x)
    model = classifier()
    model.opset_import[0].version = 999
    with pytest.raises(InputError, match=r"opset 999.*newer onnx"):
        blade.optimize(model, x)
    with pytest.raises(InputError, match=r"no input 'z'; its inputs are 'x'"):
        blade.optimize(classifier(), {"z": x})
    with pytest.raises(InputError, match="'batch' of the model are not fixed"):
        blade.optimize(classifier())
    text = "net (float[2] x) => (float[2] y) { y = own.Unheard (x) }"
    unknown = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : 20, "own" : 1]> {text}')
    with pytest.raises(InputError, match="Unheard has no row"):
        blade.optimize(unknown, torch.randn(2))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match="pip install onnx"):
        blade.optimize(classifier(), x)
    (tmp_path / "saved_model.pb").write_bytes(b"")
    with pytest.raises(InputError, match=r"pip install 'blade\[tensorflow\]'"):
        blade.optimize(tmp_path, x)

# SPDX-License-Identifier: Apache-2.0
"""Tokens a second of greedy decoding, batch 1, beside torch.compile, ONNX Runtime and llama.cpp.

    python benchmarks/bench_decode.py                          # GPT-2 (124 M) and a Llama of 0.5 B parameters
    python benchmarks/bench_decode.py --models llama --bits 4 --rounds 5 --json decode.json

Every way is a process of its own; those of one precision are alive together and measured in turns. Weights are
random. A measurement is a whole call: prompt of 32 tokens, 64 new ones. *step* is the way's own engine at the middle
of that, without the loop around it. *bound* is the bytes of the weights that a token reads, over the bandwidth that a
sum over a large array reaches between the measurements.

eager, compile (``torch.compile`` with a static cache) and blade run transformers' ``generate``; ONNX Runtime and
llama.cpp run loops of their own, with less to do per token. blade's engines are those of one backend, for prefill
and decode, without a selection by time, which other work on the machine would disturb. llama.cpp reads GGUF files
with the same shapes: F32, Q8_0 and Q4_0, which has a scale of 16 bits per 32 weights. blade's int4 has one of 32
bits per 128. ONNX Runtime has MatMulNBits (blocks of 128; ``accuracy_level=4``).
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROMPT, NEW, THREADS = 32, 64, 2
WAYS = {
    32: ("eager", "compile", "blade", "onnxruntime", "llama.cpp"),
    8: ("blade", "onnxruntime", "llama.cpp"),
    4: ("blade", "onnxruntime", "llama.cpp"),
}
LLAMA = {
    "hidden_size": 1280,
    "intermediate_size": 3456,
    "num_hidden_layers": 24,
    "num_attention_heads": 20,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": None,
}

Program = Callable[[], list[int]]
Step = Callable[[], Any]


def build(name: str) -> Any:
    """The model in eval mode, with random weights."""
    import torch
    import transformers

    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    if name == "gpt2":
        config = transformers.GPT2Config(eos_token_id=None)
        return transformers.GPT2LMHeadModel(config).eval()
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).eval()


def prompt() -> list[int]:
    return [(37 * k) % 1000 + 2 for k in range(PROMPT)]


def weights_of(name: str) -> int:
    """The weights that each token reads: those of the products."""
    if name == "gpt2":
        return 12 * 12 * 768 * 768 + 50257 * 768
    h, f, kv = LLAMA["hidden_size"], LLAMA["intermediate_size"], 4 * 64
    return LLAMA["num_hidden_layers"] * (2 * h * h + 2 * h * kv + 3 * h * f) + 32000 * h


def bytes_of(name: str, bits: int, way: str) -> float:
    """Bytes of the weights per token, with their scales."""
    each = {32: 4.0, 8: 1.0, 4: 0.5 + 4 / 128}[bits]
    if way == "llama.cpp":
        each = {32: 4.0, 8: 34 / 32, 4: 18 / 32}[bits]
    return each * weights_of(name)


# --- the ways: (whole call, its engine's step) ---


def through_generate(model: Any, **how: Any) -> Program:
    import torch

    ids = torch.tensor([prompt()])
    mask = torch.ones_like(ids)

    def run() -> list[int]:
        with torch.no_grad():
            made = model.generate(
                ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, pad_token_id=0, **how
            )
        return made[0, PROMPT:].tolist()  # type: ignore[no-any-return]

    return run


def eager(name: str, bits: int, folder: Path) -> tuple[Program, Step | None]:
    return through_generate(build(name)), None


def compiled(name: str, bits: int, folder: Path) -> tuple[Program, Step | None]:
    import torch

    model = build(name)
    model.forward = torch.compile(model.forward)
    return through_generate(model, cache_implementation="static"), None


def with_blade(name: str, bits: int, folder: Path) -> tuple[Program, Step | None]:
    import torch

    import blade
    from blade.dropin.accelerate import state_of

    model = build(name)
    config = blade.Config(optimization_pipeline="disc", timing=False, time_budget=None)
    if bits < 32:
        config = config.evolve(
            optimization_pipeline="quant",
            enable_int8=True,
            quantization_type="weight_only",
            weight_bits=bits,
            accuracy_budget={"cosine": 0.9},
        )
    with blade.record(model) as samples:
        through_generate(model)()
    picked = [samples[0], samples[1], samples[NEW // 2]]
    fast = blade.accelerate(model, picked, config)
    print(blade.report(fast), file=sys.stderr)
    run = through_generate(fast)
    run()
    middle = samples[NEW // 2]
    call = state_of(fast)._reader.read((), dict(middle))
    prepared = state_of(fast).prepared[call.kind]

    def step() -> Any:
        with torch.no_grad():
            return prepared.module(*call.tensors)

    return run, step


def with_onnxruntime(name: str, bits: int, folder: Path) -> tuple[Program, Step | None]:
    import numpy as np
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = THREADS
    session = onnxruntime.InferenceSession(str(onnx_file(name, bits, folder)), options)
    names = [i.name for i in session.get_inputs()]
    shapes = [i.shape for i in session.get_inputs()[2:]]
    start = [np.zeros((1, s[1], 0, s[3]), np.float32) for s in shapes]
    last: list[Any] = []

    def run() -> list[int]:
        tokens, past = [], start
        ids = np.array([prompt()])
        places = np.arange(PROMPT)[None]
        for k in range(NEW):
            if k == NEW // 2:
                last[:] = [ids, places, *past]
            logits, *past = session.run(None, dict(zip(names, [ids, places, *past])))
            tokens.append(int(logits[0, -1].argmax()))
            ids, places = np.array([[tokens[-1]]]), np.array([[PROMPT + k]])
        return tokens

    run()
    return run, lambda: session.run(None, dict(zip(names, last)))


def onnx_file(name: str, bits: int, folder: Path) -> Path:
    """The model with its cache as inputs and outputs, exported, and quantized in MatMulNBits."""
    path = folder / f"{name}_{bits}" / "model.onnx"
    if path.exists():
        return path
    path.parent.mkdir(parents=True)
    if bits == 32:
        export_onnx(name, path)
        return path
    import onnx
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    model = onnx.load(onnx_file(name, 32, folder))
    quantizer = MatMulNBitsQuantizer(
        model, bits=bits, block_size=128, is_symmetric=True, accuracy_level=4
    )
    quantizer.process()
    quantizer.model.save_model_to_file(str(path), use_external_data_format=True)
    return path


def export_onnx(name: str, path: Path) -> None:
    import torch
    from transformers import DynamicCache
    from transformers.pytorch_utils import Conv1D

    model = build(name)
    layers = model.config.num_hidden_layers
    heads = getattr(model.config, "num_key_value_heads", model.config.num_attention_heads)
    size = model.config.hidden_size // model.config.num_attention_heads

    for part in model.modules():  # a Gemm stays in floats
        if isinstance(part, Conv1D):
            part.forward = (lambda own: lambda x: x @ own.weight + own.bias)(part)

    class Flat(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: Any, places: Any, *past: Any) -> Any:
            cache = DynamicCache()
            for k in range(layers):
                cache.update(past[2 * k], past[2 * k + 1], k)
            out = self.model(ids, position_ids=places, past_key_values=cache, use_cache=True)
            held = [t for one in cache.layers for t in (one.keys, one.values)]
            return (out.logits[:, -1:], *held)

    past = [torch.randn(1, heads, 5, size) for _ in range(2 * layers)]
    names = [f"past_{k}" for k in range(2 * layers)]
    grown = [f"present_{k}" for k in range(2 * layers)]
    torch.onnx.export(
        Flat().eval(),
        (torch.tensor([[3, 4]]), torch.tensor([[5, 6]]), *past),
        str(path),
        input_names=["ids", "places", *names],
        output_names=["logits", *grown],
        dynamic_axes={"ids": {1: "n"}, "places": {1: "n"}, **{n: {2: "past"} for n in names}},
        dynamo=False,
    )


def with_llama_cpp(name: str, bits: int, folder: Path) -> tuple[Program, Step | None]:
    import llama_cpp
    import numpy as np

    path = gguf_file(name, bits, folder)
    model = llama_cpp.Llama(
        str(path), n_ctx=256, n_threads=THREADS, n_threads_batch=THREADS, verbose=False, n_batch=64
    )
    count = model.n_vocab()

    def following() -> int:
        pointer = llama_cpp.llama_get_logits_ith(model.ctx, -1)
        return int(np.ctypeslib.as_array(pointer, shape=(count,)).argmax())

    def run() -> list[int]:
        model.reset()
        model.eval(prompt())
        tokens = [following()]
        while len(tokens) < NEW:
            model.eval(tokens[-1:])
            tokens.append(following())
        return tokens

    def step() -> Any:
        model.n_tokens = PROMPT + NEW // 2
        model.eval([5])

    run()
    return run, step


def gguf_file(name: str, bits: int, folder: Path) -> Path:
    """The same model in llama.cpp's format."""
    import gguf

    path = folder / f"{name}_{bits}.gguf"
    if path.exists():
        return path
    kinds = gguf.GGMLQuantizationType
    kind = {32: kinds.F32, 8: kinds.Q8_0, 4: kinds.Q4_0}[bits]
    model = build(name)
    writer = gguf.GGUFWriter(str(path), name)
    config = model.config
    writer.add_context_length(512)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    (of_gpt2 if name == "gpt2" else of_llama)(writer, model, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add(writer: Any, name: str, tensor: Any, kind: Any) -> None:
    import gguf

    data = tensor.detach().float().contiguous().numpy()
    wide = kind == gguf.GGMLQuantizationType.F32 or data.ndim == 1
    if wide:
        writer.add_tensor(name, data)
    else:
        writer.add_tensor(name, gguf.quantize(data, kind), raw_dtype=kind)


def of_llama(writer: Any, model: Any, kind: Any) -> None:
    writer.add_head_count_kv(model.config.num_key_value_heads)
    writer.add_feed_forward_length(model.config.intermediate_size)
    writer.add_layer_norm_rms_eps(model.config.rms_norm_eps)
    writer.add_rope_dimension_count(64)
    add(writer, "token_embd.weight", model.model.embed_tokens.weight, kind)
    add(writer, "output_norm.weight", model.model.norm.weight, kind)
    add(writer, "output.weight", model.lm_head.weight, kind)
    for k, layer in enumerate(model.model.layers):
        names = {
            "attn_norm": layer.input_layernorm,
            "attn_q": layer.self_attn.q_proj,
            "attn_k": layer.self_attn.k_proj,
            "attn_v": layer.self_attn.v_proj,
            "attn_output": layer.self_attn.o_proj,
            "ffn_norm": layer.post_attention_layernorm,
            "ffn_gate": layer.mlp.gate_proj,
            "ffn_up": layer.mlp.up_proj,
            "ffn_down": layer.mlp.down_proj,
        }
        for label, part in names.items():
            weight = part.weight.detach()
            if label in ("attn_q", "attn_k"):  # llama.cpp rotates pairs, not halves
                heads = len(weight) // 64
                weight = weight.view(heads, 2, 32, -1).transpose(1, 2).reshape(weight.shape)
            add(writer, f"blk.{k}.{label}.weight", weight, kind)


def of_gpt2(writer: Any, model: Any, kind: Any) -> None:
    import gguf

    writer.add_feed_forward_length(4 * model.config.hidden_size)
    writer.add_layer_norm_eps(model.config.layer_norm_epsilon)
    body = model.transformer
    add(writer, "token_embd.weight", body.wte.weight, kind)
    add(writer, "position_embd.weight", body.wpe.weight[:512], gguf.GGMLQuantizationType.F32)
    add(writer, "output.weight", model.lm_head.weight, kind)
    for label, part in (("output_norm", body.ln_f),):
        add(writer, f"{label}.weight", part.weight, kind)
        add(writer, f"{label}.bias", part.bias, kind)
    for k, layer in enumerate(body.h):
        names = {
            "attn_norm": layer.ln_1,
            "attn_qkv": layer.attn.c_attn,
            "attn_output": layer.attn.c_proj,
            "ffn_norm": layer.ln_2,
            "ffn_up": layer.mlp.c_fc,
            "ffn_down": layer.mlp.c_proj,
        }
        for label, part in names.items():
            add(
                writer,
                f"blk.{k}.{label}.weight",
                part.weight.t() if part.weight.dim() == 2 else part.weight,
                kind,
            )
            add(writer, f"blk.{k}.{label}.bias", part.bias, kind)


MAKERS = {
    "eager": eager,
    "compile": compiled,
    "blade": with_blade,
    "onnxruntime": with_onnxruntime,
    "llama.cpp": with_llama_cpp,
}


# --- one process per way ---


def work(way: str, name: str, bits: int, folder: Path) -> None:
    """Prepare, then answer each line of stdin by a line of measurements."""
    import resource

    import torch

    torch.set_num_threads(THREADS)
    lines, sys.stdout = sys.stdout, sys.stderr
    start = time.perf_counter()
    run, step = MAKERS[way](name, bits, folder)
    tokens = run()
    ready = {
        "ready_s": time.perf_counter() - start,
        "tokens": tokens,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    print(json.dumps(ready | {"now_mb": resident_mb()}), file=lines, flush=True)
    for _ in sys.stdin:
        start, cpu = time.perf_counter(), time.process_time()
        run()
        found = {"s": time.perf_counter() - start, "cpu_s": time.process_time() - cpu}
        if step is not None:
            start = time.perf_counter()
            for _ in range(10):
                step()
            found["step_s"] = (time.perf_counter() - start) / 10
        print(json.dumps(found), file=lines, flush=True)


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


class Worker:
    """A process that measures one way."""

    def __init__(self, way: str, name: str, bits: int, folder: Path, log: Any) -> None:
        command = [sys.executable, __file__, "--work", way, name, str(bits), str(folder)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, text=True)
        self.way, self.found = way, []
        self.ready = self._answer()

    def _answer(self) -> dict[str, Any] | None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else None

    def measure(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        found = self._answer()
        if found is not None:
            self.found.append(found)

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def bandwidth_gb() -> float:
    """GB/s of a sum over 512 MB, in both threads: the best of three."""
    import torch

    torch.set_num_threads(THREADS)
    held = torch.ones(2**26, dtype=torch.int64)
    best = 0.0
    for _ in range(3):
        start = time.perf_counter()
        held.sum()
        best = max(best, held.nbytes / (time.perf_counter() - start) / 1e9)
    return best


def compare(
    name: str, bits: int, ways: list[str], rounds: int, folder: Path, log: Any
) -> dict[str, Any]:
    workers = [Worker(way, name, bits, folder, log) for way in ways]
    served = [w for w in workers if w.ready is not None]
    bandwidths = []
    for round_ in range(rounds):
        bandwidths.append(bandwidth_gb())
        for k in range(len(served)):
            served[(k + round_) % len(served)].measure()
    for worker in workers:
        worker.end()
    speed = statistics.median(bandwidths)
    rows = {w.way: row(w, name, bits, speed) for w in served}
    missing = [w.way for w in workers if w.ready is None]
    return {"model": name, "bits": bits, "gb_s": speed, "rows": rows, "failed": missing}


def row(worker: Worker, name: str, bits: int, speed: float) -> dict[str, Any]:
    seconds = [f["s"] for f in worker.found]
    bound = bytes_of(name, bits, worker.way) / speed / 1e9
    made = {
        "tokens_s": NEW / statistics.median(seconds),
        "least_tokens_s": NEW / max(seconds),
        "cpu_ms_per_token": 1e3 * statistics.median(f["cpu_s"] for f in worker.found) / NEW,
        "ms_per_token": 1e3 * statistics.median(seconds) / NEW,
        "bound_ms": 1e3 * bound,
        **{k: v for k, v in (worker.ready or {}).items() if k != "tokens"},
    }
    if "step_s" in worker.found[0]:
        step = statistics.median(f["step_s"] for f in worker.found)
        made["step_ms"] = 1e3 * step
        made["of_bandwidth"] = bound / step
    return made


def show(result: dict[str, Any]) -> None:
    print(f"\n{result['model']}, {result['bits']} bits; {result['gb_s']:.1f} GB/s")
    for way, one in result["rows"].items():
        step = f"{one['step_ms']:8.2f}" if "step_ms" in one else "       -"
        share = f"{one['of_bandwidth']:.2f}" if "of_bandwidth" in one else "   -"
        print(
            f"  {way:12} {one['tokens_s']:7.2f} tokens/s  {one['ms_per_token']:8.2f} ms"
            f"  cpu {one['cpu_ms_per_token']:8.2f}  step {step}  bound {one['bound_ms']:6.2f}  of bandwidth {share}"
            f"  ready {one['ready_s']:6.1f} s  {one['now_mb']:6.0f} MB now, {one['peak_mb']:6.0f} at most"
        )
    if result["failed"]:
        print("  failed:", ", ".join(result["failed"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default="gpt2,llama")
    parser.add_argument("--bits", default="32,8,4")
    parser.add_argument("--ways", default="")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where exported files are kept")
    parser.add_argument("--log", type=Path, default=Path(os.devnull))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--work", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        way, name, bits, folder = given.work
        work(way, name, int(bits), Path(folder))
        return
    with tempfile.TemporaryDirectory() as kept, given.log.open("w") as log:
        folder = given.folder or Path(kept)
        folder.mkdir(parents=True, exist_ok=True)
        for name in given.models.split(","):
            for bits in map(int, given.bits.split(",")):
                ways = [w for w in WAYS[bits] if not given.ways or w in given.ways.split(",")]
                result = compare(name, bits, ways, given.rounds, folder, log)
                show(result)
                if given.json:
                    facts = {"command": sys.argv, "python": platform.python_version()}
                    with given.json.open("a") as file:
                        file.write(json.dumps(result | facts) + "\n")


if __name__ == "__main__":
    main()

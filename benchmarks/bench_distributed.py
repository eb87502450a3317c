# SPDX-License-Identifier: Apache-2.0
"""Training steps of a language model on several devices: DDP and FSDP2, under eager mode, Inductor and aot_disc.

python benchmarks/bench_distributed.py --processes 2                        # GPUs, one process each
python benchmarks/bench_distributed.py --device cpu --width 64 --layers 2 --steps 4

DDP compiles the wrapped module as a whole; torch's DDPOptimizer cuts it where a bucket of gradients is full. FSDP2
compiles each block for itself. Each pair of a wrapper and a backend has processes of its own, one after the other. A
line of JSON per pair: losses, how far the parameters are from those of eager mode after all steps (by norm), seconds of
the first step, steps a second (median of those after ``WARM``), MiB at the peak per device, and for aot_disc the share
of ops in engines and the calls that fell back.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from suite.served import trained_coverage
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

WAYS = ("ddp", "fsdp")
BACKENDS = ("eager", "inductor", "aot_disc")
WORDS = 8192
WARM = 3  # steps that are not timed


class Block(nn.Module):
    """Causal attention and a gated feed-forward part, with RMS norms before them."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.joint, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.joint(self.norms[0](x)).chunk(3, -1)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        gate, up = self.up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(functional.silu(gate) * up)


class LanguageModel(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(Block(width, width // 32) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, WORDS, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def main() -> None:
    args = _arguments()
    for way in args.ways:
        with tempfile.TemporaryDirectory() as folder:
            want: Any = None
            for backend in args.backends:
                file = Path(folder) / backend
                meeting = f"file://{folder}/{backend}.meeting"
                given = (args.processes, way, backend, meeting, str(file), vars(args))
                try:
                    # CUDA cannot be used in a fork of a process that used it
                    method = "spawn" if args.device == "cuda" else "fork"
                    torch.multiprocessing.start_processes(
                        _work, given, nprocs=args.processes, start_method=method
                    )
                except Exception as error:  # of one pair; the others go on
                    print(json.dumps({"way": way, "backend": backend, "failed": str(error)[-800:]}))
                    continue
                line, parameters = torch.load(file)
                want = parameters if want is None else want
                line["apart"] = float((parameters - want).norm() / want.norm())
                print(json.dumps(line), flush=True)


def _work(
    rank: int, count: int, way: str, backend: str, meeting: str, file: str, args: dict[str, Any]
) -> None:
    cuda = args["device"] == "cuda"
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    os.environ.update(LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(count))
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if cuda else "gloo", init_method=meeting, rank=rank, world_size=count
    )
    torch.manual_seed(0)
    model = LanguageModel(args["width"], args["layers"]).to(device)
    if way == "ddp":
        whole = DistributedDataParallel(model, bucket_cap_mb=args["bucket_mb"])
        run = whole if backend == "eager" else torch.compile(whole, **_named(backend, args))
    else:
        mesh = init_device_mesh(args["device"], (count,))
        for block in model.blocks:
            if backend != "eager":
                block.compile(**_named(backend, args))
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        run = model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    generator = torch.Generator().manual_seed(rank)
    losses, seconds = [], []
    for _ in range(args["steps"]):
        ids = torch.randint(0, WORDS, (args["batch"], args["length"] + 1), generator=generator)
        ids = ids.to(device)
        start = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16) if cuda else nullcontext():
            logits = run(ids[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # waits for the device
        seconds.append(time.perf_counter() - start)
    parameters = torch.cat(
        [_whole(p).detach().flatten().double().cpu() for p in model.parameters()]
    )
    if rank == 0:
        line = {"way": way, "backend": backend, "losses": [round(v, 5) for v in losses]}
        line["first_s"] = round(seconds[0], 2)
        line["steps_per_s"] = round(1 / statistics.median(seconds[WARM:] or seconds), 2)
        line["peak_mib"] = torch.cuda.max_memory_reserved() >> 20 if cuda else 0
        line.update(_served() if backend == "aot_disc" else {})
        torch.save((line, parameters), file)
    dist.destroy_process_group()


def _named(backend: str, args: dict[str, Any]) -> dict[str, Any]:
    """What ``torch.compile`` is given; aot_disc as a function: names are those of installed packages."""
    if backend != "aot_disc":
        return {"backend": backend}
    import blade

    return {"backend": blade.dynamo.aot_disc, "options": {"timing": args["timing"]}}


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


def _served() -> dict[str, Any]:
    from blade.dynamo.live_graphs import live_graphs

    found = trained_coverage("blade")["served"]
    ops = f"{found['ops']}/{found['all_ops']}"
    return {"graphs": len(live_graphs()), "ops": ops, "fallbacks": found["fallbacks"]}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--ways", type=lambda text: text.split(","), default=list(WAYS))
    parser.add_argument("--backends", type=lambda text: text.split(","), default=list(BACKENDS))
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--bucket-mb", type=float, default=25.0)
    told = "aot_disc serves whatever its engines' speed"
    parser.add_argument("--no-timing", dest="timing", action="store_false", help=told)
    return parser.parse_args()


if __name__ == "__main__":
    main()

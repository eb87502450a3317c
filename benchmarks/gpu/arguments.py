# SPDX-License-Identifier: Apache-2.0
"""The command line of bench_gpu.py: what is measured, which peers take part, for how long."""

import argparse
from pathlib import Path

from models import MODELS
from training import TASKS
from zoo.model import Shape

from gpu import patterns, steps
from gpu.device import Where, facts
from gpu.peers import PEERS

# In the order in which they are compiled: what is compared first of all comes first.
CALLS = "blade eager reduce_overhead inductor_graph inductor torchscript blade_launches".split()
STREAM = "blade reduce_overhead inductor eager".split()
KERNELS = "copy blade inductor inductor_static eager".split()
WHOLE = "blade eager reduce_overhead inductor torchscript".split()
TRAINED = "eager aot_disc inductor_static inductor_dynamic".split()


def arguments(description: str) -> argparse.Namespace:
    """As the command line gives them, completed by what depends on the command."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("what", choices=["bert", "stream", "kernels", "models", "train"])
    parser.add_argument("--seconds", type=float, default=220.0, help="for all of it")
    parser.add_argument("--peers", type=_names, help="in the order in which they are compiled")
    parser.add_argument("--models", type=_names, help="of models and stream")
    parser.add_argument("--patterns", type=_names, default=list(patterns.PATTERNS))
    parser.add_argument("--tasks", type=_names, default=["bert_base"], help="of train")
    parser.add_argument("--batches", type=lambda s: list(map(int, s.split(","))), default=[1])
    parser.add_argument("--shapes", type=_shapes, help="instead of the model's own: 1x32,8x128")
    parser.add_argument("--dtype", help="float16; of train, what autocast computes in: bfloat16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--random", type=int, default=200, metavar="N", help="shapes of stream")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--slice", type=float, default=0.1, help="seconds per peer, shape, round")
    parser.add_argument(
        "--breakdown", type=_names, default=[], help="of these peers, every kernel of a call"
    )
    parser.add_argument("--alone", action="store_true", help="train: one peer at a time")
    parser.add_argument(
        "--channels-last", action="store_true", help="train: weights and images lie channels last"
    )
    parser.add_argument("--json", type=Path, help="append one line per peer here")
    parser.add_argument("--width", type=int, default=150)
    parser.add_argument("--tiny", action="store_true", help="small models: does all of it work?")
    parser.add_argument("--dry-run", action="store_true", help="--tiny --device cpu, in a minute")
    args = parser.parse_args()
    if args.dry_run:
        args.tiny, args.device = True, "cpu"
        args.rounds, args.slice, args.random = 1, 0.01, min(args.random, 5)
    return _completed(parser, args)


def _completed(parser: argparse.ArgumentParser, args: argparse.Namespace) -> argparse.Namespace:
    """What depends on the command; unknown names are errors."""
    default = {"bert": CALLS, "stream": STREAM, "kernels": KERNELS, "models": WHOLE}
    args.peers = args.peers or default.get(args.what, TRAINED)
    args.models = args.models or (["bert"] if args.what == "stream" else ["vit"])
    known = {"bert": PEERS, "stream": PEERS, "models": PEERS, "kernels": {"copy", *PEERS}}
    for names, among in (
        (args.peers, known.get(args.what, steps.PEERS)),
        (args.models, MODELS),
        (args.tasks, TASKS),
        (args.patterns, patterns.PATTERNS),
    ):
        if unknown := [name for name in names if name not in among]:
            parser.error(f"unknown: {unknown}; known: {', '.join(among)}")
    halves = "bfloat16" if args.what == "train" else "float16"
    dtype = args.dtype or ("float32" if args.device == "cpu" else halves)
    args.where = Where(args.device, dtype, args.channels_last)
    args.facts = facts(args.where)
    return args


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _shapes(text: str) -> list[Shape]:
    return [tuple(map(int, item.split("x"))) for item in text.split(",")]

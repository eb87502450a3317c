# SPDX-License-Identifier: Apache-2.0
"""Whole programs before and after one line: ``model = blade.accelerate(model)``, beside ``torch.compile``.

    python benchmarks/bench_drop_in.py                # all programs, all ways
    python benchmarks/bench_drop_in.py generate --rounds 5

A program runs 100 times from the start, compilation included (first 100), then interleaved with the others
(median). Outputs are compared with the model's. Weights are random.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import blade

Program = Callable[[Any, int], Any]


def generate() -> tuple[Any, Program]:
    """32 tokens of a GPT-2 of 6 layers and width 384, greedily, from prompts of several lengths."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=384, n_layer=6, n_head=6, bos_token_id=0, eos_token_id=None)
    model = GPT2LMHeadModel(config).eval()
    prompts = [torch.randint(1, 50000, (1, length)) for length in (5, 9, 17, 30)]

    def program(used: Any, step: int) -> Any:
        ids = prompts[step % len(prompts)]
        mask = torch.ones_like(ids)
        return used.generate(
            ids, attention_mask=mask, max_new_tokens=32, do_sample=False, pad_token_id=0
        )

    return model, program


def encode() -> tuple[Any, Program]:
    """The last hidden state of a BERT of 6 layers and width 384 for batches of several sizes."""
    from transformers import BertConfig, BertModel

    config = BertConfig(
        hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536
    )
    model = BertModel(config).eval()
    batches = [torch.randint(1, 30000, size) for size in ((1, 12), (4, 20), (2, 33), (8, 16))]

    def program(used: Any, step: int) -> Any:
        ids = batches[step % len(batches)]
        with torch.no_grad():
            return used(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state

    return model, program


PROGRAMS = {"generate": generate, "encode": encode}
WAYS: dict[str, Callable[[Any], Any]] = {
    "eager": lambda model: model,
    "blade": blade.accelerate,
    "torch.compile": lambda model: _compiled(model),
}


def _compiled(model: Any) -> Any:
    import copy

    own = copy.deepcopy(model)
    own.forward = torch.compile(own.forward, dynamic=True)
    return own


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    if found.shape != expected.shape:
        return float("inf")
    return float((found - expected).abs().max() / expected.abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("programs", nargs="*", default=list(PROGRAMS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--first", type=int, default=100)
    parser.add_argument("--ways", default=",".join(WAYS))
    given = parser.parse_args()
    for name in given.programs:
        torch.manual_seed(0)
        model, program = PROGRAMS[name]()
        ways = {way: WAYS[way](model) for way in given.ways.split(",")}
        first: dict[str, float] = {}
        for way, used in ways.items():
            start = time.perf_counter()
            for step in range(given.first):
                program(used, step)
            first[way] = time.perf_counter() - start
            if way == "blade":
                blade.wait(used)
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        errors = dict.fromkeys(ways, 0.0)
        for step in range(given.rounds * 4):
            expected = program(model, step).double()
            for way, used in ways.items():
                start = time.perf_counter()
                found = program(used, step)
                seconds[way].append(time.perf_counter() - start)
                errors[way] = max(errors[way], _error(found.double(), expected))
        for way in ways:
            middle = statistics.median(seconds[way]) * 1e3
            print(
                f"{name} | {way} | {middle:.2f} ms | first {given.first}: {first[way]:.1f} s | error {errors[way]:.1e}"
            )
        if "blade" in ways:
            print(blade.stats(ways["blade"]))


if __name__ == "__main__":
    main()

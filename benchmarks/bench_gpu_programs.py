# SPDX-License-Identifier: Apache-2.0
"""Whole programs on a GPU, one line of each changed: a Stable Diffusion pipeline, and ``generate`` of a Llama.

    python benchmarks/bench_gpu_programs.py                          # all programs, all ways
    python benchmarks/bench_gpu_programs.py sd --ways eager,blade --limit 300

Each way runs in a process of its own. Weights are random, in the shapes of SD 1.5 (float16) and Llama-3.2-1B
(bfloat16). A row has the seconds until the way was ready (its first calls, compilation included), the median of a
whole program, and the difference of its output to eager's, which runs first.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch

import blade

FOLDER = Path("build/gpu_programs")
SD_STEPS = 20
LLAMA = ((1, 128), (1, 1024), (8, 512), (1, 4000))  # (batch, prompt)
NEW = 64  # tokens
ROUNDS = 5
READY = 7  # calls before a way is taken to be ready; those of blade are waited for


class Words:
    """A tokenizer of made-up tokens."""

    model_max_length = 77
    added_tokens_encoder: ClassVar[dict[str, int]] = {}

    def __call__(self, text: Any, **_: Any) -> Any:
        from transformers import BatchEncoding

        count = len(text) if isinstance(text, list) else 1
        made = torch.Generator().manual_seed(len(str(text)))
        ids = torch.randint(3, 40000, (count, 77), generator=made)
        return BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids)})

    def tokenize(self, text: str) -> list[str]:
        return text.split()

    def batch_decode(self, *_: Any, **__: Any) -> list[str]:
        return [""]


def stable_diffusion(device: str) -> tuple[Any, Callable[[Any], torch.Tensor]]:
    """512 x 512 pixels, 20 steps, classifier-free guidance: the UNet runs at a batch of 2."""
    from diffusers import (
        AutoencoderKL,
        DDIMScheduler,
        StableDiffusionPipeline,
        UNet2DConditionModel,
    )
    from transformers import CLIPTextConfig, CLIPTextModel

    torch.manual_seed(0)
    with torch.device(device):
        unet = UNet2DConditionModel(sample_size=64, cross_attention_dim=768, attention_head_dim=8)
        down, up = ["DownEncoderBlock2D"] * 4, ["UpDecoderBlock2D"] * 4
        vae = AutoencoderKL(
            block_out_channels=(128, 256, 512, 512),
            down_block_types=down,
            up_block_types=up,
            layers_per_block=2,
        )
        text = CLIPTextModel(
            CLIPTextConfig(
                hidden_size=768,
                intermediate_size=3072,
                num_hidden_layers=12,
                num_attention_heads=12,
                projection_dim=768,
            )
        )
    scheduler = DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
    )
    pipe = StableDiffusionPipeline(
        unet=unet.eval(),
        vae=vae.eval(),
        text_encoder=text.eval(),
        tokenizer=None,
        scheduler=scheduler,
        safety_checker=None,
        feature_extractor=None,
        image_encoder=None,
        requires_safety_checker=False,
    ).to(torch.float16)
    pipe.set_progress_bar_config(disable=True)
    pipe.tokenizer = Words()

    def program(used: Any) -> torch.Tensor:
        made = torch.Generator(device).manual_seed(0)
        out = used(
            "a photo of a cat", num_inference_steps=SD_STEPS, generator=made, output_type="pt"
        )
        return out.images.float()

    return pipe, program


def llama(batch: int, prompt: int) -> Callable[[str], tuple[Any, Callable[[Any], torch.Tensor]]]:
    def make(device: str) -> tuple[Any, Callable[[Any], torch.Tensor]]:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=2048,
            intermediate_size=8192,
            num_hidden_layers=16,
            num_attention_heads=32,
            num_key_value_heads=8,
            vocab_size=128256,
            max_position_embeddings=8192,
            tie_word_embeddings=True,
            bos_token_id=1,
            eos_token_id=None,
            pad_token_id=0,
        )
        with torch.device(device):
            model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
        ids = torch.randint(2, 128000, (batch, prompt), device=device)
        mask = torch.ones_like(ids)

        def program(used: Any) -> torch.Tensor:
            how = getattr(used, "how_to_generate", {})
            return used.generate(  # type: ignore[no-any-return]
                ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, **how
            )

        return model, program

    return make


PROGRAMS: dict[str, Callable[[str], tuple[Any, Callable[[Any], torch.Tensor]]]] = {
    "sd": stable_diffusion,
    **{f"llama-{batch}x{prompt}": llama(batch, prompt) for batch, prompt in LLAMA},
}


def _compiled(model: Any) -> Any:
    """As the documentation of the library has it."""
    if hasattr(model, "unet"):
        model.unet = torch.compile(model.unet, mode="reduce-overhead", fullgraph=True)
        model.vae.decode = torch.compile(model.vae.decode, mode="reduce-overhead", fullgraph=True)
    else:  # generate compiles forward itself, in mode reduce-overhead, if the cache is static
        model.how_to_generate = {"cache_implementation": "static"}
    return model


def _static(model: Any) -> Any:
    made = blade.accelerate(model)
    made.how_to_generate = {"cache_implementation": "static", "disable_compile": True}
    return made


WAYS: dict[str, Callable[[Any], Any]] = {
    "eager": lambda model: model,
    "torch.compile": _compiled,
    "blade": blade.accelerate,
    "blade, static cache": _static,
}


def _one(name: str, way: str, device: str, rounds: int) -> dict[str, Any]:
    sync = torch.cuda.synchronize if device == "cuda" else lambda: None
    with torch.no_grad():
        model, program = PROGRAMS[name](device)
        sync()
        start = time.perf_counter()
        used = WAYS[way](model)
        for _ in range(READY):
            program(used)
            if way.startswith("blade"):
                blade.wait(used)
        sync()
        ready = time.perf_counter() - start
        times = []
        for _ in range(rounds):
            sync()
            start = time.perf_counter()
            found = program(used)
            sync()
            times.append((time.perf_counter() - start) * 1e3)
    row = {"program": name, "way": way, "ready_s": ready, "ms": statistics.median(times)}
    row["spread"] = (min(times), max(times))
    if device == "cuda":
        row["reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
    if way.startswith("blade"):
        row["stats"] = {
            key: counters
            for key, counters in blade.stats(used).items()
            if "cluster" not in key or counters.get("fallbacks")
        }
        row["reasons"] = [f"{one.code.value}: {one.detail}" for one in blade.report(used).reasons][
            :6
        ]
    known = FOLDER / f"{name}.pt"
    if way == "eager":
        torch.save(found.cpu(), known)
    elif known.exists():
        expected = torch.load(known)
        if found.is_floating_point():
            row["error"] = float((found.cpu() - expected).abs().max())
        else:
            row["equal_tokens"] = float((found.cpu() == expected).float().mean())
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("programs", nargs="*", default=list(PROGRAMS))
    parser.add_argument("--ways", default=";".join(WAYS), help="separated by semicolons")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--limit", type=float, default=240.0, help="seconds per program and way")
    parser.add_argument("--one", action="store_true", help="in this process; one program, one way")
    given = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    if given.one:
        print(json.dumps(_one(given.programs[0], given.ways, given.device, given.rounds)))
        return
    for name in given.programs:
        for way in given.ways.split(";"):
            if name == "sd" and "cache" in way:
                continue
            command = [sys.executable, __file__, name, "--ways", way, "--one"]
            command += ["--device", given.device, "--rounds", str(given.rounds)]
            try:
                ran = subprocess.run(command, capture_output=True, text=True, timeout=given.limit)
                lines = ran.stdout.splitlines()
                shown = lines[-1] if ran.returncode == 0 and lines else ran.stderr[-1500:]
            except subprocess.TimeoutExpired:
                shown = f"not ready after {given.limit:.0f} s"
            print(f"{name} | {way} | {shown}", flush=True)


if __name__ == "__main__":
    main()

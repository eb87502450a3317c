# SPDX-License-Identifier: Apache-2.0
"""Programs of sentence-transformers, diffusers, peft and accelerate, and a web service."""

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from drop_in.pipelines import bert, gpt2, pipeline_program
from drop_in.program import Change, Program, Scale, minilm_folder, texts


def encode(scale: Scale) -> Program:
    """``encode`` of sentence-transformers, with the weights of MiniLM."""
    from sentence_transformers import SentenceTransformer

    found = [SentenceTransformer(minilm_folder())]
    batches = [texts(), texts()[:1], texts()[1:3]]

    def run(k: int) -> Any:
        return found[0].encode(batches[k % len(batches)], normalize_embeddings=True)

    def change(f: Change) -> list[torch.nn.Module]:
        found[0] = f(found[0])
        return [found[0]]

    return Program(run, change)


def stable_diffusion(scale: Scale) -> Program:
    """StableDiffusionPipeline, the UNet changed."""
    from diffusers import PNDMScheduler, StableDiffusionPipeline, UNet2DConditionModel
    from transformers import AutoTokenizer, CLIPTextConfig, CLIPTextModel

    tokenizer = AutoTokenizer.from_pretrained(minilm_folder())
    tokenizer.model_max_length = 24
    text = CLIPTextConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=tokenizer.vocab_size,
        max_position_embeddings=24,
        bos_token_id=101,
        eos_token_id=102,
        pad_token_id=0,
    )
    width = max(scale.width // 4, 16)
    plain = min(scale.layers - 1, 1)  # blocks without attention
    unet = UNet2DConditionModel(
        sample_size=scale.side // 4,
        block_out_channels=(width, 2 * width)[: 1 + plain],
        layers_per_block=1,
        down_block_types=("DownBlock2D",) * plain + ("CrossAttnDownBlock2D",),
        up_block_types=("CrossAttnUpBlock2D",) + ("UpBlock2D",) * plain,
        cross_attention_dim=32,
        attention_head_dim=8,
        norm_num_groups=8,
    )
    pipe = StableDiffusionPipeline(
        vae=_vae(),
        text_encoder=CLIPTextModel(text).eval(),
        tokenizer=tokenizer,
        unet=unet.eval(),
        scheduler=PNDMScheduler(skip_prk_steps=True, steps_offset=1),
        safety_checker=None,
        feature_extractor=None,
        image_encoder=None,
        requires_safety_checker=False,
    )
    pipe.set_progress_bar_config(disable=True)
    prompts = ["a cat", "a photo of a dog that sits in the park"]

    def call(pipe: Any, k: int) -> Any:
        rng = torch.Generator().manual_seed(k)
        prompt = prompts[k % len(prompts)]
        return pipe(prompt, num_inference_steps=scale.steps, generator=rng, output_type="np").images

    return pipeline_program(pipe, "unet", call)


def dit(scale: Scale) -> Program:
    """DiTPipeline, the transformer changed."""
    from diffusers import DDIMScheduler, DiTPipeline, DiTTransformer2DModel

    transformer = DiTTransformer2DModel(
        num_attention_heads=scale.heads,
        attention_head_dim=scale.width // scale.heads,
        in_channels=4,
        out_channels=8,
        num_layers=scale.layers,
        sample_size=scale.side // 8,
        patch_size=2,
        num_embeds_ada_norm=1000,
    ).eval()
    for parameter in transformer.parameters():  # the last layer starts at zero
        torch.nn.init.normal_(parameter, std=0.05)
    pipe = DiTPipeline(transformer=transformer, vae=_vae(), scheduler=DDIMScheduler())
    pipe.set_progress_bar_config(disable=True)
    labels = [[1], [2, 3]]

    def call(pipe: Any, k: int) -> Any:
        return pipe(
            labels[k % len(labels)],
            num_inference_steps=scale.steps,
            generator=torch.Generator().manual_seed(k),
            output_type="np",
        ).images

    return pipeline_program(pipe, "transformer", call)


def lora(scale: Scale) -> Program:
    """A BERT under LoRA of rank 8."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=8, target_modules=["query", "value"], init_lora_weights=False)
    return _calls(get_peft_model(bert(scale), config).eval())


def lora_generate(scale: Scale) -> Program:
    """``generate`` of a GPT-2 under LoRA. peft calls the model inside, so that is what changes."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=8, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False
    )
    model = get_peft_model(gpt2(scale), config).eval()

    def run(k: int) -> Any:
        ids = _ids(1, (5, 9, 17)[k % 3])
        mask = torch.ones_like(ids)
        return model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=scale.new_tokens, do_sample=False
        )

    def change(f: Change) -> list[torch.nn.Module]:
        model.base_model.model = f(model.base_model.model)
        return [model.base_model.model]

    return Program(run, change)


def prepared(scale: Scale) -> Program:
    """A BERT that ``Accelerator.prepare`` returned."""
    from accelerate import Accelerator

    return _calls(Accelerator(cpu=True).prepare(bert(scale)))


def service(scale: Scale) -> Program:
    """A FastAPI app that embeds texts with MiniLM's weights; a run is 16 requests at once, of 16 threads."""
    from fastapi import FastAPI
    from fastapi.testclient import TestClient
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(minilm_folder())
    found = [AutoModel.from_pretrained(minilm_folder()).eval()]
    app = FastAPI()

    @app.get("/embed")
    def embed(text: str) -> list[float]:
        tokens = tokenizer(text, return_tensors="pt")
        with torch.no_grad():
            return found[0](**tokens).last_hidden_state[0].mean(0).tolist()

    client = TestClient(app)
    rng = random.Random(0)
    words = " ".join(texts()).split()
    lengths = (1, 2, 3, 5, 8, 13, 21)
    requests = [" ".join(rng.choices(words, k=rng.choice(lengths))) for _ in range(64)]

    def ask(text: str) -> Any:
        return client.get("/embed", params={"text": text}).raise_for_status().json()

    def run(k: int) -> Any:
        chosen = [requests[(16 * k + one) % len(requests)] for one in range(16)]
        with ThreadPoolExecutor(16) as threads:
            return list(threads.map(ask, chosen))

    def change(f: Change) -> list[torch.nn.Module]:
        found[0] = f(found[0])
        return [found[0]]

    return Program(run, change)


def _calls(model: Any) -> Program:
    """Calls of ``model`` with token ids of several sizes."""
    found = [model]

    def run(k: int) -> Any:
        ids = _ids(*((1, 12), (4, 20), (2, 33))[k % 3])
        with torch.no_grad():
            return found[0](input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state

    def change(f: Change) -> list[torch.nn.Module]:
        found[0] = f(found[0])
        return [found[0]]

    return Program(run, change)


def _ids(batch: int, length: int) -> torch.Tensor:
    rng = torch.Generator().manual_seed(length)
    return torch.randint(1000, 30000, (batch, length), generator=rng)


def _vae() -> Any:
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=(16, 32),
        down_block_types=["DownEncoderBlock2D"] * 2,
        up_block_types=["UpDecoderBlock2D"] * 2,
        latent_channels=4,
        norm_num_groups=8,
        sample_size=16,
    ).eval()

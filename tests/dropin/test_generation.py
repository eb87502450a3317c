# SPDX-License-Identifier: Apache-2.0
"""Drop-ins in transformers: ``generate`` and pipelines."""

import copy
from typing import Any

import pytest
import torch
from generative_models import t5, tokens

import blade
from blade.backends.quant.analysis.affine import group_of
from blade.backends.quant.search.cpu_plans import GROUP
from blade.config import Config
from blade.dropin.accelerate import state_of

transformers = pytest.importorskip("transformers")
QUICK = Config(optimization_pipeline="disc", timing=False, time_budget=None)
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz"]


def _gpt2() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_embd=32,
        n_layer=2,
        n_head=2,
        vocab_size=64,
        n_positions=64,
        bos_token_id=1,
        eos_token_id=63,
    )
    return transformers.GPT2LMHeadModel(config).eval()


@pytest.mark.parametrize("make", [_gpt2, t5])
def test_generate_gives_the_models_tokens(make: Any) -> None:
    model = make()
    fast = blade.accelerate(model, config=QUICK)
    ids = torch.randint(2, 60, (1, 5))
    for _ in range(3):
        assert tokens(fast, ids, do_sample=False) == tokens(model, ids, do_sample=False)
        assert blade.wait(fast, 200)
    before = blade.stats(fast)["original"]["calls"]
    longer = torch.randint(2, 60, (2, 7))
    for how in ({"do_sample": False}, {"do_sample": True}, {"num_beams": 3, "do_sample": False}):
        assert tokens(fast, longer, **how) == tokens(model, longer, **how)
    if make is _gpt2:
        assert blade.stats(fast)["original"]["calls"] == before
    assert blade.stats(fast)["call 1"]["calls"] > 20


def _tokenizer() -> Any:
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: place for place, word in enumerate(VOCABULARY)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    names = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
    special = {f"{name}_token": token for name, token in names.items()}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **special)


@pytest.mark.parametrize(
    ("task", "name"),
    [
        ("feature-extraction", "BertModel"),
        ("text-classification", "BertForSequenceClassification"),
        ("token-classification", "BertForTokenClassification"),
        ("fill-mask", "BertForMaskedLM"),
    ],
)
def test_pipelines_give_the_models_outputs(task: str, name: str) -> None:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        vocab_size=40,
    )
    model = getattr(transformers, name)(config).eval()
    pipe = transformers.pipeline(task, model=model, tokenizer=_tokenizer())
    texts = ["a b [MASK] c", "d [MASK]", "e f g h [MASK] i j"]
    expected = [pipe(text) for text in texts]
    with blade.record(pipe.model) as samples:
        pipe(texts[0])
    fast = transformers.pipeline(
        task, model=blade.accelerate(model, samples, QUICK), tokenizer=_tokenizer()
    )
    for text, output in zip(texts, expected):
        _close(fast(text), output)
    assert blade.stats(fast.model)["original"]["calls"] == 0


def _close(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(found, dict):
        assert found.keys() == expected.keys()
        for key in found:
            _close(found[key], expected[key])
    elif isinstance(found, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected):
            _close(one, other)
    elif isinstance(found, str):
        assert found == expected
    else:
        assert float(found) == pytest.approx(float(expected), rel=1e-4, abs=1e-5)


def _llama() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=64,
        max_position_embeddings=64,
    )
    return transformers.LlamaForCausalLM(config).eval()


@pytest.mark.parametrize(("make", "bits"), [(_gpt2, 8), (_llama, 4)])
def test_weight_only_gives_the_tokens_of_the_quantized_model(make: Any, bits: int) -> None:
    """The reference is eager, with the weights of the products quantized and dequantized."""
    model = make()
    ids = torch.randint(2, 60, (1, 5))
    with blade.record(model) as samples:
        tokens(model, ids, do_sample=False)
    config = QUICK.evolve(
        optimization_pipeline="quant",
        enable_int8=True,
        quantization_type="weight_only",
        weight_bits=bits,
        accuracy_budget={"cosine": 0.9},
    )
    fast = blade.accelerate(model, list(samples[:2]), config)
    quantized = _with_rounded_weights(model, bits)
    for prompt in (ids, torch.randint(2, 60, (2, 7))):
        assert tokens(fast, prompt, do_sample=False) == tokens(quantized, prompt, do_sample=False)
    assert blade.stats(fast)["original"]["calls"] == 0
    prepared = state_of(fast).most_called()
    assert len(prepared) == 2  # with and without a past
    weights = {w.data_ptr() for w in model.parameters() if w.dim() == 2}
    for one in prepared:
        held = {b.data_ptr() for b in one.module.buffers()}
        assert weights <= held  # the memory of the model's
        layers = [c for x in blade.report(one.module).clusters for c in x.precision]
        assert layers and all(c.precision == f"int{bits} weight-only" for c in layers)


def _with_rounded_weights(model: Any, bits: int) -> Any:
    rounded = copy.deepcopy(model)
    kinds = (torch.nn.Linear, transformers.pytorch_utils.Conv1D)
    if rounded.config.tie_word_embeddings:
        rounded.lm_head.weight = torch.nn.Parameter(rounded.lm_head.weight.detach().clone())
    for layer in rounded.modules():
        if isinstance(layer, kinds):
            is_linear = isinstance(layer, torch.nn.Linear)
            weight = layer.weight.detach() if is_linear else layer.weight.detach().T
            group = weight.shape[1] if bits == 8 else group_of(weight.shape[1], GROUP)
            rows = weight.reshape(len(weight), -1, group)
            high = 2 ** (bits - 1) - 1
            scales = rows.abs().amax(-1, keepdim=True) / high
            made = ((rows / scales).round() * scales).reshape(weight.shape)
            layer.weight.data = made if is_linear else made.T.contiguous()
    return rounded

# SPDX-License-Identifier: Apache-2.0
"""``generate`` with static caches, sliding windows, and assistants."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from generative_models import t5, tokens

import blade
from blade.config import Config

transformers = pytest.importorskip("transformers")
QUICK = Config(optimization_pipeline="disc", timing=False, time_budget=None)
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 64,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 63,
}


def _llama() -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()


def _mistral() -> Any:
    torch.manual_seed(0)
    config = transformers.MistralConfig(**SIZES, sliding_window=8)
    return transformers.MistralForCausalLM(config).eval()


def _gemma() -> Any:
    torch.manual_seed(0)
    config = transformers.Gemma2Config(**SIZES, head_dim=16, sliding_window=8)
    return transformers.Gemma2ForCausalLM(config).eval()


def _originals(module: Any) -> int:
    return blade.stats(module)["original"]["calls"]


def _kinds(module: Any) -> int:
    """How many kinds of calls of the model itself are optimized; an encoder is called, and optimized, apart."""
    return sum(name.startswith("call ") and ":" not in name for name in blade.stats(module))


@pytest.mark.parametrize(
    ("make", "cache"),
    [
        (_llama, "static"),
        (_mistral, "dynamic"),
        (_mistral, "static"),
        (_gemma, "dynamic"),
        (_gemma, "static"),
        (t5, "static"),
    ],
)
def test_generate_with_every_cache(make: Callable[[], Any], cache: str) -> None:
    """Once prefill and the steps before and behind a full window are optimized, nothing is left to the model, and
    nothing is added in 40 steps."""
    model = make()
    fast = blade.accelerate(model, config=QUICK)
    how = {"cache_implementation": "static"} if cache == "static" else {}
    ids = torch.randint(2, 60, (1, 5))
    for _ in range(3):
        assert tokens(fast, ids, **how) == tokens(model, ids, **how)
        assert blade.wait(fast, 200)
    before, kinds = _originals(fast), _kinds(fast)
    longer = torch.randint(2, 60, (2, 7))
    for more in (
        {"do_sample": True},
        {"num_beams": 3},
        {"min_new_tokens": 40, "max_new_tokens": 40},
    ):
        how_now = {**how, **more}
        assert tokens(fast, longer, **how_now) == tokens(model, longer, **how_now)
        blade.wait(fast, 200)
    assert _kinds(fast) == kinds <= 3
    assert _originals(fast) == before


@torch.no_grad()
def test_a_static_cache_of_the_users_own() -> None:
    model = _llama()
    fast = blade.accelerate(model, config=QUICK)
    ids = torch.randint(2, 60, (1, 12))
    for _ in range(4):  # prefill, and single steps
        caches = [transformers.StaticCache(model.config, max_cache_len=16) for _ in range(2)]
        for begin, end in ((0, 4), (4, 5), (5, 6), (6, 7), (7, 8)):
            found, expected = (
                one(ids[:, begin:end], cache=cache) for one, cache in zip((fast, model), caches)
            )
            torch.testing.assert_close(found.logits, expected.logits)
            assert found.cache is caches[0]
            if begin == 0:
                held = [(one.keys, one.values, one.cumulative_length) for one in caches[0].layers]
        for own, one, other in zip(held, caches[0].layers, caches[1].layers):
            now = (one.keys, one.values, one.cumulative_length)
            assert all(a is b for a, b in zip(own, now)) and int(now[2]) == 8
            torch.testing.assert_close(one.keys, other.keys)
            assert (one.batch_size, one.num_heads) == (other.batch_size, other.num_heads)
        assert blade.wait(fast, 200)
    before = _originals(fast)
    longer = transformers.StaticCache(model.config, max_cache_len=40)
    fast(ids, cache=longer)
    assert int(longer.get_seq_length()) == 12 and _originals(fast) == before


def test_calls_with_a_static_cache_are_one_cluster() -> None:
    """Nothing of such a call writes to its arguments, so that nothing cuts it: on a GPU each cut is a graph more."""
    model = _llama()
    fast = blade.accelerate(model, config=QUICK)
    ids = torch.randint(2, 60, (1, 5))
    for _ in range(3):
        how = {"cache_implementation": "static", "min_new_tokens": 8, "max_new_tokens": 8}
        assert tokens(fast, ids, **how) == tokens(model, ids, **how)
        assert blade.wait(fast, 200)
    steps = max(
        (name for name in blade.stats(fast) if name.count(" ") == 1),
        key=lambda name: blade.stats(fast)[name]["calls"],
    )
    ran = [
        counts["engine_runs"]
        for name, counts in blade.stats(fast).items()
        if name.startswith(f"{steps}: cluster") and counts["calls"]
    ]
    assert ran == [blade.stats(fast)[steps]["calls"]] and ran[0] >= 7


def _assistant() -> Any:
    made = _llama()
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.003)
    made.generation_config.assistant_confidence_threshold = (
        0  # else rounding decides how many tokens it drafts
    )
    return made


def test_assisted_generation() -> None:
    """The drop-in is the main model, the assistant, or both; caches are cropped between the calls."""
    model, assistant = _llama(), _assistant()
    fast, fast_assistant = blade.accelerate(model, config=QUICK), None
    ids = torch.randint(2, 60, (1, 6))
    plain = tokens(model, ids, max_new_tokens=20)
    fast_assistant = blade.accelerate(assistant, config=QUICK)
    for helper in (assistant, fast_assistant, fast_assistant, fast_assistant):
        assert tokens(fast, ids, assistant_model=helper, max_new_tokens=20) == plain
        assert blade.wait(fast, 200) and blade.wait(fast_assistant, 200)
    for _ in range(2):
        tokens(fast, ids, assistant_model=fast_assistant, max_new_tokens=24, do_sample=True)
        assert blade.wait(fast, 200) and blade.wait(fast_assistant, 200)
    assert tokens(model, ids, assistant_model=fast_assistant, max_new_tokens=20) == plain
    before = _originals(fast), _originals(fast_assistant)
    for more in ({}, {"do_sample": True}):
        how = {"max_new_tokens": 24, **more}
        found = tokens(fast, ids, assistant_model=fast_assistant, **how)
        assert found == tokens(model, ids, assistant_model=assistant, **how)
    assert (_originals(fast), _originals(fast_assistant)) == before


def test_prompt_lookup() -> None:
    """It passes another ``logits_to_keep`` in most calls: an int of many values is no part of the kind."""
    model = _mistral()
    fast = blade.accelerate(model, config=QUICK)
    ids = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6]])
    how = {"prompt_lookup_num_tokens": 5, "max_new_tokens": 24}
    expected = tokens(model, ids, **how)
    for _ in range(5):
        assert tokens(fast, ids, **how) == expected
        assert blade.wait(fast, 200)
    before, kinds = _originals(fast), _kinds(fast)
    more = torch.cat((ids, ids), 1)
    assert tokens(fast, more, **how) == tokens(model, more, **how)
    assert _originals(fast) - before <= 1 and _kinds(fast) == kinds <= 3

# SPDX-License-Identifier: Apache-2.0
"""LoRA of peft: drop-ins of adapted models, and adapters on top of drop-ins."""

import copy
from typing import Any

import pytest
import torch
from one_line import QUICK, TINY, bert, check

import blade

pytestmark = pytest.mark.needs("transformers", "peft")
IDS = [torch.randint(1000, 30000, size) for size in ((2, 7), (1, 12), (3, 5))]


def _bert() -> Any:
    torch.manual_seed(0)
    return bert(TINY)


def _adapted(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    config = LoraConfig(r=4, target_modules=["query", "value"], init_lora_weights=False)
    return get_peft_model(model, config).eval()


@torch.no_grad()
def _answers(model: Any) -> list[torch.Tensor]:
    return [model(input_ids=ids).last_hidden_state for ids in IDS]


def _optimized(model: Any, drop_in: Any, expected: list[torch.Tensor]) -> None:
    """The answers are as expected at once, and after the calls were optimized for the model as it is now."""
    for _ in range(2):
        torch.testing.assert_close(_answers(model), expected, rtol=1e-4, atol=1e-5)
        assert blade.wait(drop_in, 300)
    before = blade.stats(drop_in)["original"]
    torch.testing.assert_close(_answers(model), expected, rtol=1e-4, atol=1e-5)
    assert blade.stats(drop_in)["original"] == before


def test_lora() -> None:
    check("peft LoRA")


def test_lora_that_generates() -> None:
    check("peft LoRA, generate", turns=2)


def test_a_part_is_what_generate_calls() -> None:
    model = _adapted(_bert())
    fast = blade.accelerate(model, config=QUICK, parts=["base_model.model"])
    _optimized(fast, fast.base_model.model, _answers(model))


def test_a_model_that_generates_inside_is_found() -> None:
    import peft
    import transformers

    torch.manual_seed(0)
    form = {"n_embd": 96, "n_layer": 4, "n_head": 2, "vocab_size": 300, "n_positions": 64}
    config = transformers.GPT2Config(**form, bos_token_id=1, eos_token_id=None)
    base = transformers.GPT2LMHeadModel(config).eval()
    how = peft.LoraConfig(target_modules=["c_attn"], r=4, init_lora_weights=False)
    model = peft.get_peft_model(base, how).eval()
    fast = blade.accelerate(model, config=QUICK)
    ids = torch.randint(2, 290, (1, 6))
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pad_token_id": 0}
    for _ in range(4):
        expected = model.generate(**given, max_new_tokens=8, do_sample=False)
        assert torch.equal(fast.generate(**given, max_new_tokens=8, do_sample=False), expected)
        assert blade.wait(fast, 300)
    counters = blade.stats(fast)
    assert counters["base_model.model: call 1"]["calls"] > 7
    assert counters["original"]["calls"] == 0


def test_adapters_of_a_drop_in_are_turned_off_and_merged() -> None:
    plain, adapted = _answers(_bert()), _answers(_adapted(_bert()))
    assert not torch.allclose(plain[0], adapted[0], atol=1e-3)
    fast = blade.accelerate(_adapted(_bert()), config=QUICK)
    _optimized(fast, fast, adapted)
    with fast.disable_adapter():
        _optimized(fast, fast, plain)
    torch.testing.assert_close(_answers(fast), adapted, rtol=1e-4, atol=1e-5)
    fast.merge_adapter()
    torch.testing.assert_close(_answers(fast), adapted, rtol=1e-4, atol=1e-5)
    fast.unmerge_adapter()
    torch.testing.assert_close(_answers(fast.unload()), plain, rtol=1e-4, atol=1e-5)


def test_adapters_on_top_of_a_drop_in_are_trained() -> None:
    fast = blade.accelerate(_bert(), config=QUICK)
    _optimized(fast, fast, _answers(_bert()))
    models = [_adapted(fast), _adapted(_bert())]
    _optimized(models[0], fast, _answers(models[1]))
    before = copy.deepcopy(_answers(models[1]))
    for model in models:
        model.train()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        trained = [p for p in model.parameters() if p.requires_grad]
        model(input_ids=IDS[0]).last_hidden_state[..., 0].sum().backward()
        torch.optim.SGD(trained, lr=0.1).step()
        model.eval()
    after = _answers(models[1])
    assert not torch.allclose(before[0], after[0], atol=1e-3)
    _optimized(models[0], fast, after)

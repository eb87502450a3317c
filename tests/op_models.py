# SPDX-License-Identifier: Apache-2.0
"""Op samples as models of their own: through an entrance of blade and compared with eager, on any device.

run = through(sample, "optimize", sizes, "cuda")      # the run, whose engines answered
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from entrances import ENTRANCES, Compiled, Optimized
from op_compare import different, eager, exact
from op_samples import Sample, inputs
from torch.utils._pytree import tree_leaves

# What cannot be captured, and why: torch's tracer fails an assertion of its own on plain numbers as first
# operand; the number of results follows a size; it keeps the size of the sample where a list of sizes is
# given as one number.
REFUSED = {
    "Scalar overloads of bits": "neither traced nor scripted",
    "bit operators": "neither traced nor scripted",
    "full": "neither traced nor scripted",
    "chunk": "differs from the model at other sizes",
    "unbind": "differs from the model at other sizes",
    "roll by one size": "differs from the model at other sizes",
    "upsample by sizes alone": "differs from the model at other sizes",
}


# What torch.compile answers wrong or refuses whatever the backend ("aot_eager" too): indices are those of other
# sizes; the shape function of grouped products knows bfloat16 only, while the CPU computes float32 as well.
BROKEN = ("upsample by sizes alone", "grouped product")


class OneOp(torch.nn.Module):
    """The sample of copies of its inputs: a view of the caller's tensor would stay with the original."""

    def __init__(self, sample: Sample) -> None:
        super().__init__()
        self.sample = sample

    def forward(self, *tensors: torch.Tensor) -> Any:
        if tensors and tensors[0].device.type != "cpu":
            with tensors[0].device:  # samples that make tensors make them where their inputs are
                return self.sample.function(*[t.clone() for t in tensors])
        return self.sample.function(*[t.clone() for t in tensors])


def through(
    sample: Sample, entrance: str, sizes: Sequence[Mapping[str, int]], device: str = "cpu"
) -> Optimized | Compiled:
    """Compiled for the first of ``sizes`` and compared with eager at all of them; the exact answer is the CPU's."""
    model = OneOp(sample).eval()
    run = ENTRANCES[entrance](model, placed(inputs(sample, sizes[0]), device))
    served = run.served()
    assert served or run.reasons(), "nothing serves it, and nothing says why"
    for size in sizes:
        tensors = inputs(sample, size)
        if device != "cpu" and eager(sample, tensors) is None:
            continue  # an index out of range would end the CUDA context
        there = placed(tensors, device)
        with torch.device(device):
            want = eager(sample, there)
        if want is None:
            continue  # what eager raises, tests of whole calls compare
        got = [t for t in tree_leaves(run(*there)) if isinstance(t, torch.Tensor)]
        assert [g.device for g in got] == [w.device for w in want], size
        ideal = exact(sample, tensors)
        text = different(placed(got, "cpu"), placed(want, "cpu"), ideal)
        assert not text, f"{size}: {text}"
    assert bool(run.engine_runs()) == bool(served)
    return run


def placed(tensors: Sequence[torch.Tensor], device: str) -> list[torch.Tensor]:
    return [t.to(device) for t in tensors]

# SPDX-License-Identifier: Apache-2.0
"""Cases: the inputs that an engine is verified at.

    for case in verification_cases(cluster.samples, cluster.probes): ...

The samples of the user come first, then the probes of capture, then inputs derived from the first sample:
other sizes (1, odd) cut out of it, other contents, another layout in memory. A derived case may be invalid
for the model: run the original on it first.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf, isfinite
from time import perf_counter

import torch

from blade.graph.shapes.memory_format import in_order, stride_order
from blade.verification.generators import Generators

Inputs = tuple[torch.Tensor, ...]
# Factors of the first sample's floats: exponentials overflow, squares vanish, and only the signs of zeros
# remain.
_SCALES = {"large contents": 100.0, "small contents": 1e-20, "zeros": 0.0}
# Sizes of one dimension in all samples and probes; dimensions with equal ones vary together.
Signature = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """``kind``: "sample", "probe", "size", "contents" or "layout"."""

    kind: str
    name: str
    inputs: Inputs


def verification_cases(
    samples: Sequence[Inputs],
    probes: Sequence[Inputs],
    derived: bool = True,
    seconds: float = inf,
    selects: bool = False,
) -> Iterator[Case]:
    """Yield every case, the most telling first; deterministic. ``derived=False``: samples and probes only.

    ``seconds``: derived cases stop when one as slow as the last would no longer fit. ``selects``: sizes depend
    on elements, so there are contents of which a comparison or a mask selects none, one and all.
    """
    last = 0.0
    for kind, several in (("sample", samples), ("probe", probes)):
        for i, one in enumerate(several):
            start = perf_counter()
            yield Case(kind, f"{kind} {i}", one)
            last = perf_counter() - start
    if not samples or not derived:
        return
    orders = [stride_order(t) for t in samples[0]]
    end = perf_counter() + seconds
    further = _derived(samples, probes, selects)
    while (start := perf_counter()) + last <= end and (planned := next(further, None)) is not None:
        case = planned.make()
        if case.kind != "layout":  # keep the sample's layout: the original's results follow it
            laid_out = [in_order(t, o) for t, o in zip(case.inputs, orders, strict=True)]
            case = replace(case, inputs=tuple(laid_out))
        yield case
        last = perf_counter() - start


def derived_shapes(
    samples: Sequence[Inputs], probes: Sequence[Inputs], selects: bool = False
) -> Iterator[tuple[str, str, list[torch.Size]]]:
    """Yield kind, name and shapes of each derived case, whose contents are not made."""
    for planned in _derived(samples, probes, selects) if samples else ():
        yield planned.kind, planned.name, _shapes(planned.like)


@dataclass(frozen=True)
class _Planned:
    """A case with the shapes of ``like``, whose inputs ``fill`` makes from these one by one, in this order."""

    kind: str
    name: str
    like: Inputs
    fill: Callable[[torch.Tensor], torch.Tensor]

    def make(self) -> Case:
        return Case(self.kind, self.name, tuple(map(self.fill, self.like)))


def _derived(
    samples: Sequence[Inputs], probes: Sequence[Inputs], selects: bool
) -> Iterator[_Planned]:
    generators = Generators(0)
    for name, inputs in _other_sizes(samples, probes):
        yield _Planned("size", name, inputs, lambda t: t)
    first = samples[0]
    contents: dict[str, Callable[[torch.Tensor], torch.Tensor]] = dict(
        _SELECTIONS if selects else {}
    )
    contents["random contents"] = partial(random_contents, generators=generators)
    contents["shuffled contents"] = partial(_shuffled, generators=generators)
    if any(t.is_floating_point() for t in first):
        contents |= {name: partial(_scaled, scale=scale) for name, scale in _SCALES.items()}
        contents["non-finite contents"] = _not_finite
    for name, fill in contents.items():
        yield _Planned("contents", name, first, fill)
    if any(t.dim() > 1 for t in first):
        yield _Planned("layout", "transposed layout", first, _transposed)


def _other_sizes(
    samples: Sequence[Inputs], probes: Sequence[Inputs]
) -> Iterator[tuple[str, Inputs]]:
    """Yield size 1 in every dynamic dimension, in each one alone, and an odd size in all of them; shapes of a sample
    or probe not again."""
    every = [*samples, *probes]
    moving = _moving(every)
    whole = max(range(len(every)), key=lambda n: sum(t.numel() for t in every[n]))
    largest = every[whole]
    if not moving:
        return
    wanted = {"size 1": dict.fromkeys(moving, 1)}
    if len(moving) > 1:
        wanted |= {f"size 1 in dimension {n}": {s: 1} for n, s in enumerate(moving)}
    wanted["odd sizes"] = {s: max(1, (s[whole] - 1) // 2 * 2 - 1) for s in moving}
    seen = [_shapes(one) for one in every]
    for name, sizes in wanted.items():
        inputs = _cut(largest, sizes, every)
        if (shapes := _shapes(inputs)) not in seen:
            seen.append(shapes)
            yield name, inputs


def _shapes(inputs: Inputs) -> list[torch.Size]:
    return [tensor.shape for tensor in inputs]


def _moving(every: Sequence[Inputs]) -> list[Signature]:
    found: dict[Signature, None] = {}
    for i, tensor in enumerate(every[0]):
        for axis in range(tensor.dim()):
            signature = _signature(every, i, axis)
            if len(set(signature)) > 1:
                found.setdefault(signature)
    return list(found)


def _signature(every: Sequence[Inputs], i: int, axis: int) -> Signature:
    return tuple(inputs[i].shape[axis] for inputs in every)


def _cut(inputs: Inputs, sizes: dict[Signature, int], every: Sequence[Inputs]) -> Inputs:
    out = []
    for i, tensor in enumerate(inputs):
        for axis in range(tensor.dim()):
            size = sizes.get(_signature(every, i, axis), tensor.shape[axis])
            tensor = tensor.narrow(axis, 0, min(size, tensor.shape[axis]))
        out.append(tensor.contiguous())
    return tuple(out)


def random_contents(tensor: torch.Tensor, generators: Generators) -> torch.Tensor:
    """Draw contents within the range of the sample, so that indices and probabilities stay legal."""
    if not tensor.numel() or tensor.is_complex():
        return tensor
    if tensor.dtype == torch.bool:
        return _integers(tensor, 0, 2, generators)
    low, high = (end.item() for end in torch.aminmax(tensor))
    if not (isfinite(low) and isfinite(high)):
        finite = tensor[torch.isfinite(tensor)]
        if not finite.numel():
            return tensor
        low, high = (end.item() for end in torch.aminmax(finite))
    if tensor.is_floating_point():
        return uniform_like(tensor, generators).mul_(high - low).add_(low).to(tensor.dtype)
    # A tensor of ones is most often a mask: zeros reveal an engine that has folded it away.
    low = 0 if (low, high) == (1, 1) else low
    end = min(int(high), (1 << 63) - 2) + 1  # the largest int64 is never drawn
    return _integers(tensor, min(int(low), end - 1), end, generators)


def uniform_like(tensor: torch.Tensor, generators: Generators) -> torch.Tensor:
    """Draw a float64 from 0 to 1 for each element of ``tensor``."""
    generator = generators.on(tensor.device)
    return torch.rand(tensor.shape, generator=generator, dtype=torch.float64, device=tensor.device)


def _integers(tensor: torch.Tensor, low: int, end: int, generators: Generators) -> torch.Tensor:
    generator = generators.on(tensor.device)
    drawn = torch.randint(low, end, tensor.shape, generator=generator, device=tensor.device)
    return drawn.to(tensor.dtype)


def _shuffled(tensor: torch.Tensor, generators: Generators) -> torch.Tensor:
    generator = generators.on(tensor.device)
    order = torch.randperm(tensor.numel(), generator=generator, device=tensor.device)
    return tensor.flatten()[order].reshape(tensor.shape)


def _scaled(tensor: torch.Tensor, scale: float) -> torch.Tensor:
    return tensor * scale if tensor.is_floating_point() else tensor


def _few(tensor: torch.Tensor) -> torch.Tensor:
    """Lowest numbers, or ``False``: what a mask or a comparison with a number seldom selects."""
    if tensor.dtype == torch.bool:
        return torch.zeros_like(tensor)
    if not tensor.numel() or tensor.is_complex():
        return tensor
    return -tensor.abs() if tensor.is_floating_point() else torch.full_like(tensor, _least(tensor))


def _least(tensor: torch.Tensor) -> int:
    """0, or the least number where there are negative ones."""
    return min(0, int(tensor.min()))


def _one_of_few(tensor: torch.Tensor) -> torch.Tensor:
    """The same but for one element in the middle."""
    few = _few(tensor).clone(memory_format=torch.contiguous_format)
    if few.numel():
        at = few.numel() // 2
        few.view(-1)[at] = _many(tensor).flatten()[at]
    return few


def _many(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype == torch.bool:
        return torch.ones_like(tensor)
    if not tensor.numel() or tensor.is_complex():
        return tensor
    return (
        tensor.abs() if tensor.is_floating_point() else torch.full_like(tensor, int(tensor.max()))
    )


_SELECTIONS = {"few selected": _few, "one selected": _one_of_few, "many selected": _many}


def _not_finite(tensor: torch.Tensor) -> torch.Tensor:
    """Put an infinity of either sign and a NaN far apart, so that most rows have at most one of them."""
    if not tensor.is_floating_point() or not tensor.numel():
        return tensor
    flat = tensor.flatten().clone()
    for i, value in enumerate((torch.inf, -torch.inf, torch.nan)):
        flat[i * (flat.numel() - 1) // 2] = value
    return flat.reshape(tensor.shape)


def _transposed(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, stored with the last two axes swapped."""
    return tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor

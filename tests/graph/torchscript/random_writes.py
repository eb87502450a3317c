# SPDX-License-Identifier: Apache-2.0
"""Random programs that view and write tensors, in branches and loops, as source that Python and TorchScript run.

def forward(self, x: Tensor, n: int) -> Tuple[Tensor, Tensor]:
    v0 = x * 2
    v1 = v0.select(0, 1)
    for i in range(n):
        v1.add_(1.0)
    return v0, v1
"""

import math
import random

Shape = tuple[int, ...]

_HEADS = ("if float(x.sum()) > 0:", "if n > 1:", "for i in range(n):")


class WritingProgram:
    """The program with number ``seed``; some have lists, views that may be copies, and rebound names."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.lines: list[str] = []
        self.shapes: dict[str, Shape] = {"x": (4, 6)}
        self.lists: dict[str, Shape] = {}
        self.count = 0
        self.uncertain = self.random.random() < 0.3
        self._fresh(1)
        if self.random.random() < 0.8:
            del self.shapes["x"]
        self._body(1, 8, 2)

    def source(self) -> str:
        names = sorted(self.shapes)[:5]
        names = names * 2 if len(names) == 1 else names
        kinds = ", ".join(["Tensor"] * len(names))
        head = f"def forward(self, x: Tensor, n: int) -> Tuple[{kinds}]:"
        return "\n".join([head, *self.lines, f"    return {', '.join(names)}", ""])

    def _body(self, depth: int, statements: int, nesting: int) -> None:
        steps = [self._fresh, self._rename, self._pieces, self._item]
        steps += [self._view] * 2 + [self._write] * 3 + [self._list] * self.uncertain
        for _ in range(statements):
            if nesting and self.random.random() < 0.2:
                self._nested(depth, nesting)
            else:
                self.random.choice(steps)(depth)

    def _nested(self, depth: int, nesting: int) -> None:
        head = self.random.choice(_HEADS)
        self._emit(depth, head)
        self._scope(depth + 1, 3, nesting - 1)
        if head.startswith("if") and self.random.random() < 0.5:
            self._emit(depth, "else:")
            self._scope(depth + 1, 2, nesting - 1)

    def _scope(self, depth: int, statements: int, nesting: int) -> None:
        """Statements whose new names end with them."""
        shapes, lists = dict(self.shapes), dict(self.lists)
        self._body(depth, statements, nesting)
        self._write(depth)
        self.shapes, self.lists = shapes, lists

    def _emit(self, depth: int, text: str) -> None:
        self.lines.append("    " * depth + text)

    def _any(self, shape: Shape | None = None) -> str:
        names = [k for k, s in self.shapes.items() if shape in (None, s)]
        return self.random.choice(names) if names else ""

    def _name(self, letter: str = "v") -> str:
        self.count += 1
        return f"{letter}{self.count}"

    def _assign(self, depth: int, shape: Shape, text: str) -> None:
        """A new name, or an old one of the same shape."""
        old = [k for k, s in self.shapes.items() if s == shape and k != "x"]
        rebinds = old and self.random.random() < (0.3 if self.uncertain else 0.05)
        name = self.random.choice(old) if rebinds else self._name()
        self._emit(depth, f"{name} = {text}")
        self.shapes[name] = shape

    def _fresh(self, depth: int) -> None:
        source = self._any()
        forms = ("{} * 2", "torch.zeros_like({})", "{}.clone()", "torch.relu({} - 0.5)")
        self._assign(depth, self.shapes[source], self.random.choice(forms).format(source))

    def _rename(self, depth: int) -> None:
        source = self._any()
        self._assign(depth, self.shapes[source], source)

    def _view(self, depth: int) -> None:
        source = self._any()
        shape = self.shapes[source]
        ways = [((1, *shape), ".unsqueeze(0)"), (shape, ".detach()")]
        if self.uncertain:
            flat = (math.prod(shape),)
            ways += [(flat, ".reshape(-1)"), (flat, ".flatten()"), (shape, ".contiguous()")]
        ways += self._parts(shape) if shape else []
        made, text = self.random.choice(ways)
        self._assign(depth, made, source + text)

    def _parts(self, shape: Shape) -> list[tuple[Shape, str]]:
        rank = len(shape)
        d, e = self.random.randrange(rank), self.random.randrange(rank)
        low = self.random.randrange(shape[d])
        high = self.random.randrange(low, shape[d]) + 1
        order = self.random.sample(range(rank), rank)
        swapped = list(shape)
        swapped[d], swapped[e] = shape[e], shape[d]

        def sized(size: int) -> Shape:
            return (*shape[:d], size, *shape[d + 1 :])

        ways = [
            ((*shape[:d], *shape[d + 1 :]), f".select({d}, {low})"),
            ((*shape[:d], *shape[d + 1 :]), f".select({d}, -1)"),
            (sized(high - low), f".narrow({d}, {low}, {high - low})"),
            (sized(high - low), f"[{':, ' * d}{low}:{high}]"),
            (sized((shape[d] + 1) // 2), f"[{':, ' * d}::2]"),
            (tuple(swapped), f".transpose({d}, {e})"),
            (tuple(shape[k] for k in order), f".permute({order})"),
            ((2, *shape), f".expand(2, {', '.join(['-1'] * rank)})"),
        ]
        if rank == 2:
            ways += [(shape[::-1], ".t()"), ((min(shape),), ".diagonal()")]
        return ways + ([(shape[1:], ".squeeze(0)")] if shape[0] == 1 else [])

    def _pieces(self, depth: int) -> None:
        source = self._any()
        shape = self.shapes[source]
        if not shape or shape[0] % 2:
            return
        a, b = self._name(), self._name()
        how = "unbind(0)" if shape[0] == 2 else "chunk(2)"
        self._emit(depth, f"{a}, {b} = {source}.{how}")
        self.shapes[a] = shape[1:] if shape[0] == 2 else (shape[0] // 2, *shape[1:])
        self.shapes[b] = self.shapes[a]

    def _list(self, depth: int) -> None:
        """Make a list, append to it, or read it."""
        if not self.lists or self.random.random() < 0.4:
            source, name = self._any(), self._name("l")
            self._emit(depth, f"{name} = [{source}]")
            self.lists[name] = self.shapes[source]
            return
        name = self.random.choice(sorted(self.lists))
        shape = self.lists[name]
        if (source := self._any(shape)) and self.random.random() < 0.5:
            self._emit(depth, f"{name}.append({source})")
        else:
            read = self.random.choice((f"{name}[0]", f"torch.stack({name}).sum(0)"))
            self._assign(depth, shape, read)

    def _item(self, depth: int) -> None:
        target = self._any()
        if self.shapes[target]:
            forms = ("[0] = 1.5", f"[0] = {self._any()}.sum()", "[torch.tensor([0])] = 0.25")
            self._emit(depth, target + self.random.choice(forms))

    def _write(self, depth: int) -> None:
        target = self._any()
        shape, other = self.shapes[target], self._any(self.shapes[target])
        forms = [".neg_()", ".add_(1.0)", ".fill_(0.5)", ".zero_()", ".mul_(0.5)", ".clamp_(-1, 1)"]
        forms += [f".copy_({other} * 1.5)", f" += {other} * 0.5", f".gt_({other} * 1.0)"]
        forms += [f".masked_fill_({other} > 0, 2.0)"]
        if len(shape) == 2 and shape[0] > 1:
            rows = f"torch.zeros([1, {shape[1]}], dtype=torch.int64)"
            forms += [f".scatter_add_(0, {rows}, {other} * 1.0)"]
            forms += [f".index_add_(0, torch.tensor([1, 0]), {other}[:2] * 1.0)"]
        form = self.random.choice(forms)
        named = form.startswith(".") and self.random.random() < 0.3
        self._emit(depth, f"{target} = {target}{form}" if named else target + form)

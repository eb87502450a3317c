# SPDX-License-Identifier: Apache-2.0
"""The arguments of a program's `call` in the format of FORMAT.md: `t:4 i:1 li:r3,-1 n`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import sympy
import torch

from blade.backends.disc.frontend.ops.table import OperandSlot
from blade.core.reason import Code
from blade.errors import Refused
from blade.program.dtypes import DTYPES

if TYPE_CHECKING:
    from blade.backends.disc.program.writer import ProgramWriter


class CallArguments:
    """Writes the arguments of one `call`, whose tensor operands are the slots ``tensors``."""

    def __init__(self, writer: "ProgramWriter", tensors: Sequence[int]) -> None:
        self.writer = writer
        self.tensors = tensors

    def word(self, arg: Any, kind: Any) -> str:
        """One argument of schema type ``kind``."""
        text = str(kind).removeprefix("Optional[").removesuffix("]")
        if arg is None:
            return "n"
        if isinstance(arg, OperandSlot):
            return f"t:{self.tensors[arg]}"
        if isinstance(arg, tuple):
            return self.words(arg, text)
        return self.scalar(arg, text)

    def scalar(self, arg: Any, kind: str) -> str:
        if isinstance(arg, bool):
            return f"b:{int(arg)}"
        if isinstance(arg, sympy.Expr):
            return f"r:{self.writer.registers.of(arg)}"
        if isinstance(arg, int):
            return f"f:{float(arg)!r}" if kind == "float" else f"i:{arg}"
        if isinstance(arg, float):
            return f"f:{arg!r}"
        if isinstance(arg, str) and arg and " " not in arg:
            return f"s:{arg}"
        if isinstance(arg, torch.device):
            return f"d:{arg}"
        if isinstance(arg, torch.dtype):
            return f"dt:{DTYPES[arg]}"
        raise Refused(Code.CONVERSION_FAILED, f"The argument {arg!r} has no form in a program.")

    def words(self, args: tuple[Any, ...], kind: str) -> str:
        if any(isinstance(a, OperandSlot) or a is None for a in args):
            optional = "Optional" in kind
            words = ["n" if a is None else str(self.tensors[a]) for a in args]
            return ("lo:" if optional else "lt:") + ",".join(words)
        if "Tensor" in kind:
            return "lt:"
        if any(isinstance(a, bool) for a in args):
            return "lb:" + ",".join(str(int(a)) for a in args)
        if any(isinstance(a, float) for a in args) or "float" in kind:
            return "lf:" + ",".join(repr(float(a)) for a in args)
        numbers = [
            f"r{self.writer.registers.of(a)}" if isinstance(a, sympy.Expr) else str(a) for a in args
        ]
        return "li:" + ",".join(numbers)

# SPDX-License-Identifier: Apache-2.0
"""``torch.compile(model, backend="disc").forward.aot_compile(inputs)``: results that are saved and loaded.

torch asks a backend for a ``SerializableCallable`` (``torch/_dynamo/aot_compile.py``). AOTAutograd can save its
own part, which wraps the graphs, if each compiled graph is an ``OutputCode`` of Inductor's: ``SavableCode`` is
one around a graph of ours. Seen in torch 2.13; nothing else uses these names.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch._dynamo.aot_compile_types import (
    BundledAOTAutogradSerializableCallable,
    SerializableCallable,
)
from torch._inductor.output_code import OutputCode

from blade.core.torch_modes import out_of_compilation
from blade.dynamo.saved_graph import LoadedGraph
from blade.errors import InputError


class SavableGraph(Protocol):
    """A compiled graph: ``CompiledGraph``, ``BoundParameters`` or ``LoadedGraph``."""

    def __call__(self, *args: Any) -> Any: ...
    def save(self) -> bytes: ...


@dataclasses.dataclass
class SavableCode(OutputCode):
    """A graph, or before ``post_compile`` what was saved of one. It is pickled as it is then."""

    graph: SavableGraph | None = None
    data: bytes | None = None

    def __post_init__(self) -> None:
        self._boxed_call = True

    def __call__(self, inputs: Sequence[Any]) -> Any:
        assert self.graph is not None
        return self.graph(*inputs)

    def prepare_for_serialization(self) -> None:
        """Nothing: what the first call selects is saved, too."""

    def post_compile(self, *args: Any, **kwargs: Any) -> None:
        """Load the graph."""
        if self.graph is None:
            assert self.data is not None
            # torch.load makes fake tensors where a fake mode is being traced
            with out_of_compilation():
                self.graph = LoadedGraph(self.data)

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        """Nothing: engines hold their own kernels."""

    def __copy__(self) -> "SavableCode":
        """Of the same graph, so that AOTAutograd's copy is pickled when the user saves."""
        return SavableCode(self.graph, self.data)

    def __getstate__(self) -> dict[str, Any]:
        if self.graph is None:
            return dict(self.__dict__)
        # AOTAutograd pickles its first entry under its fake mode
        with out_of_compilation():
            data = self.graph.save()
        return {**self.__dict__, "graph": None, "data": data}


class CompiledFunction(SerializableCallable):
    """What ``aot_compile`` gets from our backends."""

    def __init__(self, compiled: Callable[..., Any]) -> None:
        if getattr(compiled, "serialize", None) is None:
            raise InputError("AOTAutograd cannot save this model; torch logged the reason.")
        self._compiled = BundledAOTAutogradSerializableCallable(compiled)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._compiled(*args, **kwargs)

    @classmethod
    def serialize_compile_artifacts(cls, fn: "CompiledFunction") -> bytes:
        """The bytes of ``fn``: AOTAutograd's wrappers and our graphs."""
        return BundledAOTAutogradSerializableCallable.serialize_compile_artifacts(fn._compiled)

    @classmethod
    def deserialize_compile_artifacts(cls, data: bytes) -> "CompiledFunction":
        """Restore the function. Raises ``InputError`` if a graph is damaged."""
        return cls(BundledAOTAutogradSerializableCallable.deserialize_compile_artifacts(data))

# SPDX-License-Identifier: Apache-2.0
"""The ops that TensorRT supports: its parser checks all ops of a graph at once, and each form only once.

    survey(nodes, config)              # one export, one run of the parser; the verdicts are cached
    why_not(nodes[7], config)          # None, or a Reason with the parser's own words

A form is an op with the types and ranks of its tensors and its constant arguments, but without sizes.
Verdicts are kept in this process and in the cache, so an op of one model costs nothing in the next. An op
that the parser takes alone may still fail within a cluster; building the cluster shows it.
"""

import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import cache as memoized
from typing import Any

import torch

from blade.backends.shared.onnx.model import exporter_version, to_onnx
from blade.backends.tensorrt.dtypes import COMPUTES, NAMES
from blade.backends.tensorrt.kernel_cache import device_name
from blade.backends.tensorrt.library import TensorRTLibrary, find_library
from blade.backends.tensorrt.op_probe_graph import (
    CANNOT,
    OpProbe,
    op_probe_of,
    probe_graph,
)
from blade.backends.tensorrt.parser_verdicts import TAKEN, parsed
from blade.config import Config
from blade.core.cluster import OpNode, ValueInfo, values_in
from blade.core.disk_cache import code_version, digest, open_cache
from blade.core.reason import Code, Reason, Stage
from blade.errors import Refused
from blade.graph.fx.random_ops import draws_nothing

NAME, KIND = "tensorrt", "tensorrt-op"
BATCH = 256  # ops in one export
EXPORTS = 24  # most exports per batch; each op that fails to export takes at least one more
_QUANTIZED = ("quantized_decomposed::", "aten::fake_quantize", "aten::quantize", "aten::dequantize")

_verdicts: dict[str, str] = {}  # key of a form -> TAKEN, or why not
_lock = threading.Lock()


def why_not(node: OpNode, config: Config) -> Reason | None:
    """``None`` if TensorRT takes ``node`` on a CUDA device."""
    for value in _values(node):
        if value.kind == "tensor" and value.device is not None and value.device.type != "cuda":
            return _reason(
                Code.UNSUPPORTED_DEVICE, node, f"TensorRT does not run on {value.device}"
            )
    return why_not_built(node, config)


def why_not_built(node: OpNode, config: Config) -> Reason | None:
    """``why_not`` without regard to the device: ``None`` if ``node`` can be built."""
    if (reason := _why_not_form(node)) is not None:
        return reason
    if _key(node) not in _verdicts:
        survey([node], config)
    verdict = _verdicts[_key(node)]
    return None if verdict == TAKEN else _reason(Code.UNSUPPORTED_OP, node, verdict)


def survey(nodes: Sequence[OpNode], config: Config) -> None:
    """Find the verdicts on ``nodes``, from the cache, else in as few exports as possible."""
    library, cache = find_library(), open_cache(config.cache)
    forms = {_key(node): node for node in nodes if _why_not_form(node) is None}
    with _lock:
        unknown = {key: node for key, node in forms.items() if key not in _verdicts}
        if cache is not None:
            for key in list(unknown):
                if (stored := cache.get(KIND, key)) is not None:
                    _verdicts[key] = stored.decode()
                    del unknown[key]
        for key, verdict in _ask(library, unknown, config):
            _verdicts[key] = verdict
            if cache is not None:
                cache.put(KIND, key, verdict.encode())


def _ask(
    library: TensorRTLibrary, nodes: Mapping[str, OpNode], config: Config
) -> Iterator[tuple[str, str]]:
    islands: dict[str, OpProbe] = {}
    for key, node in nodes.items():
        island = op_probe_of(node)
        if island is None:
            yield key, TAKEN  # cannot be decided in advance
        else:
            islands[key] = island
    keys = list(islands)
    for start in range(0, len(keys), BATCH):
        batch = keys[start : start + BATCH]
        yield from zip(batch, _BatchVerdicts(library, [islands[k] for k in batch], config).verdicts)


class _BatchVerdicts:
    """The verdicts on a batch of probes, in as few exports as their failures allow."""

    def __init__(
        self, library: TensorRTLibrary, islands: Sequence[OpProbe], config: Config
    ) -> None:
        self.library, self.islands = library, islands
        self.config = config.evolve(cache=False)  # the same batch never recurs
        self.left = EXPORTS
        self.verdicts = [
            f"the ONNX exporter fails at too many ops beside it (after {EXPORTS} tries)"
        ]
        self.verdicts *= len(islands)
        self._settle(range(len(islands)))

    def _settle(self, chosen: Sequence[int]) -> None:
        """Export and parse; a probe that fails to export is found by the message, or by halving."""
        if not chosen or not self.left:
            return
        self.left -= 1
        islands = [self.islands[k] for k in chosen]
        try:
            model = to_onnx(probe_graph(islands), self.config, indices="trusted")
        except (Refused, torch.onnx.errors.OnnxExporterError, *CANNOT) as error:
            wrong = {chosen[n] for n in _named(error, islands)} or set(chosen[: len(chosen) == 1])
            for k in wrong:
                self.verdicts[k] = f"it has no form in ONNX ({_last_line(error)})"
            if wrong:
                self._settle([k for k in chosen if k not in wrong])
            else:
                half = len(chosen) // 2
                self._settle(chosen[:half])
                self._settle(chosen[half:])
        else:
            for k, verdict in zip(chosen, parsed(self.library, model, islands), strict=True):
                self.verdicts[k] = verdict


def _named(error: BaseException, islands: Sequence[OpProbe]) -> set[int]:
    """The probes that the exporter's error names, by their tensors or by their op."""
    text = "\n".join(_chain(error))
    translated = re.search(r"translating node %\S+ : (.*)", text)
    node = translated[1] if translated else ""
    inputs = [k for k, one in enumerate(islands) for v in one.leaves if not v.constant]
    held = [k for k, one in enumerate(islands) for v in one.leaves if v.constant]
    found = {inputs[int(n)] for n in re.findall(r"%x(\d+)", node)}
    found |= {held[int(n)] for n in re.findall(r"%b_const_(\d+)", node)}
    missing = re.search(
        r"No ONNX function found for <OpOverload\(op='(\S+)', overload='(\S+)'\)>", text
    )
    if missing:
        name = f"{missing[1]}.{missing[2]}"
        found |= {k for k, one in enumerate(islands) if str(one.target) == name}
    return found


def _chain(error: BaseException | None) -> Iterator[str]:
    while error is not None:
        yield str(error)
        error = error.__cause__


def _why_not_form(node: OpNode) -> Reason | None:
    """Why ``node`` is not supported, as far as this is known without the parser."""
    schema, tags = node.target._schema, node.target.tags
    quantizes = schema.name.startswith(_QUANTIZED)
    for value in _values(node):
        if value.kind != "tensor":
            continue
        if value.dtype is None or value.rank is None or value.device is None:
            return _reason(Code.UNKNOWN_TYPE, node, "a tensor of it has no known dtype or rank")
        if value.dtype not in (NAMES if quantizes else COMPUTES):
            return _reason(
                Code.UNSUPPORTED_DTYPE, node, f"TensorRT does not compute in {value.dtype}"
            )
    if schema.is_mutable:
        return _reason(Code.MUTATES, node, "it writes to one of its inputs")
    if torch.Tag.nondeterministic_seeded in tags and not draws_nothing(node):
        return _reason(Code.RANDOM, node, "it draws random numbers")
    if torch.Tag.data_dependent_output in tags or _has_unknown_sizes(node):
        return _reason(Code.DATA_DEPENDENT, node, "its result's shape depends on values")
    if not node.outputs or any(o.kind != "tensor" for o in node.outputs):
        return _reason(Code.UNSUPPORTED_OP, node, "it returns something other than tensors")
    return None


def _has_unknown_sizes(node: OpNode) -> bool:
    """Whether sizes depend on values. ``index`` is tagged so for masks; with positions they are known."""
    if torch.Tag.dynamic_output_shape not in node.target.tags:
        return False
    if node.target is not torch.ops.aten.index.Tensor:
        return True
    masks = (torch.bool, torch.uint8)
    return any(v.dtype in masks for v in values_in(node.args[1:]))


def _key(node: OpNode) -> str:
    """The cache key of the form of ``node`` and of everything else that a verdict depends on."""
    return digest([*_environment(), f"{node.target}", _text((node.args, dict(node.kwargs)))])


def _text(value: Any) -> str:
    """An argument as text, without sizes that are known only at run time."""
    if isinstance(value, ValueInfo):
        return f"{value.kind} {value.dtype} {value.rank} {'constant' if value.constant else ''}"
    if isinstance(value, dict):
        return ", ".join(f"{name}={_text(one)}" for name, one in value.items())
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_text, value))}]"
    return repr(value)


@memoized
def _environment() -> tuple[str, ...]:
    return code_version(), find_library().stamp, exporter_version(), device_name()


def _last_line(error: BaseException) -> str:
    """The last line of the innermost error: the exporter's outer errors are advice."""
    text = [part.strip() for part in _chain(error) if part.strip()]
    return text[-1].split("\n")[0][:200] if text else type(error).__name__


def _values(node: OpNode) -> Iterator[ValueInfo]:
    yield from values_in((*node.args, *node.kwargs.values()))
    yield from node.outputs


def _reason(code: Code, node: OpNode, why: str) -> Reason:
    return Reason(Stage.SUPPORT, code, NAME, node.name, f"{node.target} stays TorchScript: {why}.")

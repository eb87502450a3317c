# SPDX-License-Identifier: Apache-2.0
"""Keys of cache entries: a text of everything that a result depends on, hashed.

    key = make_key("cluster_0", lambda: [text_of(graph), *contents.of(weights)], config)
    parts = describe_module(captured, program, contents, values=False)

Every key covers blade's code, the versions of torch and Python, the machine, and torch's global settings, so
that entries of another version of the code are never found.
"""

import hashlib
import platform
import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import torch
from torch.utils import _pytree as pytree

from blade.capture.attributes import attributes_of
from blade.config import Config
from blade.core.attempt import attempt
from blade.core.captured import Captured
from blade.core.disk_cache import code_version, digest
from blade.core.hardware import cpu_name, gpu_name
from blade.core.reason import Reason, Stage
from blade.graph.torchscript.program import Program

# Engines do not depend on these: passes and paths show in the graph; weights and budgets decide between engines.
_SETTINGS_WITHOUT_EFFECT = (
    "background",
    "background_paths",
    "cache",
    "cache_limit_gb",
    "customize_jit_passes",
    "dump_dir",
    "max_paths",
    "sample_weights",
    "search",
    "strict",
    "time_budget",
)
# Differ between captures of one model: the scope of a node, and the number TorchScript appends to a class.
_PASSING = re.compile(r', scope: [^"\n]*$|\.___torch_mangle_\d+', re.MULTILINE)


def make_key(
    subject: str, describe: Callable[[], Iterable[str] | None], config: Config | None = None
) -> str | None:
    """Return the key of a result that depends on the environment, ``describe()`` and, if given, ``config``.

    Return ``None``, which is never found or stored, if ``describe`` returns ``None`` or raises.
    """
    parts = attempt(Stage.SELECT, None, subject, describe)
    if parts is None or isinstance(parts, Reason):
        return None
    return digest([*environment(), *([] if config is None else settings_of(config)), *parts])


def environment() -> list[str]:
    """Dependencies of every result: code, versions, machine, torch's global settings."""
    return [
        code_version(),
        f"{torch.__version__} {platform.python_version()} {platform.machine()} {cpu_name()}",
        f"{torch.get_num_threads()} threads, default {torch.get_default_dtype()}",
        f"{torch.get_float32_matmul_precision()} {torch.backends.mkldnn.enabled}",
        f"{torch.are_deterministic_algorithms_enabled()} {torch.is_autocast_enabled('cpu')}",
        f"{gpu_name()} {torch.backends.cudnn.allow_tf32} {torch.is_autocast_enabled('cuda')}",
    ]


def settings_of(config: Config) -> list[str]:
    """The fields of ``config`` that engines depend on."""
    return [
        f"{k}={getattr(config, k)!r}"
        for k in Config.model_fields
        if k not in _SETTINGS_WITHOUT_EFFECT
    ]


def text_of(graph: torch.Graph) -> str:
    """The graph as text, without what differs from one capture of a model to the next."""
    same = torch._C._jit_pass_canonicalize(cast(Any, graph))  # numbers the values
    return _PASSING.sub("", str(cast(Any, same).str(False)))


def shapes_of(inputs: Sequence[torch.Tensor]) -> str:
    """Dtype, device, sizes and strides of each input; for plain numbers also their values."""
    return " ".join(
        f"{t.dtype} {t.device} {tuple(t.shape)} {t.stride()}"
        + (f" {t.item()}" if t.dim() == 0 else "")
        for t in inputs
    )


def forms_of(samples: Sequence[Any]) -> list[str]:
    """The structure of ``samples``, the forms of their tensors, and their other values."""
    leaves = pytree.tree_leaves(list(samples))
    return [
        str(pytree.tree_structure(list(samples))),
        *(shapes_of((x,)) for x in leaves if isinstance(x, torch.Tensor)),
        *(repr(x) for x in leaves if not isinstance(x, torch.Tensor)),
    ]


def describe_module(
    captured: Captured, program: Program, contents: "WeightDigests", *, values: bool
) -> list[str] | None:
    """Describe graph, weights, and the forms of samples and probes; with ``values`` also their contents.

    Return ``None`` for a graph that may hold tensors which are not visible here.
    """
    text = text_of(captured.module.graph)
    if "prim::fork" in text or "prim::Closure" in text:
        return None
    held = [program.tensor_constant(v) for line in program.lines for v in line.outputs[:1]]
    attributes = [(a.name, a.get()) for a in attributes_of(captured.module)]
    runs = [*captured.samples, *captured.probes]
    return [
        text,
        *contents.of(("", t) for t in held if t is not None),
        *contents.of((n, t) for n, t in attributes if isinstance(t, torch.Tensor)),
        *(f"{n} {v!r}" for n, v in attributes if not isinstance(v, torch.Tensor)),
        f"{len(captured.samples)} samples",
        *forms_of(runs),
        *(contents.of_tensors_in(runs) if values else ()),
    ]


class WeightDigests:
    """Digests of tensors during one ``optimize``; each tensor is read once."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], tuple[torch.Tensor, str]] = {}

    def of(self, named: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
        """Name, form and content of each tensor."""
        every = list(named)
        fresh = {identity(t): t for _, t in every if identity(t) not in self._known}
        # hashing releases Python's lock
        with ThreadPoolExecutor(max(1, torch.get_num_threads())) as pool:
            found = pool.map(_content, fresh.values())
            for (key, tensor), content in zip(fresh.items(), found, strict=True):
                self._known[key] = tensor, content  # kept alive: its address stays its own
        return [f"{name} {shapes_of((t,))} {self._known[identity(t)][1]}" for name, t in every]

    def of_tensors_in(self, samples: Any) -> list[str]:
        """Form and content of every tensor of nested ``samples``."""
        leaves = pytree.tree_leaves(samples)
        return self.of(("", leaf) for leaf in leaves if isinstance(leaf, torch.Tensor))


def identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    """A key that is equal for tensors of the same form over the same memory."""
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def bytes_of(tensor: torch.Tensor) -> Any:
    """The elements in row-major order; a view of the memory if they lie in that order."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    return memoryview(cast(Any, flat.view(torch.uint8).numpy())) if flat.numel() else b""


def _content(tensor: torch.Tensor) -> str:
    return hashlib.sha256(bytes_of(tensor)).hexdigest()

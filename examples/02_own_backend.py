# SPDX-License-Identifier: Apache-2.0
"""A backend of your own in forty lines: oneDNN computes a linear layer and what follows it in one call.

    python examples/02_own_backend.py

blade asks a backend three things (``blade.core.backend.Backend``): can you work here, do you take this op,
turn this cluster into an engine. The rest is done for it: it converts in a process apart, its engines are
verified against the original at many sizes, timed, and saved with the model, and whatever call their
guards do not cover goes to the original.

A package declares its backend and its runner as entry points. Nothing has to be registered then, and saved
files load wherever the package is installed:

    [project.entry-points."blade.backends"]
    onednn = "my_package.my_module:OneDnn"

    [project.entry-points."blade.runners"]
    onednn = "my_package.my_module:load"
"""

import importlib
import json
import tempfile
import warnings
from pathlib import Path

import torch

import blade
from blade.backends import registry
from blade.core.backend import Backend
from blade.core.cluster import Cluster, OpNode
from blade.core.reason import Code, Reason, Stage
from blade.program.guard_program import guard_program
from blade.runtime.engine import Runner, make_engine, register_runner

aten = torch.ops.aten
# Not relu: oneDNN's makes 0 of NaN, and blade's verification refused every engine that had one.
FUSED = {aten.sigmoid.default: "sigmoid", aten.tanh.default: "tanh"}


class OneDnn(Backend):
    """The backend. Its engines are kept on disk under ``version``; the base class explains all attributes."""

    name = "onednn"
    version = f"1 {torch.__version__}"

    def why_unavailable(self) -> str | None:
        """``None``, or a sentence that says what to do about it."""
        return None if torch.backends.mkldnn.is_available() else "This torch is without oneDNN."

    def why_not(self, node: OpNode, config: blade.Config) -> Reason | None:
        """``None`` for what ``convert`` will take: linear layers, and what it can fuse with them."""
        known = node.target is aten.linear.default or node.target in FUSED
        if known and node.outputs[0].dtype is torch.float32:
            return None
        detail = f"oneDNN has no linear layer in {node.target} of {node.outputs[0].dtype}."
        return Reason(Stage.SUPPORT, Code.UNSUPPORTED_OP, self.name, node.name, detail)

    def convert(self, cluster: Cluster, config: blade.Config) -> torch.ScriptObject:
        """Payload: any bytes. Constants: the very weights of the model, which a file stores once."""
        nodes = list(cluster.gm.graph.nodes)
        weights = [n for n in nodes if n.op == "get_attr"]
        given = [*(n for n in nodes if n.op == "placeholder"), *weights]
        place = {node: i for i, node in enumerate(given)}  # of each value in the list `run` fills
        calls: list[list[int | str | None]] = []
        for node in nodes:
            if node.op != "call_function" or node in place:
                continue
            users = list(node.users)
            alone = node.target in FUSED or len(users) != 1 or users[0].target not in FUSED
            last = node if alone else users[0]
            place[node] = place[last] = len(given) + len(calls)
            calls.append([FUSED.get(last.target, "none"), *(n and place[n] for n in node.args)])
        (returned,) = nodes[-1].args
        payload = json.dumps([calls, [place[n] for n in returned]]).encode()
        constants = [getattr(cluster.gm, n.target) for n in weights]
        return make_engine(cluster.name, self.name, guard_program(cluster), payload, constants)


def load(name: str, payload: torch.Tensor, constants: list[torch.Tensor], program: str) -> Runner:
    """The function behind an engine, once a process; it may be called from many threads at once."""
    calls, returned = json.loads(payload.numpy().tobytes())

    def run(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        values = [*inputs, *constants]
        for function, x, *layer in calls:
            weight, bias = (None if i is None else values[i] for i in (*layer, None, None)[:2])
            if weight is None:
                values.append(getattr(torch, function)(values[x]))
            else:
                linear = torch.ops.mkldnn._linear_pointwise
                values.append(linear(values[x], weight, bias, function, [], ""))
        return [values[i] for i in returned]

    return run


register_runner(OneDnn.name, load)  # on import: this script is no package with an entry point


def main() -> None:
    # TorchScript, the format of the saved file, is deprecated in new versions of torch, but works.
    warnings.filterwarnings("ignore", ".*torch.jit", DeprecationWarning)
    # Not this class here: the process that converts imports the module, and cannot import __main__.
    backend = importlib.import_module(Path(__file__).stem).OneDnn()
    registry.register(backend)

    layers = [torch.nn.Linear(256, 256) if i % 2 == 0 else torch.nn.Tanh() for i in range(9)]
    model, sample = torch.nn.Sequential(*layers).eval(), torch.randn(32, 256)
    # timing=False: take it, faster or not; by default it would have to prove that it is.
    config = blade.Config(optimization_pipeline=backend.name, timing=False)
    optimized = blade.optimize(model, sample, config)
    print(blade.report(optimized))

    with tempfile.TemporaryDirectory() as folder:
        torch.jit.save(optimized, Path(folder) / "model.pt")
        loaded = torch.jit.load(Path(folder) / "model.pt")
    for rows in (1, 7, 100):
        x = torch.randn(rows, 256)
        print(f"{rows} rows: largest difference {(loaded(x) - model(x)).abs().max().item():.1e}")
    print("calls of its engines:", blade.stats(loaded))


if __name__ == "__main__":
    main()

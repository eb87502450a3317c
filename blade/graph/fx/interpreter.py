# SPDX-License-Identifier: Apache-2.0
"""torch.fx's interpreter without its progress bar.

Even a hidden bar starts a thread of tqdm's and creates a lock that fixes the start method of the process:
``multiprocessing.set_start_method("spawn")`` raises from then on. A library must not cause either.
"""

from typing import Any

from torch import fx


class Interpreter(fx.Interpreter):
    """``run`` as in torch, for subclasses that define what happens to a node."""

    def run(
        self,
        *args: Any,
        initial_env: dict[fx.Node, Any] | None = None,
        enable_io_processing: bool = True,
    ) -> Any:
        """The result of the graph for ``args``; raises the errors of its nodes."""
        self.env = {} if initial_env is None else initial_env
        self.args_iter = iter(self.graph.process_inputs(*args) if enable_io_processing else args)
        for node in self.graph.nodes:
            if node in self.env:
                continue
            self.env[node] = self.run_node(node)
            if self.garbage_collect_values:
                for unused in self.user_to_last_uses.get(node, ()):
                    del self.env[unused]
            if node.op == "output":
                result = self.env[node]
                return self.graph.process_outputs(result) if enable_io_processing else result
        raise AssertionError("a graph without an output")

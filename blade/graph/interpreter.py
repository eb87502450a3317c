# SPDX-License-Identifier: Apache-2.0
"""torch.fx's interpreter without its bar of progress.

Even a bar that is not shown starts a thread of tqdm's, and makes a lock that settles how the whole process starts
others: ``multiprocessing.set_start_method("spawn")`` raises from then on. Neither is for a library to decide.
"""

from typing import Any

from torch import fx


class Interpreter(fx.Interpreter):
    """``run`` as torch has it, for subclasses that say what becomes of a node."""

    def run(
        self,
        *args: Any,
        initial_env: dict[fx.Node, Any] | None = None,
        enable_io_processing: bool = True,
    ) -> Any:
        """What the graph returns for ``args``; raises what its nodes raise."""
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

# SPDX-License-Identifier: Apache-2.0
"""Gives views that hide behind "unsafe" their names: the gates of LSTM and GRU cells, which later ops write in place.

    %gates : Tensor[] = aten::unsafe_chunk(%x, 4, 1)      ->      %gates : Tensor[] = aten::chunk(%x, 4, 1)

Both share the memory of their argument. The unsafe ones tell only autograd that they do not, so that no later
stage would know whose elements a write changes.
"""

from __future__ import annotations

import torch

from blade.core.jit_nodes import nodes_of

_NAMES = {
    "aten::unsafe_chunk": "aten::chunk",
    "aten::unsafe_split": "aten::split",
    "aten::unsafe_split_with_sizes": "aten::split_with_sizes",
}


def name_views(graph: torch._C.Graph) -> None:
    """Rewrite ``graph`` and its nested blocks in place."""
    for node in list(nodes_of(graph)):
        if node.kind() in _NAMES:
            made = graph.create(_NAMES[node.kind()], list(node.inputs()), 1)
            made.insertBefore(node)
            made.copyMetadata(node)
            made.output().setType(node.output().type())
            node.output().replaceAllUsesWith(made.output())
            node.destroy()

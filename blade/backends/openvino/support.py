# SPDX-License-Identifier: Apache-2.0
"""Ops with a form in ONNX that OpenVINO lacks, or computes too inexactly on the CPU.

    why_not_here(node)          # None, or the Reason

NaN and infinities are not considered: OpenVINO's ReLU, exp and softmax lose them, but few models have any.
Verification of a whole cluster finds such cases.
"""

from blade.core.cluster import OpNode
from blade.core.reason import Code, Reason, Stage

NAME = "openvino"
_TINY = "it makes 0 of tiny arguments there"
_WRITES = "it writes to no index out of range and says nothing"
_REMAINDER = "its remainder is off by more than rounding where the quotient is large"
INEXACT: dict[str, str] = {
    "erf": _TINY,
    "fmod": _REMAINDER,
    "remainder": _REMAINDER,
    "index_add": _WRITES,
    "index_put": _WRITES,
    "soft_margin_loss": "it stays finite where torch overflows",
}
"""Ops of ``aten``, without overload, and what is wrong."""
_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d", "_convolution", "convolution")


def why_not_here(node: OpNode) -> Reason | None:
    """``None`` if OpenVINO has ``node``, with values close enough to torch's."""
    name = str(node.target.overloadpacket).removeprefix("aten.")
    why = INEXACT.get(name)
    if name == "pad" and node.args[2] == "circular":
        why = "it has no circular padding"
    if name in _CONVOLUTIONS and not node.args[1].constant:
        why = "its convolutions want constant weights"
    if why is None:
        return None
    detail = f"{node.target} does not go to OpenVINO: {why}."
    return Reason(Stage.SUPPORT, Code.UNSUPPORTED_OP, NAME, node.name, detail)

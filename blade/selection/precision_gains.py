# SPDX-License-Identifier: Apache-2.0
"""What bfloat16 and int8 would gain on a CPU, estimated from the kernels of an fp32 engine.

    precision_gains(clusters, config)     # "... it would be in bf16 about 1.7x as fast (Config(enable_bf16=True)) ..."

Products, convolutions and attention become faster by the factors of ``FACTORS``, which were measured on MiniLM,
BERT-base and ResNet-50 (benchmarks/RESULTS.md, with AVX512_BF16 and VNNI); everything else stays as it is.
"""

from collections.abc import Sequence

from blade.backends import registry
from blade.backends.disc.target.cpu import host
from blade.config import Config
from blade.report import ClusterReport, KernelTime

FACTORS = {"bf16": 1.8, "int8": 2.8}
MAKERS = {"bf16": "disc", "int8": "quant"}
"""The backend that computes in a precision, if it can here."""
FP32 = ("gemm_f32", "conv_f32", "winograd_f32", "attention_f32")
"""Beginnings of the names of the kernels that become faster."""
NOTABLE = 1.15  # a gain below this is not told


def precision_gains(clusters: Sequence[ClusterReport], config: Config) -> str:
    """Return one sentence; "" if nothing would gain or was measured, or a lower precision is allowed already."""
    kernels = [one for c in clusters for one in c.kernels]
    if config.reduces_precision or not kernels:
        return ""
    share = sum(map(_ms, filter(_is_fp32, kernels))) / max(sum(map(_ms, kernels)), 1e-9)
    gains = {p: 1 / (1 - share + share / factor) for p, factor in FACTORS.items() if _can(p)}
    told = [
        f"{p} about {gain:.1f}x as fast (Config(enable_{p}=True))"
        for p, gain in gains.items()
        if gain >= NOTABLE
    ]
    if not told:
        return ""
    return (
        f"Estimated from its products and convolutions, {share:.0%} of the time, it would be in "
        f"{' and in '.join(told)}, within Config.accuracy_budget."
    )


def _ms(kernel: KernelTime) -> float:
    return kernel.ms[-1]


def _is_fp32(kernel: KernelTime) -> bool:
    return kernel.name.startswith(FP32)


def _can(precision: str) -> bool:
    """Whether a backend computes in ``precision`` here, with an instruction for it."""
    maker = MAKERS[precision]
    if registry.available(maker) is not None or precision not in registry.load(maker).precisions:
        return False
    return precision != "int8" or any("vnni" in flag or flag == "i8mm" for flag in host().isa)

# SPDX-License-Identifier: Apache-2.0
"""Reports to draw: of several backends, of thousands of ops, and one whose every name is an attack."""

import random
from collections import Counter

from blade.core.reason import Code, Reason, Stage
from blade.report import ORIGINAL, ClusterReport, Composed, Report, Timing, Tried, Verdict
from blade.report.graph import InputReport, NodeReport

HOSTILE = (
    "</script><script>document.documentElement.dataset.hacked='script'</script>",
    "<img src=x onerror=\"document.documentElement.dataset.hacked='img'\">",
    "<!--<script>",
    "{{script}}",
    "]]>&lt;b&gt;\u2028\u2029'\"\\",
    "__proto__",
)


def timing(original: float, engine: float, *sizes: int) -> Timing:
    return Timing((sizes,), original, engine, 0.02)


def mixed(ops: int = 70, clusters: int = 7, seed: int = 0) -> Report:
    """A model of ``ops`` ops in ``clusters`` clusters of various backends, TorchScript between them."""
    rng = random.Random(seed)
    backends = ["disc", "onnxruntime", "openvino", "tensorrt", "inductor", ORIGINAL, "acme+disc"]
    kinds = ["aten::linear", "aten::gelu", "aten::add", "aten::layer_norm", "aten::softmax"]
    size = max(1, ops // (clusters * 2))
    nodes = []
    for i in range(ops):
        part, inside = divmod(i // size, 2)
        cluster = f"cluster_{part}" if inside and part < clusters else None
        inputs = {i - 1} if i else set()
        inputs |= {rng.randrange(max(0, i - 9), i)} if i and rng.random() < 0.3 else set()
        kind = rng.choice(kinds)
        name = f"%{i} = {kind}"
        nodes.append(
            NodeReport(name, kind, cluster, tuple(sorted(inputs)), f"layer.{i} net.py:{i}")
        )
    rows = [(1, 16), (1, 128), (8, 256)]
    found = []
    for k in range(clusters):
        held = Counter(n.kind for n in nodes if n.cluster == f"cluster_{k}")
        tried = []
        chosen = backends[k % len(backends)]
        base = rng.uniform(0.5, 4)
        for backend in dict.fromkeys(["disc", "onnxruntime", chosen]):
            if backend == ORIGINAL:
                continue
            factor = 2.5 if backend == chosen else rng.uniform(0.7, 2.2)
            times = tuple(
                timing(base * b * n / 16, base * b * n / 16 / factor, b, n) for b, n in rows
            )
            tried.append(Tried(backend, backend == chosen, times, Verdict(9, 0, 2e-7, 1e-7, 1e-7)))
        winner = next((one for one in tried if one.chosen), None)
        lost = [
            Reason(Stage.SELECT, Code.SLOWER, one.backend, f"cluster_{k}", "it is slower.")
            for one in tried
            if not one.chosen
        ]
        found.append(
            ClusterReport(
                f"cluster_{k}",
                dict(held),
                chosen,
                winner.timings if winner else (),
                winner.verdict if winner else None,
                tuple(lost),
                tuple(tried),
                "disc up to 64 rows, then acme" if "+" in chosen else "",
            )
        )
    outside = Counter(n.kind for n in nodes if n.cluster is None)
    reasons = tuple(
        Reason(
            Stage.SUPPORT, Code.UNSUPPORTED_OP, "disc", n.name, f"disc has no rule for {n.kind}."
        )
        for n in nodes
        if n.cluster is None
    )
    inputs = tuple((InputReport("ids", "int64", row, 5.0, 99.0),) for row in rows)
    return Report(
        tuple(found),
        reasons,
        dict(outside),
        {"blade": "0.1.0", "torch": "2.13.0"},
        "Some CPU x8",
        {"capture": 1.2, "convert": 9.5, "select": 4.1, "splice": 0.2},
        nodes=tuple(nodes),
        inputs=inputs,
        compositions=(
            Composed("mixture", {"cluster_0": "disc", "cluster_1": "onnxruntime"},
                     tuple(timing(9.0 * i, 4.0 * i, *row) for i, row in enumerate(rows, 1)), True),
            Composed("disc", {"cluster_0": "disc"},
                     tuple(timing(9.0 * i, 5.0 * i, *row) for i, row in enumerate(rows, 1)), False),
        ),
    )  # fmt: skip


def hostile() -> Report:
    """Every text of it is markup that would run or break the page if it were read as such."""
    nodes = tuple(
        NodeReport(f"%{i} = {text}", text, text if i % 2 else None, (i - 1,) if i else (), text)
        for i, text in enumerate(HOSTILE * 3)
    )
    reasons = tuple(Reason(Stage.SUPPORT, Code.RANDOM, t, f"%0 = {t}", t, t) for t in HOSTILE)
    clusters = tuple(
        ClusterReport(t, {t: 3}, t, (timing(2.0, 1.0, 3),), Verdict(1, 0, 0.0), reasons)
        for t in HOSTILE
    )
    texts = {text: text for text in HOSTILE}
    inputs = ((InputReport(HOSTILE[0], HOSTILE[1], (3,)),),)
    seconds = dict.fromkeys(HOSTILE, 1.0)
    return Report(
        clusters, reasons, dict.fromkeys(HOSTILE, 1), texts, HOSTILE[0], seconds, nodes, inputs
    )

# SPDX-License-Identifier: Apache-2.0
"""support: labels and reasons per node; lists by kind and occurrence; pipelines by name or auto."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fake_backends import Fake, produces, registered

from blade.backends import registry
from blade.config import Config
from blade.core.cluster import OpNode, ValueInfo
from blade.core.reason import Code, Reason, Stage
from blade.errors import BackendError, ConfigError
from blade.graph.torchscript.listing import kind_of
from blade.partition.support import resolve, support

aten = torch.ops.aten
FLOAT = ValueInfo("tensor", torch.float32, torch.device("cpu"), 2)


def node(target: Any, name: str) -> OpNode:
    return OpNode(name, target, (FLOAT,), {}, (FLOAT,))


NODES = [
    node(aten.add.Tensor, "%a = aten::add"),
    node(aten.mul.Tensor, "%b = aten::mul"),
    node(aten.add.Tensor, "%c = aten::add"),
    node(aten.relu.default, "%d = aten::relu"),
    node(aten.add.Scalar, "%e = aten::add"),
    node(aten._assert_async.msg, "prim::Print#9"),
]
PIN = Reason(Stage.SUPPORT, Code.MUTATES, None, "prim::Print#9", "It prints.")
PINNED = {5: PIN}


def taken(config: Config, *backends: Fake) -> list[int]:
    plan = support(NODES, PINNED, backends or (Fake(),), config)
    return [i for i, label in enumerate(plan.labels) if label]


@produces(Code.UNSUPPORTED_OP, Code.MUTATES)
def test_every_no_has_its_reason_and_pinned_nodes_keep_theirs() -> None:
    first, second = Fake("one", refuses=["aten::relu"]), Fake("Two", refuses=["aten::mul"])
    plan = support(NODES, PINNED, (first, second), Config())
    both = frozenset({"one", "two"})
    assert plan.labels == (both, {"one"}, both, {"two"}, both, frozenset())
    assert [(r.subject, r.backend, r.code) for r in plan.reasons] == [
        ("%b = aten::mul", "Two", Code.UNSUPPORTED_OP),
        ("%d = aten::relu", "one", Code.UNSUPPORTED_OP),
        ("prim::Print#9", None, Code.MUTATES),
    ]


def test_kinds() -> None:
    assert [kind_of(n) for n in NODES[3:]] == ["aten::relu", "aten::add", "prim::Print"]
    assert kind_of(node(aten.add.Tensor, "add_3")) == "aten::add"


@produces(Code.BLACK_LISTED)
@pytest.mark.parametrize(
    ("entries", "stay"),
    [
        (["aten::add"], [0, 2, 4]),
        (["aten::add@0"], [0]),
        (["aten::add@2", "aten::mul"], [1, 4]),
        (["aten::add@7"], []),
        (["aten::gelu"], []),
    ],
)
def test_black_list(entries: list[str], stay: list[int]) -> None:
    config = Config(customize_op_black_list=entries)
    assert taken(config) == [i for i in range(5) if i not in stay]
    reasons = [r for r in support(NODES, PINNED, (Fake(),), config).reasons if r is not PIN]
    assert [r.subject for r in reasons] == [NODES[i].name for i in stay]
    for reason in reasons:
        assert reason.code is Code.BLACK_LISTED
        assert "Config.customize_op_black_list" in reason.detail


def test_negative_occurrences_count_from_the_end() -> None:
    from blade.partition.support import _listed

    assert _listed(NODES, ["aten::add@-1", "aten::add@-3"]) == {
        0: "aten::add@-3",
        4: "aten::add@-1",
    }


def test_white_list_overrules_the_backend_and_not_the_semantics() -> None:
    backend = Fake(refuses=["aten::add", "aten::relu"])
    assert taken(Config(), backend) == [1]
    config = Config(customize_op_white_list=["aten::add@1", "aten::relu", "prim::Print"])
    assert taken(config, backend) == [1, 2, 3]


def test_a_backend_that_raises_when_asked_refuses() -> None:
    class Broken(Fake):
        def why_not(self, node: OpNode, config: Config) -> Reason | None:
            raise KeyError(node.name)

    plan = support(NODES[:1], {}, (Broken(),), Config())
    assert plan.labels == (frozenset(),)
    assert plan.reasons[0].code is Code.UNSUPPORTED_OP
    assert "raised KeyError" in plan.reasons[0].detail
    with pytest.raises(KeyError):
        support(NODES[:1], {}, (Broken(),), Config(strict=True))


@pytest.fixture
def only_fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_BUILT_IN", {})
    monkeypatch.delenv("BLADE_BACKENDS")
    with registered(Fake("good"), Fake("gone", unavailable="gone needs a licence file.")):
        yield


@produces(Code.BACKEND_UNAVAILABLE)
def test_auto_takes_what_works_and_reports_the_rest(only_fakes: None) -> None:
    backends, reasons = resolve(Config())
    assert [b.name for b in backends] == ["good"]
    assert [(r.backend, r.code) for r in reasons] == [("gone", Code.BACKEND_UNAVAILABLE)]
    assert "gone needs a licence file." in reasons[0].detail


def test_a_named_backend_fails_loudly(only_fakes: None) -> None:
    backends, reasons = resolve(Config(optimization_pipeline="GOOD"))
    assert [b.name for b in backends] == ["good"]
    assert reasons == ()
    with pytest.raises(BackendError, match=r"'gone': gone needs a licence file\."):
        resolve(Config(optimization_pipeline="gone"))
    with pytest.raises(BackendError, match="there is no backend 'goop': did you mean 'good'"):
        resolve(Config(optimization_pipeline="goop"))


@pytest.mark.parametrize("field", ["fp16", "bf16", "int8"])
def test_a_precision_nobody_offers_is_told(only_fakes: None, field: str) -> None:
    allowed: dict[str, Any] = {f"enable_{field}": True}
    _, reasons = resolve(Config(**allowed))
    assert reasons[-1].subject == field
    assert f"Config.enable_{field} has no effect: no backend here (good)" in reasons[-1].detail
    with pytest.raises(ConfigError, match=f"enable_{field} has no effect"):
        resolve(Config(optimization_pipeline="good", **allowed))
    offers: Any = registry.load("good")
    offers.precisions = frozenset({field})
    assert resolve(Config(optimization_pipeline="good", **allowed))[1] == ()


def test_ops_that_make_sizes_are_for_backends_that_take_them() -> None:
    class Taking(Fake):
        sizes_from_elements = True

    selecting = [node(aten.nonzero.default, "%n = aten::nonzero")]
    white = Config(customize_op_white_list=["aten::nonzero"])
    for config in (Config(), white):
        plan = support(selecting, {}, (Fake("plain"), Taking("taking")), config)
        assert plan.labels == (frozenset({"taking"}),)
        [reason] = plan.reasons
        assert (reason.backend, reason.code) == ("plain", Code.DATA_DEPENDENT)


@pytest.mark.parametrize("field", ["customize_op_black_list", "customize_op_white_list"])
def test_a_list_with_an_op_that_nobody_knows(field: str) -> None:
    for known in ("aten::layer_norm", "aten::gelu@0", "prim::ListConstruct"):
        support([], {}, [], Config(**{field: [known]}))
    with pytest.raises(
        ConfigError, match=f"{field}: there is no op 'aten::gleu'. Did you mean 'aten::"
    ):
        support([], {}, [], Config(**{field: ["aten::gleu"]}))
    with pytest.raises(ConfigError, match="there is no op 'mine::nothing_like_it'"):
        support([], {}, [], Config(**{field: ["mine::nothing_like_it@2"]}))

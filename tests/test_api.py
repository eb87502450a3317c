# SPDX-License-Identifier: Apache-2.0
"""optimize, end to end on small models: what a user sees when things go well, and when they do not."""

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_backends import (
    Fake,
    Fault,
    is_slow,
    produces,
    puts_nan,
    raises,
    registered,
    wrong_dtype,
    wrong_shape,
    wrong_values,
)
from torch import nn

import blade
from blade.core.reason import Code, Reason
from blade.errors import BackendError, ConfigError, InputError
from blade.report import ORIGINAL

pytestmark = pytest.mark.needs("runtime")
X = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))


def mlp() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 8), nn.Softmax(-1))
    return nn.Sequential(*layers).eval()


def config(**fields: Any) -> blade.Config:
    """The fake backend, unmeasured."""
    return blade.Config(**{"optimization_pipeline": "fake", "timing": False, **fields})


def codes(optimized: nn.Module) -> set[Code]:
    return {reason.code for reason in blade.report(optimized).all_reasons()}


def reason_of(optimized: nn.Module, code: Code) -> Reason:
    [reason] = [r for r in blade.report(optimized).all_reasons() if r.code is code]
    return reason


def assert_answers_like(optimized: nn.Module, model: nn.Module, *shapes: tuple[int, ...]) -> None:
    rng = torch.Generator().manual_seed(1)
    for shape in shapes or ((4, 16), (1, 16), (7, 16), (2, 3, 16)):
        x = torch.randn(shape, generator=rng)
        with torch.no_grad():
            torch.testing.assert_close(optimized(x), model(x))


@pytest.fixture
def fake() -> Iterator[Callable[..., Fake]]:
    """``fake(run=..., ...)`` registers a backend named "fake" for this test."""
    with pytest.MonkeyPatch.context() as patch:
        from blade.backends import registry

        def make(**faults: Any) -> Fake:
            backend = Fake(**faults)
            patch.setitem(registry._registered, backend.name, backend)
            if not backend.in_process:
                backend.register()
            return backend

        yield make


def test_a_right_engine_serves_and_the_module_says_so(fake: Callable[..., Fake]) -> None:
    fake()
    model = mlp()
    optimized = blade.optimize(model, X, config(strict=True))
    assert isinstance(optimized, torch.jit.ScriptModule)
    [cluster] = blade.report(optimized).clusters
    assert (cluster.name, cluster.backend) == ("cluster_0", "fake")
    assert cluster.ops == {
        "aten::linear": 2,
        "aten::gelu": 1,
        "aten::layer_norm": 1,
        "aten::softmax": 1,
    }
    assert cluster.verdict is not None
    assert cluster.verdict.checked >= 6
    assert blade.stats(optimized) == {"cluster_0": {"calls": 0, "engine_runs": 0, "fallbacks": 0}}
    assert_answers_like(optimized, model, (4, 16), (1, 16), (7, 16))
    assert blade.stats(optimized)["cluster_0"]["engine_runs"] == 3
    assert "self.fallback" in optimized.cluster_0.code
    assert "try_execute" in optimized.cluster_0.code


@pytest.mark.needs("torch_mlir")
def test_disc_serves_saved_and_loaded_elsewhere(tmp_path: Path) -> None:
    model = mlp()
    optimized = blade.optimize(model, X, blade.Config(timing=False, strict=True))
    report = blade.report(optimized)
    assert [c.backend for c in report.clusters] == ["disc"]
    assert report.outside == {}
    assert list(report.seconds) == ["support", "capture", "convert", "select", "splice"]
    torch.jit.save(optimized, tmp_path / "model.pt")
    torch.save((X, model(X).detach(), report.to_json()), tmp_path / "expected.pt")
    code = f"""
import torch, blade, sys
folder = {str(tmp_path)!r}
x, y, report = torch.load(folder + "/expected.pt")
loaded = torch.jit.load(folder + "/model.pt")
torch.testing.assert_close(loaded(x), y)
assert blade.report(loaded).to_json() == report
assert blade.stats(loaded)["cluster_0"]["engine_runs"] == 1, blade.stats(loaded)
assert "torch_mlir" not in sys.modules and "blade.api" not in sys.modules
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


@produces(Code.WRONG_VALUES)
@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (wrong_values, Code.WRONG_VALUES),
        (puts_nan, Code.WRONG_VALUES),
        # the engine itself notices what differs from its declared outputs
        (wrong_shape, Code.ENGINE_RAISED),
        (wrong_dtype, Code.ENGINE_RAISED),
    ],
)
def test_a_wrong_engine_never_serves(fake: Callable[..., Fake], fault: Fault, code: Code) -> None:
    fake(run=fault)
    model = mlp()
    optimized = blade.optimize(model, X, config(min_cluster_size=5))
    assert code in codes(optimized)
    assert all(c.backend == ORIGINAL for c in blade.report(optimized).clusters)
    assert blade.stats(optimized) == {}
    assert_answers_like(optimized, model)
    with pytest.raises(BackendError, match="at sample 0"):
        blade.optimize(model, X, config(strict=True))


@produces(Code.ENGINE_RAISED)
def test_an_engine_that_raises_when_tried_never_serves(fake: Callable[..., Fake]) -> None:
    fake(run=raises)
    model = mlp()
    optimized = blade.optimize(model, X, config(min_cluster_size=5))
    assert "the device caught fire" in reason_of(optimized, Code.ENGINE_RAISED).detail
    assert_answers_like(optimized, model)


@produces(Code.CONVERSION_FAILED)
def test_a_bad_node_does_not_cost_the_rest(fake: Callable[..., Fake]) -> None:
    backend = fake(chokes_on=["aten::layer_norm"])
    model = mlp()
    optimized = blade.optimize(model, X, config(min_cluster_size=2))
    reason = reason_of(optimized, Code.CONVERSION_FAILED)
    assert reason.backend == "fake"
    assert "aten::layer_norm" in reason.subject
    assert "no idea what to do with aten::layer_norm" in reason.detail
    assert "Found by bisecting cluster_0, 5 ops" in reason.detail
    served = [c for c in blade.report(optimized).clusters if c.backend == "fake"]
    assert sum(sum(c.ops.values()) for c in served) == 4
    assert blade.report(optimized).outside == {"aten::layer_norm": 1}
    assert len(backend.converted) <= 1 + 3 + 2
    assert_answers_like(optimized, model)
    assert all(s["engine_runs"] == 3 for s in blade.stats(optimized).values())
    with pytest.raises(ValueError, match="no idea what to do"):
        blade.optimize(model, X, config(strict=True))


def test_a_node_with_wrong_values_does_not_cost_the_rest(fake: Callable[..., Fake]) -> None:
    fake(run=wrong_values, spoils=["aten::gelu"])
    model = mlp()
    optimized = blade.optimize(model, X, config(min_cluster_size=1))
    assert "aten::gelu" in reason_of(optimized, Code.WRONG_VALUES).subject
    assert blade.report(optimized).outside == {"aten::gelu": 1}
    assert_answers_like(optimized, model)


def test_a_backend_that_always_fails_costs_a_bounded_effort(fake: Callable[..., Fake]) -> None:
    backend = fake(chokes_on=["aten::relu"])
    model = nn.Sequential(*(nn.ReLU() for _ in range(64))).eval()
    optimized = blade.optimize(model, X, config())
    assert len(backend.converted) < 60
    assert_answers_like(optimized, model)


@produces(Code.SLOWER)
def test_a_slow_engine_does_not_serve(fake: Callable[..., Fake]) -> None:
    fake(run=is_slow)
    model = mlp()
    optimized = blade.optimize(model, X, config(timing=True, timing_repeats=5))
    assert reason_of(optimized, Code.SLOWER).backend == "fake"
    assert blade.stats(optimized) == {}
    assert_answers_like(optimized, model)


@produces(Code.TOO_SMALL)
def test_small_clusters_stay(fake: Callable[..., Fake]) -> None:
    fake()
    optimized = blade.optimize(nn.Sequential(nn.ReLU(), nn.Tanh()).eval(), X, config())
    assert reason_of(optimized, Code.TOO_SMALL).backend == "fake"
    optimized = blade.optimize(
        nn.Sequential(nn.ReLU(), nn.Tanh()).eval(), X, config(min_cluster_size=1)
    )
    assert Code.TOO_SMALL not in codes(optimized)
    assert list(blade.stats(optimized)) == ["cluster_0"]


def test_the_next_backend_gets_its_chance() -> None:
    first = Fake("first", chokes_on=["aten::linear"])
    second = Fake("second", run=wrong_values)
    third = Fake("third")
    with pytest.MonkeyPatch.context() as patch:
        from blade.backends import registry

        patch.setattr(registry, "_BUILT_IN", {})
        patch.delenv("BLADE_BACKENDS")
        with registered(first, second, third):
            optimized = blade.optimize(mlp(), X, blade.Config(timing=False))
    [cluster] = blade.report(optimized).clusters
    assert cluster.backend == "third"
    assert [(r.backend, r.code) for r in cluster.reasons] == [
        ("first", Code.CONVERSION_FAILED),
        ("second", Code.WRONG_VALUES),
    ]


@produces(Code.WRONG_VALUES)
def test_a_module_that_is_wrong_as_a_whole_is_not_handed_out(
    fake: Callable[..., Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    from blade.selection.plan import assemble as compose

    def wrong_splice(captured: Any, placed: Any) -> torch.jit.ScriptModule:
        return torch.jit.freeze(torch.jit.trace(nn.Linear(16, 8).eval(), X))

    fake()
    model = mlp()
    monkeypatch.setattr(compose, "splice", wrong_splice)
    with pytest.warns(blade.BladeWarning, match="The optimized module is not used") as caught:
        optimized = blade.optimize(model, X, config())
    assert {one.filename for one in caught if one.category is blade.BladeWarning} == {__file__}
    reason = reason_of(optimized, Code.WRONG_VALUES)
    assert reason.subject == "the whole module"
    assert "at sample 0 the module differs from the original" in reason.detail
    assert [c.backend for c in blade.report(optimized).clusters] == [ORIGINAL]
    assert_answers_like(optimized, model)
    with pytest.raises(BackendError, match="differs from the original"):
        blade.optimize(model, X, config(strict=True))


def test_nothing_of_the_user_is_changed(fake: Callable[..., Fake]) -> None:
    fake()
    model = mlp()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = X.clone().requires_grad_()
    torch.manual_seed(5)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            blade.optimize(model, x, config())
            assert torch.is_grad_enabled() is grad
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    assert torch.equal(x, X)
    assert x.grad is None
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.needs("runtime", "torch_mlir")
@pytest.mark.parametrize(
    "backend", ["disc", pytest.param("openvino", marks=pytest.mark.needs("openvino"))]
)
def test_the_process_is_left_as_it_was(backend: str, tmp_path: Path) -> None:
    """How it may start others, who tells whom over the network, and what threads it has are the user's."""
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(tmp_path / "script.py"), backend],
        env={**os.environ, "PYTHONPATH": str(Path(blade.__file__).parent.parent)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:3] == ["None", "[]", "False"]


SCRIPT = """
import multiprocessing, random, sys, threading
import torch, blade

model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8)).eval()
before = random.getstate(), list(sys.path), sys.excepthook
config = blade.Config(optimization_pipeline=sys.argv[1], timing=False, cache=False)
blade.optimize(model, torch.randn(2, 8), config)
assert (random.getstate(), list(sys.path), sys.excepthook) == before
print(multiprocessing.get_start_method(allow_none=True))
print([thread.name for thread in threading.enumerate() if "tqdm" in thread.name])
print("openvino_telemetry" in sys.modules)
"""


def test_inside_inference_mode(fake: Callable[..., Fake]) -> None:
    fake()
    model = mlp()
    with torch.inference_mode():
        optimized = blade.optimize(model, X.clone(), config(strict=True))
        assert torch.is_inference_mode_enabled()
    assert_answers_like(optimized, model)


def test_the_active_config_is_used_unless_one_is_given(fake: Callable[..., Fake]) -> None:
    backend = fake()
    with config():
        blade.optimize(mlp(), X)
        blade.optimize(mlp(), X, config(customize_op_black_list=["aten::softmax"]))
    assert [len(kinds) for kinds in backend.converted] == [5, 4]
    with pytest.raises(ConfigError, match=r"a blade\.Config is expected, got dict"):
        blade.optimize(mlp(), X, {"timing": False})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "inputs", "says"),
    [
        (lambda: mlp().train(), X, "training mode"),
        (mlp, [], "empty"),
        (mlp, torch.randn(4, 5), "model does not run on sample 0"),
        (lambda: 7, X, "expected a torch.nn.Module"),
        (lambda: "model", X, "there is no file model"),
    ],
)
def test_unusable_models_and_inputs(model: Callable[[], Any], inputs: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        blade.optimize(model(), inputs, blade.Config(timing=False))


def test_what_was_optimized_is_not_optimized_again_but_may_be_a_part(
    fake: Callable[..., Fake],
) -> None:
    fake()
    model = mlp()
    optimized = blade.optimize(model, X, config())
    with pytest.raises(InputError, match=r"what blade\.optimize returned; give the model"):
        blade.optimize(optimized, X, config())
    tail = torch.nn.Sequential(torch.nn.Softmax(dim=-1), torch.nn.Tanh(), torch.nn.Sigmoid())
    whole = blade.optimize(torch.nn.Sequential(optimized, tail).eval(), X, config())
    assert_answers_like(whole, torch.nn.Sequential(model, tail).eval())


def test_a_backend_that_was_named_and_is_missing() -> None:
    with pytest.raises(BackendError, match="there is no backend 'tensorflow'"):
        blade.optimize(mlp(), X, blade.Config(optimization_pipeline="tensorflow"))


def test_a_dump_dir_that_cannot_be_written_is_said_at_once(
    fake: Callable[..., Fake], tmp_path: Path
) -> None:
    backend = fake()
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match=r"dump_dir: .*file.* cannot be written"):
            blade.optimize(mlp(), X, config(dump_dir=folder))
    assert not backend.converted


def test_a_full_disk_costs_the_files_alone(
    fake: Callable[..., Fake], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, *args: Any) -> None:
        raise OSError(28, "No space left on device")

    fake()
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.warns(blade.BladeWarning, match=r"dump_dir: not every file .*No space left"):
        optimized = blade.optimize(mlp(), X, config(dump_dir=tmp_path / "dump"))
    assert blade.report(optimized).clusters[0].backend == "fake"


def test_dump_dir_holds_every_stage(fake: Callable[..., Fake], tmp_path: Path) -> None:
    fake()
    optimized = blade.optimize(mlp(), X, config(dump_dir=tmp_path / "dump"))
    found = {
        path.name: path.read_text() for path in (tmp_path / "dump").iterdir() if path.is_file()
    }
    assert "aten::gelu" in found["01_captured.txt"]
    assert "aten.gelu.default" in found["02_nodes.txt"]
    assert "cluster_0" in found["03_optimized.txt"]
    assert found["report.json"] == blade.report(optimized).to_json()
    assert found["report.txt"] == blade.report(optimized).explain()


def test_one_line_of_log_per_decision(
    fake: Callable[..., Fake], caplog: pytest.LogCaptureFixture
) -> None:
    fake(chokes_on=["aten::gelu"])
    with caplog.at_level(logging.INFO, "blade"):
        blade.optimize(mlp(), X, config())
    lines = [record.getMessage() for record in caplog.records]
    assert any("aten::gelu stays TorchScript" in line for line in lines)
    assert all("\n" not in line for line in lines)


@pytest.mark.needs("runtime", "torch_mlir")
def test_modules_run_in_torchs_legacy_executor() -> None:
    """Libraries such as SpeechBrain and timm switch to it for speed."""
    code = """
import torch, blade
torch._C._jit_set_profiling_executor(False)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8)).eval()
x = torch.randn(4, 8)
for config in (blade.Config(timing=False), blade.Config(background=True), blade.Config(min_cluster_size=1000)):
    module = blade.optimize(model, (x,), config)
    torch.testing.assert_close(module(x), model(x))
    blade.wait(module)
    torch.testing.assert_close(module(x), model(x))
    blade.report(module)
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


@pytest.mark.parametrize(("level", "shown"), [("info", True), ("", False), ("loud", False)])
def test_the_environment_sets_the_log_level(level: str, shown: bool) -> None:
    code = "import blade, logging; logging.getLogger('blade.api').info('a decision')"
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={"PATH": "", "BLADE_LOG": level, "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ("I blade.api: a decision" in ran.stderr) is shown
    assert ("BLADE_LOG='loud': expected one of debug" in ran.stderr) is (level == "loud")


@pytest.mark.needs("runtime")
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint16], ids=str)
def test_dtypes_that_most_kernels_refuse(dtype: torch.dtype, tmp_path: Path) -> None:
    class Narrows(torch.nn.Module):
        def forward(self, x: torch.Tensor, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return (x.abs() * 3).to(q.dtype), q.to(torch.float32) + x * 2

    model = Narrows().eval()
    inputs = torch.rand(4, 8), (torch.rand(4, 8) * 9).to(dtype)
    optimized = blade.optimize(model, inputs)
    torch.jit.save(optimized, tmp_path / "model.pt")
    want = model(*inputs)
    for made in (optimized, torch.jit.load(tmp_path / "model.pt")):
        got = made(*inputs)
        assert got[0].dtype is dtype and torch.equal(got[0].float(), want[0].float())
        torch.testing.assert_close(got[1], want[1])

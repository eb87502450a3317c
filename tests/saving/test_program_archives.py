# SPDX-License-Identifier: Apache-2.0
"""Archives of torch.export, opened in a process that has neither the model nor what optimized it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from open_elsewhere import (
    OPEN_ALL,
    QUICK,
    optimized_case,
    optimized_in_parts,
    with_engine,
    write_calls,
)
from saved_models import CASES, Glued, bert
from torch import nn

import blade
from blade.errors import ConfigError, InputError
from blade.saving.programs import exported, for_export


@pytest.mark.parametrize("name", CASES)
def test_a_fresh_process_answers_as_the_model(
    name: str, elsewhere: Callable[..., str], tmp_path: Path
) -> None:
    case, module = optimized_case(name)
    archive = tmp_path / f"{name}.pt2"
    blade.save(module, archive)
    write_calls(case.model, case.calls, archive)
    [stats] = json.loads(elsewhere(OPEN_ALL.format(str(tmp_path))))[name]  # and no error
    counts = [one for key, one in stats.items() if key.startswith("cluster")]
    assert sum(one["engine_runs"] for one in counts) > 0
    assert sum(one["fallbacks"] for one in counts) == 0
    if name == "paths":  # counted by process, and two modules were loaded
        assert stats["path 1"]["calls"] == 2 and stats["path 2"]["calls"] == 4
    assert all(not any(one.values()) for one in blade.stats(module).values())  # saving calls a copy


def test_the_original_answers_where_an_engine_does_not(
    elsewhere: Callable[..., str], tmp_path: Path
) -> None:
    class Scaled(nn.Module):
        """The engine wants as many factors as rows; one factor is the original's."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(24, 32), nn.GELU(), nn.Linear(32, 8))

        def forward(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.inner(x) * factor
            return found

    model = Scaled().eval()
    sample = torch.randn(4, 24), torch.randn(4, 8)
    calls = [(torch.randn(3, 24), torch.randn(3, 8)), (torch.randn(9, 24), torch.randn(1, 8))]
    changes: dict[str, Callable[[str, str], tuple[str, str]]] = {
        "cpu_mismatch": lambda _, program: ("disc", program.replace("isa", "isa warp_drive", 1)),
        "backend_unavailable": lambda _, program: ("a_library_that_is_not_here", program),
    }
    for name, change in changes.items():
        module = blade.optimize(model, sample, QUICK)
        with_engine(module, change)
        blade.save(module, tmp_path / f"{name}.pt2")
    module = blade.optimize(model, sample, QUICK)
    blade.save(module, tmp_path / "guard_shape.pt2")
    blade.save(module, tmp_path / "corrupt_payload.pt2")
    _damage(tmp_path / "corrupt_payload.pt2", module)
    for archive in tmp_path.glob("*.pt2"):
        write_calls(model, calls, archive)
    found = json.loads(elsewhere(OPEN_ALL.format(str(tmp_path))))
    for name in (*changes, "corrupt_payload"):
        [stats] = found[name]
        counts = stats["cluster_0"]
        assert (counts["calls"], counts["engine_runs"], counts["fallbacks"]) == (2, 0, 2)
        assert counts[name] >= 1  # another number of factors is refused first
    [stats] = found["guard_shape"]
    expected = {"calls": 2, "engine_runs": 1, "fallbacks": 1, "guard_shape": 1}
    assert stats["cluster_0"] == expected


def _damage(archive: Path, module: torch.jit.ScriptModule) -> None:
    """Change a byte in the middle of the engine's code."""
    engine: Any = module.cluster_0.engine
    code = engine.__getstate__()[0][3][0].numpy().tobytes()
    data = bytearray(archive.read_bytes())
    assert data.count(code) == 1
    data[data.index(code) + len(code) // 2] ^= 255
    archive.write_bytes(bytes(data))


def test_weights_are_in_the_file_once(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(2000, 256)
            self.out = nn.Linear(256, 2000, bias=False)
            self.out.weight = self.words.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.out(self.words(ids).cumsum(1).tanh())
            return found

    model = Tied().eval()
    blade.save(blade.optimize(model, torch.randint(0, 9, (2, 5)), QUICK), tmp_path / "m.pt2")
    weights = model.words.weight.nbytes
    assert weights < (tmp_path / "m.pt2").stat().st_size < 1.2 * weights


def test_sizes_that_the_module_takes_are_dynamic(tmp_path: Path) -> None:
    model = nn.Conv2d(3, 4, 3).eval()
    blade.save(blade.optimize(model, torch.randn(1, 3, 9, 8), QUICK), tmp_path / "m.pt2")
    program = torch.export.load(tmp_path / "m.pt2")
    [given] = program.graph_signature.user_inputs
    [sizes] = [node.meta["val"].shape for node in program.graph.nodes if node.name == given]
    assert [isinstance(size, int) for size in sizes] == [False, True, False, False]
    loaded = blade.load(tmp_path / "m.pt2")
    assert loaded(torch.zeros(0, 3, 5, 7)).shape == (0, 4, 3, 5)
    with pytest.raises(AssertionError, match="3"):
        program.module()(torch.zeros(1, 4, 9, 8))
    with pytest.raises(RuntimeError, match="3 channels"):
        loaded(torch.zeros(1, 4, 9, 8))
    with pytest.raises(TypeError, match="is expected"):
        loaded([torch.zeros(1, 3, 9, 8)])


def test_a_call_by_name_and_its_errors(tmp_path: Path) -> None:
    case, module = optimized_case("paths")
    blade.save(module, tmp_path / "m.pt2")
    loaded = blade.load(tmp_path / "m.pt2")
    ids, mask = case.calls[0]
    for found in (loaded(mask=mask, ids=ids), loaded(ids, mask=mask)):
        torch.testing.assert_close(found, case.model(ids, mask))
    with pytest.raises(TypeError, match="forward takes ids, mask"):
        loaded(ids, mak=mask)
    assert blade.report(loaded).model == "Paths"
    assert blade.wait(loaded)
    blade.rearm(loaded)


@pytest.mark.needs("transformers")
def test_a_drop_in_keeps_arguments_and_output(
    elsewhere: Callable[..., str], tmp_path: Path
) -> None:
    model = bert().eval()
    sample = {"input_ids": torch.randint(0, 99, (2, 7)), "attention_mask": torch.ones(2, 7).long()}
    fast = blade.accelerate(model, [sample], QUICK)
    blade.save(fast, tmp_path / "m.pt2")
    ids, mask = torch.randint(0, 99, (3, 12)), torch.ones(3, 12).long()
    torch.save((ids, mask, model(ids, mask).last_hidden_state), tmp_path / "call.pt")
    code = f"""
import torch, blade
path = {str(tmp_path / "m.pt2")!r}
try:
    blade.load(path)
except blade.InputError as error:
    assert "have to be imported before" in str(error)
else:
    raise AssertionError
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions as Output
ids, mask, expected = torch.load({str(tmp_path / "call.pt")!r})
loaded, program = blade.load(path), torch.export.load(path).module()
for output in (
    loaded(ids, mask),
    loaded(attention_mask=mask, input_ids=ids, position_ids=None),
    program(input_ids=ids, attention_mask=mask),
):
    assert type(output) is Output and list(output) == ["last_hidden_state", "pooler_output"]
    torch.testing.assert_close(output.last_hidden_state, expected, rtol=1e-4, atol=1e-5)
try:
    loaded(ids, mask, position_ids=ids)
except TypeError as error:
    assert "answers calls with input_ids, attention_mask" in str(error)
else:
    raise AssertionError
"""
    elsewhere(code)


def test_each_cluster_is_an_op_of_its_own() -> None:
    model = Glued().eval()
    program = exported(for_export(optimized_in_parts(model), compile_glue=True))
    calls = [str(n.target) for n in program.graph.nodes if n.op == "call_function"]
    assert calls.count("blade.run_model.default") == 4  # the check of sizes, three clusters
    assert calls.count("aten.cumsum.default") == 2
    x, y = torch.randn(2, 4, 16), torch.randn(2, 4, 32)
    found = program.module()(x, own := y.clone())
    torch.testing.assert_close(found, model(x, y), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(own, y)


def test_errors_say_what_to_do(tmp_path: Path) -> None:
    model = nn.Linear(4, 4).eval()
    module = blade.optimize(model, torch.randn(2, 4), QUICK)
    with pytest.raises(InputError, match=r"drop-in of blade.accelerate is expected"):
        blade.save(model, tmp_path / "m.pt2")
    with pytest.raises(ConfigError, match="'onnx' is none of 'torchscript', 'pt2', 'aoti'"):
        blade.save(module, tmp_path / "m.pt2", format="onnx")
    with pytest.raises(InputError, match="'blade' is of drop-ins"):
        blade.save(module, tmp_path / "m.blade", format="blade")
    with pytest.raises(ConfigError, match="goes with format='aoti'"):
        blade.save(module, tmp_path / "m.pt2", compile_glue=True)
    blade.save(module, tmp_path / "m.pt2")
    with pytest.raises(InputError, match="answers without the model"):
        blade.load(tmp_path / "m.pt2", model)
    blade.save(module, tmp_path / "any.name", format="torchscript")
    assert isinstance(blade.load(tmp_path / "any.name"), torch.jit.ScriptModule)
    torch.save(model.state_dict(), tmp_path / "weights.pt2")
    torch.export.save(torch.export.export(model, (torch.zeros(2, 4),)), tmp_path / "plain.pt2")
    (tmp_path / "text.pt2").write_text("no archive")
    for name, words in (
        ("weights.pt2", "loaded by torch.load"),
        ("plain.pt2", "torch.export.load loads it"),
        ("text.pt2", "no file of blade.save"),
        ("missing.pt2", "there is no such file"),
    ):
        with pytest.raises(InputError, match=words):
            blade.load(tmp_path / name)

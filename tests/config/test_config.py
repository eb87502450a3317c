# SPDX-License-Identifier: Apache-2.0
"""Config: every field is checked and read by something; contexts nest in threads, tasks and generators."""

import ast
import asyncio
import copy
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from blade.config import Config, TuningShapes
from blade.config.accuracy import AccuracyBudget
from blade.errors import BladeError, ConfigError

PACKAGE = Path(__file__).parent.parent.parent / "blade"
TUNING = {"min": [[1, 3, 8]], "opts": [[[2, 3, 8]], [[4, 3, 8]]], "max": [[8, 3, 8]]}


def shape_pass(graph: torch.Graph) -> None:
    """A module-level pass: it can be pickled for a worker process."""


ACCEPTED: list[tuple[str, Any, Any]] = [
    ("optimization_pipeline", " DISC ", "DISC"),
    ("enable_fp16", True, True),
    ("enable_bf16", True, True),
    ("enable_int8", True, True),
    ("enable_fp8", True, True),
    ("cuda_graphs", False, False),
    ("gpu_targets", ["sm_80", "sm_90", "sm_80"], ("sm_80", "sm_90")),
    ("reuse_output_buffers", True, True),
    ("quantization_type", "weight_only", "weight_only"),
    ("accuracy_budget", 0.05, AccuracyBudget("relative", 0.05)),
    ("accuracy_budget", {"snr_db": 30}, AccuracyBudget("snr_db", 30.0)),
    ("calibration_method", "entropy", "entropy"),
    ("calibration_samples", 1, 1),
    ("symmetric_activations", False, False),
    ("weight_bits", 4, 4),
    ("preserved_attributes", ["head", "encode"], ("head", "encode")),
    ("allow_tracing", None, None),
    ("allow_tracing", True, True),
    ("allow_tracing", ["encoder.layer"], ("encoder.layer",)),
    ("dynamic_shapes", None, None),
    (
        "dynamic_shapes",
        {"ids": {0: (1, 8), -1: "auto"}, 1: {0: 4, 1: True}},
        {"ids": {0: (1, 8), -1: "auto"}, 1: {0: 4, 1: True}},
    ),
    ("dynamic_shapes", {0: {0: [0, 5]}}, {0: {0: (0, 5)}}),
    (
        "dynamic_tuning_shapes",
        TUNING,
        TuningShapes(((1, 3, 8),), (((2, 3, 8),), ((4, 3, 8),)), ((8, 3, 8),)),
    ),
    ("customize_op_white_list", ["aten::add", "aten::mul@-3"], ("aten::add", "aten::mul@-3")),
    ("customize_op_black_list", ("aten::gelu",), ("aten::gelu",)),
    ("customize_jit_passes", [shape_pass], (shape_pass,)),
    ("min_cluster_size", 1, 1),
    ("freeze_module", False, False),
    ("timing", False, False),
    ("timing_repeats", 1, 1),
    ("time_budget", 5, 5.0),
    ("time_budget", None, None),
    ("search", "all", "all"),
    ("sample_weights", None, None),
    ("sample_weights", [1, 0.5], (1.0, 0.5)),
    ("background", True, True),
    ("strict", True, True),
    ("cache", False, False),
    ("cache_limit_gb", 0.5, 0.5),
    ("memory", "low", "low"),
    ("dump_dir", "dumps", Path("dumps")),
    ("dump_dir", Path("dumps"), Path("dumps")),
    ("conversion_deadline_s", 0.5, 0.5),
    ("conversion_deadline_s", 60, 60.0),
    ("conversion_memory_mb", 512, 512),
    ("conversion_memory_mb", None, None),
    ("max_failures", 1, 1),
    ("max_paths", 1, 1),
    ("python_fallback", False, False),
    ("background_paths", True, True),
    ("recheck", 1e-4, 1e-4),
]

REFUSED: list[tuple[str, Any, str]] = [
    ("optimization_pipeline", "  ", "name of a pipeline"),
    ("optimization_pipeline", 3, "valid string"),
    ("enable_fp16", 1, "valid boolean"),
    ("enable_bf16", "yes", "valid boolean"),
    ("enable_int8", "yes", "valid boolean"),
    ("enable_fp8", 1, "valid boolean"),
    ("cuda_graphs", None, "valid boolean"),
    ("gpu_targets", "sm_80", "list of strings"),
    ("gpu_targets", ["sm_80", "sm_75"], "sm_120; 'sm_75' is none"),
    ("reuse_output_buffers", 0, "valid boolean"),
    ("quantization_type", "int8", "'auto', 'static', 'dynamic' or 'weight_only'"),
    ("accuracy_budget", 2, "a relative error lies between 0 and 1"),
    ("accuracy_budget", {"snr": 30}, '{"snr_db": 30}'),
    ("calibration_method", "mse", "'min_max', 'moving_average', 'entropy' or 'percentile'"),
    ("calibration_samples", 0, "greater than or equal to 1"),
    ("symmetric_activations", "yes", "valid boolean"),
    ("weight_bits", 2, "8 or 4"),
    ("preserved_attributes", "head", "list of strings"),
    ("preserved_attributes", ["head", 3], "3 is not one"),
    ("allow_tracing", False, "None, True or a list"),
    ("allow_tracing", "encoder", "None, True or a list"),
    ("dynamic_shapes", [[1, 2]], "mapping"),
    ("dynamic_shapes", {-1: {0: True}}, "position"),
    ("dynamic_shapes", {"": {0: True}}, "position"),
    ("dynamic_shapes", {0: True}, "mapping from axis"),
    ("dynamic_shapes", {0: {"batch": True}}, "axis is an int"),
    ("dynamic_shapes", {0: {True: 3}}, "axis is an int"),
    ("dynamic_shapes", {0: {0: False}}, "got False"),
    ("dynamic_shapes", {0: {0: -2}}, "got -2"),
    ("dynamic_shapes", {0: {0: (8, 1)}}, "min <= max"),
    ("dynamic_shapes", {0: {0: (1, 2, 3)}}, "min <= max"),
    ("dynamic_shapes", {0: {0: "any"}}, "got 'any'"),
    ("dynamic_tuning_shapes", [1], "keys"),
    ("dynamic_tuning_shapes", {"min": [[1]], "max": [[2]]}, "keys"),
    ("dynamic_tuning_shapes", {**TUNING, "opts": 3}, "list of lists"),
    ("dynamic_tuning_shapes", {**TUNING, "min": [1, 3, 8]}, "list of sizes"),
    ("dynamic_tuning_shapes", {**TUNING, "min": []}, "one shape per input"),
    ("dynamic_tuning_shapes", {**TUNING, "max": [[8, 3]]}, "same ranks"),
    ("dynamic_tuning_shapes", {**TUNING, "max": [[8, 3, 8], [1]]}, "same number"),
    ("dynamic_tuning_shapes", {**TUNING, "opts": [[[9, 3, 8]]]}, "does not lie between"),
    ("dynamic_tuning_shapes", {**TUNING, "max": [[0, 3, 8]]}, "does not lie between"),
    ("customize_op_white_list", ["add"], "'add' is neither"),
    ("customize_op_black_list", ["aten::add@x"], "is neither"),
    ("customize_op_black_list", ["aten::add@-"], "is neither"),
    ("customize_jit_passes", shape_pass, "list of functions"),
    ("customize_jit_passes", [3], "not callable"),
    ("min_cluster_size", 0, "greater than or equal to 1"),
    ("min_cluster_size", True, "valid integer"),
    ("freeze_module", None, "valid boolean"),
    ("timing", "no", "valid boolean"),
    ("timing_repeats", 0, "greater than or equal to 1"),
    ("search", "exhaustive", "'predicted' or 'all'"),
    ("time_budget", 0, "seconds > 0, or None"),
    ("time_budget", True, "seconds > 0, or None"),
    ("time_budget", float("inf"), "seconds > 0, or None"),
    ("time_budget", "5", "seconds > 0, or None"),
    ("sample_weights", 3, "list of numbers"),
    ("sample_weights", [1.0, 0], "finite number > 0; got 0"),
    ("sample_weights", [True], "finite number > 0; got True"),
    ("background", 1, "valid boolean"),
    ("strict", 0, "valid boolean"),
    ("cache", "yes", "boolean"),
    ("cache_limit_gb", 0, "greater than 0"),
    ("memory", "tiny", "'normal' or 'low'"),
    ("dump_dir", 3, "Path"),
    ("dump_dir", "", "Path"),
    ("conversion_deadline_s", 0.0, "greater than 0"),
    ("conversion_deadline_s", float("inf"), "finite number"),
    ("conversion_deadline_s", "1", "valid number"),
    ("conversion_memory_mb", 0, "greater than or equal to 1"),
    ("conversion_memory_mb", 1.5, "valid integer"),
    ("max_failures", 1.5, "valid integer"),
    ("max_paths", 0, "greater than or equal to 1"),
    ("python_fallback", "yes", "valid boolean"),
    ("background_paths", "yes", "valid boolean"),
    ("recheck", 1.5, "less than or equal to 1"),
]


@pytest.mark.parametrize(("name", "given", "kept"), ACCEPTED)
def test_accepts(name: str, given: Any, kept: Any) -> None:
    assert getattr(Config(**{name: given}), name) == kept


@pytest.mark.parametrize(("name", "given", "message"), REFUSED)
def test_refuses_naming_field_value_and_what_is_allowed(
    name: str, given: Any, message: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        Config(**{name: given})
    text = str(raised.value)
    assert text.startswith(f"Config.{name}={given!r}: ")
    assert message in text
    assert str(Config.model_fields[name].description) in text
    assert isinstance(raised.value, (BladeError, ValueError))


def test_every_field_is_accepted_and_refused_above_and_described() -> None:
    fields = set(Config.model_fields)
    assert {name for name, _, _ in ACCEPTED} == fields
    assert {name for name, _, _ in REFUSED} == fields
    assert all(field.description for field in Config.model_fields.values())


def test_every_field_is_read_outside_this_module() -> None:
    fields, read = set(Config.model_fields), set[str]()
    for path in PACKAGE.rglob("*.py"):
        if path.name != "config.py":
            nodes = ast.walk(ast.parse(path.read_text()))
            read |= {
                node.attr
                for node in nodes
                if isinstance(node, ast.Attribute)
                and node.attr in fields
                and ast.unparse(node.value).endswith("config")
            }
    assert fields - read == set()


def test_unknown_field_names_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match=r"no field 'enable_pf16'.*did you mean 'enable_fp16'"):
        Config(enable_pf16=True)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"no field 'zzz' \(given 1\): The fields are: accuracy_"):
        Config(zzz=1)  # type: ignore[call-arg]


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(ConfigError, match=r"(?s)min_cluster_size=0.*timing_repeats='x'"):
        Config(min_cluster_size=0, timing_repeats="x")


def test_fields_that_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match="both name 'aten::add'"):
        Config(customize_op_white_list=["aten::add"], customize_op_black_list=["aten::add"])
    with pytest.raises(ConfigError, match="give one"):
        Config(dynamic_shapes={0: {0: True}}, dynamic_tuning_shapes=TUNING)


def test_cannot_be_changed_but_evolves() -> None:
    config = Config(min_cluster_size=5, dynamic_tuning_shapes=TUNING)
    with pytest.raises(ConfigError, match=r"evolve\(timing=False\)"):
        config.timing = False
    changed = config.evolve(timing=False)
    assert (config.timing, changed.timing) == (True, False)
    assert changed.min_cluster_size == 5
    assert changed.dynamic_tuning_shapes == config.dynamic_tuning_shapes
    with pytest.raises(ConfigError, match="min_cluster_size"):
        config.evolve(min_cluster_size=0)
    with pytest.raises(ConfigError, match="did you mean 'timing'"):
        config.evolve(timings=False)


def test_does_not_alias_what_it_was_given() -> None:
    given = {0: {0: 4}}
    config = Config(dynamic_shapes=given)
    given[0][0] = 5
    assert config.dynamic_shapes == {0: {0: 4}}


def test_travels_to_other_processes() -> None:
    config = Config(dynamic_tuning_shapes=TUNING, customize_jit_passes=[shape_pass], dump_dir="d")
    assert pickle.loads(pickle.dumps(config)) == config
    assert copy.deepcopy(config) == config


def test_current_is_the_innermost_active_config() -> None:
    outer, inner = Config(timing=False), Config(strict=True)
    assert Config.current() == Config()
    with outer as entered:
        assert entered is outer
        with inner:
            with outer:
                assert Config.current() is outer
            assert Config.current() is inner
        assert Config.current() is outer
    assert Config.current() == Config()


def test_leaves_on_error() -> None:
    with pytest.raises(KeyError), Config(timing=False):
        raise KeyError
    assert Config.current() == Config()


def test_one_instance_entered_by_many_threads() -> None:
    shared = Config(timing=False)
    barrier = threading.Barrier(8)
    seen: list[bool] = []

    def work(own: Config) -> None:
        seen.append(Config.current() == Config())  # nothing leaks from the thread that started us
        with shared:
            barrier.wait(10)
            with own:
                barrier.wait(10)
                seen.append(Config.current() is own)
            barrier.wait(10)
            seen.append(Config.current() is shared)
        seen.append(Config.current() == Config())

    with Config(strict=True):
        threads = [
            threading.Thread(target=work, args=(Config(max_failures=i),)) for i in range(1, 9)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert seen == [True] * 32


def test_one_instance_entered_by_interleaved_tasks() -> None:
    shared = Config(timing=False)

    async def work(own: Config, steps: int) -> list[bool]:
        seen = []
        with shared:
            for _ in range(steps):
                await asyncio.sleep(0)
                with own:
                    await asyncio.sleep(0)
                    seen.append(Config.current() is own)
                seen.append(Config.current() is shared)
        return seen

    async def all_tasks() -> list[list[bool]]:
        with Config(strict=True) as outer:
            tasks = [work(Config(max_failures=i), steps=i) for i in range(1, 6)]
            results = await asyncio.gather(*tasks)
            assert Config.current() is outer
        return results

    assert all(all(seen) for seen in asyncio.run(all_tasks()))
    assert Config.current() == Config()


def test_generators_may_leave_in_another_order() -> None:
    def hold(config: Config) -> Iterator[None]:
        with config:
            yield

    first, second = Config(timing=False), Config(strict=True)
    one, two = hold(first), hold(second)
    next(one), next(two)
    assert Config.current() is second
    assert next(one, None) is None
    assert Config.current() is second
    assert next(two, None) is None
    assert Config.current() == Config()

# SPDX-License-Identifier: Apache-2.0
"""Which tests `make check`, `make test` and `make matrix` run. `make test-all` runs every test there is.

By ``tests/durations.json``, which `make durations` writes, `make test` runs a test with parameters at a few of its
cases if a case is slow, and of a file that takes long the quick tests. It leaves out what ``RELEASE`` lists, and runs
what ``PROMISES`` lists. A pattern is a path below tests/, ``path::function``, or a folder; ``*`` stands for any text.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from op_per_rule import ONE_PER_RULE

TIERS = ("check", "matrix", "test", "all")

# One sample per family of lowering rules (a module of blade/backends/disc/frontend/ops), and one more where a family
# has two kinds of code.
FAMILIES = frozenset(
    {
        "gelu",
        "softmax_backward",
        "cat",
        "pad",
        "attention mask",
        "batch_norm training",
        "conv2d",
        "convolution_backward",
        "einsum",
        "arange",
        "lerp",
        "index_select",
        "linear",
        "mse_loss mean",
        "layer_norm",
        "softmax",
        "native_layer_norm_backward",
        "add",
        "max_pool2d",
        "sum dims",
        "slice_scatter",
        "encoder layer",
        "unfold",
    }
)


# Samples whose rules differ most, for paths on which an op takes seconds.
FEW = frozenset({"gelu", "cat", "conv2d", "layer_norm"})


@dataclass(frozen=True)
class Release:
    """Tests that wait for `make test-all`.

    ``keep``: of a test with parameters, how many of its cases (spread over their order) or which samples `make test`
    runs all the same.
    """

    pattern: str
    why: str
    keep: int | frozenset[str] = 0


_SAMPLES = "one sample per lowering rule"
_OTHER_PATH = "test_ops.py runs each rule; another path needs a few ops"
_LIBRARY = "minutes of a library's own compiler; one case per library says whether its path works"
_SIZES = "the same code at more sizes, dtypes or schemes"
_OTHER_KINDS = "the table holds more decisions than a push can wait for"
_PROCESS = "processes that import torch; other tests start such ones"
_REPEAT = "models that other tests optimize as well"

# Seconds that a case takes on a busy machine, and how many cases of such a test `make test` runs.
SLOW = ((0.6, 1), (0.15, 2))

# Seconds of one file in `make test`: its quickest tests that take no longer together, and one at least. Rows that
# name samples, ``PROMISES`` and ``CHECK`` do not count.
FILE_S = 1.0

RELEASE: tuple[Release, ...] = (
    Release("backends/disc/test_ops.py::test_answers_are_eagers", _SAMPLES, ONE_PER_RULE),
    Release("test_op_models.py::test_one_op_model*", _OTHER_PATH, FEW),
    Release("backends/disc/gpu/test_interpreted_ops.py", _OTHER_PATH, FAMILIES),
    Release(
        "backends/libraries/test_library_ops.py::test_a_sample_of_each_family_is_refused_or_right",
        _OTHER_PATH,
    ),
    Release(
        "backends/libraries/test_library_ops.py::test_every_op_sample_is_refused_or_right",
        _OTHER_PATH,
    ),
    Release("backends/test_native_ops.py", _OTHER_PATH),
    Release("backends/tensorrt/test_trt_parser.py::test_the_sample_table*", _OTHER_PATH),
    Release("backends/test_native_backends.py::test_sizes_it_has_not_seen", _LIBRARY),
    Release("backends/test_native_backends.py::test_nothing_at_all", _LIBRARY),
    Release("capture/decisions/test_decision_table.py::test_no_answer_is_wrong", _OTHER_KINDS, 5),
    Release(
        "capture/decisions/test_decision_table.py::test_no_answer_is_wrong_in_other_modes",
        _OTHER_KINDS,
    ),
    Release(
        "capture/decisions/test_decision_table.py::test_the_calls_go_to_all_sides", _OTHER_KINDS, 8
    ),
    Release(
        "timing/test_busy_neighbours.py::test_an_mlp*",
        "with a process spinning on each core, a minute",
    ),
    Release("saving/test_packages.py", "AOTInductor and g++ compile for a minute"),
    Release(
        "saving/test_program_archives.py::test_a_fresh_process*", _PROCESS, frozenset({"writes"})
    ),
    Release("saving/test_program_archives.py::test_a_drop_in*", _PROCESS),
    Release("dynamo/test_training.py::test_two_processes_average*", "two processes train"),
    Release("dynamo/test_bf16_compile.py::test_training", "forward and backward are compiled", 2),
    Release("dynamo/test_aot_compile.py::test_a_fresh_process_trains_and_draws", _PROCESS),
    Release("dynamo/test_aot_compile.py::test_the_original_answers_where_an*", _PROCESS),
    Release("dynamo/test_background_compile.py::test_a_fresh_process*", _PROCESS, 1),
    Release("dynamo/test_cache_artifacts.py::test_damaged_artifacts*", _PROCESS),
    Release("dynamo/test_competition.py::test_real_clocks*", "real clocks"),
    Release("dynamo/test_written_inputs.py::test_a_disabled_engine_leaves*", _REPEAT),
    Release("safety/test_probes_apart.py", "each case ends a process", 1),
    Release("core/test_disk_cache.py::test_processes_share_it", "two processes race"),
    Release("dynamo/test_competition.py::test_conversions_in_processes_apart*", _REPEAT),
    Release("dynamo/test_competition.py::test_engines_that_lost_are_dropped", _REPEAT),
    Release("dynamo/test_training.py::test_training_evaluation_and_no_grad*", _REPEAT),
    Release("dynamo/test_training.py::test_a_step_leaves_what_eager_leaves", _REPEAT),
    Release("backends/test_native_faults.py", _LIBRARY, 1),
    Release("backends/quant/test_search.py::test_half_the_budget*", _REPEAT),
    Release("backends/quant/test_quant_backend.py::test_half_the_budget*", _REPEAT),
    Release("backends/quant/test_quant_backend.py::test_a_metric*", _REPEAT),
    Release("safety/test_lifetimes.py::test_a_loaded_engine_is_destroyed*", _REPEAT),
    Release("selection/test_reproducer.py::test_the_script_says_when*", _REPEAT),
    Release("test_concurrency.py::test_two_hundred_threads*", "hundreds of threads", 1),
    Release("backends/quant/test_observers.py::test_entropy_takes*", _REPEAT),
    Release("backends/test_backend_faults.py", _LIBRARY, 1),
    Release("backends/libraries/test_library_models.py", _LIBRARY, 1),
    Release("backends/test_known_ops.py", _LIBRARY),
    Release("backends/tensorrt/test_trt_backend.py", _LIBRARY, 2),
    Release("backends/tensorrt/test_trt_build.py::test_the_real_minilm", _LIBRARY),
    Release("backends/tensorrt/test_trt_build.py::test_models_of_other_kinds", _LIBRARY, 1),
    Release("backends/disc/test_cpu_conv_gradient.py", _SIZES, 1),
    Release("backends/disc/test_requantize.py", _SIZES, 1),
    Release("backends/disc/test_cpu_attention_gradient.py", _SIZES, 1),
    Release("backends/disc/test_cpu_int8_conv.py", _SIZES, 1),
    Release("backends/disc/test_cpu_int8_gemm.py", _SIZES, 1),
    Release("backends/disc/test_cpu_widen.py", _SIZES, 1),
    Release("backends/disc/test_cpu_matmul.py", _SIZES, 1),
    Release("backends/disc/test_cpu_attention.py", _SIZES, 1),
    Release("backends/disc/test_cpu_pointwise.py::test_values", _SIZES, 4),
    Release("backends/disc/test_cpu_gemm.py::test_every_tile", _SIZES, 1),
    Release("backends/disc/test_convolution.py::test_values", _SIZES, 1),
    Release("backends/disc/gpu/test_gpu_edges.py", _SIZES, 1),
    Release("backends/disc/gpu/test_gpu_kernels.py", _SIZES, 2),
    Release("backends/disc/gpu/test_gpu_pointwise.py", _SIZES, 2),
    Release("backends/disc/gpu/test_attention_gpu.py", _SIZES, 1),
    Release("backends/disc/gpu/test_library_compile.py", _SIZES, 1),
    Release("backends/disc/gpu/test_gpu_targets.py::test_kernels*", _SIZES),
    Release("backends/disc/gpu/test_gpu_targets.py::test_some_kernels*", _SIZES, 8),
    Release("backends/disc/gpu/test_scaled_gpu.py", _SIZES, 1),
    Release("backends/disc/gpu/test_quantized_gpu.py", _SIZES, 1),
    Release("backends/disc/test_random_programs.py", "many seeds of one property"),
    Release("backends/disc/gpu/test_gpu_compile.py::test_every_op_compiles", _OTHER_PATH),
    Release("backends/disc/gpu/test_pool_gpu.py::test_every_window", _SIZES, 1),
    Release("backends/disc/gpu/test_pool_gpu.py::test_means*", _SIZES, 2),
    Release("backends/disc/gpu/test_convolutions_gpu.py", _SIZES, 1),
    Release("backends/disc/gpu/test_interpreted_models.py", _REPEAT),
    Release("backends/libraries/test_library_models.py::test_minilm", _REPEAT),
    Release("backends/quant/test_write.py", _SIZES, 1),
    Release("backends/quant/test_shares.py", _REPEAT, 1),
    Release("backends/quant/test_existing.py", _REPEAT, 1),
    Release("backends/quant/test_search.py", _REPEAT, 1),
    Release("backends/quant/test_quant_backend.py", _REPEAT, 1),
    Release("backends/quant/test_calibrate.py", _SIZES, 1),
    Release("safety/test_library_choices.py::test_every_batch_is_served", _SIZES, 1),
    Release("backends/test_native_backends.py::test_a_weight_written*", _LIBRARY),
    Release("backends/test_native_backends.py::test_another_version*", _LIBRARY),
    Release("backends/test_native_backends.py::test_the_file_says*", _LIBRARY),
    Release("backends/test_native_backends.py::test_many_threads*", _LIBRARY),
    Release("backends/libraries/test_library_models.py::test_a_broken_converter*", _REPEAT),
    Release("backends/tensorrt/test_trt_backend.py::test_importing*", _PROCESS),
    Release("capture/test_arguments.py::test_another_value*", _SIZES, 1),
    Release("cli/test_commands.py::test_the_doctor_can_speak*", _PROCESS),
    Release("cli/test_commands.py::test_doctor_tries_the_libraries*", _LIBRARY),
    Release("cli/test_commands.py::test_bisect_finds_nothing*", _REPEAT),
    Release("docs/test_disc_page.py", "compiles the models of the page"),
    Release("dynamo/test_training_loops.py", _REPEAT),
    Release("dynamo/test_training.py::test_gradients_accumulate*", _REPEAT),
    Release("dynamo/test_fresh_processes.py::test_by_name_after*", _PROCESS),
    Release("safety/test_fork.py::test_the_parent_used_its_threads", _PROCESS, 1),
    Release("safety/test_lifetimes.py::test_thirty_loads*", "memory over many loads"),
    Release("test_api.py::test_the_process_is_left*", _PROCESS),
    Release("test_api.py::test_a_backend_that_always_fails*", _REPEAT),
    Release("test_auto.py::test_conversions_in_processes_apart*", _PROCESS),
    Release("test_auto.py::test_different_winners_at_different_sizes*", _REPEAT),
    Release(
        "test_readme.py::test_example_runs", "test_minilm.py and test_own_backend.py do the same"
    ),
    Release("safety/test_fork.py::test_products_with_packed_weights", _PROCESS),
    Release("backends/test_native_backends.py::test_a_file_has_every_weight*", _LIBRARY),
    Release("backends/disc/test_loops_and_late_sizes.py", _SIZES),
    Release("graph/torchscript/test_random_writes.py", "many seeds of one property"),
    Release("verification/test_rounding_noise.py::test_models_that_end*", _REPEAT),
    Release("backends/test_own_backend.py", "installs a package"),
    Release("selection/test_reproducer.py::test_the_script_shows*", _PROCESS),
    Release("fallback/test_isolated_convert.py::test_too_much_memory_there", _PROCESS),
    Release("selection/cache/test_engines.py::test_another_process*", _PROCESS),
    Release("capture/test_diagnose_export.py::test_decisions_on_values*", _SIZES, 1),
    Release("dropin/test_generation.py::test_generate_gives*", _REPEAT, 1),
    Release("dropin/test_generation.py::test_pipelines_give*", _REPEAT, 1),
    Release("dropin/test_drop_in.py::test_a_model_that_changed*", _SIZES, 4),
    Release("dropin/test_pipelines.py::test_feature_extraction", _REPEAT),
    Release("dropin/test_pipelines.py::test_object_detection", _REPEAT),
    Release("dropin/test_pipelines.py::test_speech_recognition*", _REPEAT),
    Release("dropin/test_pipelines.py::test_a_whole*", _REPEAT, 1),
    Release("dropin/test_sentence_transformers.py::test_a_part*", _REPEAT),
    Release("dropin/test_diffusers.py::test_*stable_diffusion", _REPEAT),
    Release("dropin/test_peft.py::test_lora_that_generates", _REPEAT),
    Release("dynamo/test_trials_leave_no_trace.py::test_generate*", _REPEAT, 1),
    Release("dynamo/test_trials_leave_no_trace.py::test_buffers*", _SIZES, 2),
    Release("test_minilm.py::test_one_cluster_one_engine", _REPEAT),
    Release(
        "cpp/test_formats.py::test_a_package*", "compiles a package; tests/saving does the same"
    ),
    Release("cpp/test_library_engines.py::test_what_cannot*", _REPEAT, 3),
    Release("importers/onnx/test_onnx_node_suite.py::test_all*", "1,700 tests of onnx's own"),
    Release("importers/onnx/test_onnx_import.py::test_ops_of_onnxruntime", _SIZES, 4),
    Release("test_installed_wheel.py", "builds the runtime once more"),
    Release("test_minilm.py::test_200_shapes*", _SIZES),
    Release("test_bench_gpu.py", "the benchmark, not the package"),
    Release("test_model_suite.py::test_every_model*", "the benchmark, not the package"),
    Release("test_model_suite.py::test_two_runs*", _PROCESS),
    Release("test_model_suite.py::test_a_cell_that_takes*", _PROCESS),
)

# What the documents promise, however long it takes: the public functions, the fields of ``Config``, each backend, each
# tier of fallback, forks, and files in other processes.
PROMISES: tuple[str, ...] = (
    # The kernels that are most of the time of models.
    "backends/disc/test_convolution.py::test_values",
    "backends/disc/test_cpu_attention.py::test_against_float64",
    "backends/disc/test_cpu_attention_gradient.py::test_against*",
    "backends/disc/test_cpu_conv.py::test_values",
    "backends/disc/test_cpu_conv_gradient.py::test_against_float64",
    "backends/disc/test_cpu_gemm.py::test_every_tile",
    "backends/disc/test_cpu_int8_gemm.py::test_every_instruction*",
    "backends/disc/gpu/test_pool_gpu.py::test_*window",
    "test_api.py",
    "test_background.py::test_the_original_serves*",
    "test_auto.py::test_a_conversion_that_outlasts*",
    "test_auto.py::test_a_metric_judges*",
    "test_auto.py::test_a_named_backend*",
    "test_auto.py::test_an_exact_backend_may*",
    "test_auto.py::test_lossy_backends*",
    "test_auto.py::test_never_slower*",
    "test_auto.py::test_the_environment_restricts*",
    "test_auto.py::test_the_fastest_of_all*",
    "test_auto.py::test_weights_say*",
    "test_auto.py::test_what_does_not_fit*",
    "test_semantics.py",
    "test_semantics_types.py",
    "test_minilm.py::test_the_file_answers*",
    "test_readme.py::test_block_runs",
    "test_readme.py::test_readme_shows*",
    "backends/disc/gpu/test_gpu_targets.py::test_some_kernels*",
    "backends/disc/gpu/test_gpu_variants.py::test_the_backend_compiles*",
    "backends/libraries/test_library_models.py::test_one_engine_serves*",
    "backends/libraries/test_openvino_integers.py",
    "backends/quant/test_quant_backend.py::test_a_model_is_quantized*",
    "backends/quant/test_quant_backend.py::test_a_saved_file*",
    "backends/quant/test_write.py::test_readers_of_one*",
    "backends/tensorrt/test_trt_backend.py::test_a_saved_engine*",
    "capture/decisions/test_decision_table.py::test_no_answer_is_wrong",
    "capture/test_arguments.py::test_each_value*",
    "capture/test_capture_control_flow.py::test_a_decision_on_a_*",
    "capture/test_capture_control_flow.py::test_preserved_attributes",
    "capture/test_capture_control_flow.py::test_values_decide",
    "capture/test_capture_control_flow.py::test_what_no_path_answers*",
    "capture/test_capture_graph.py::test_saved_and_loaded",
    "capture/test_capture_graph.py::test_the_ends_of_declared*",
    "capture/test_capture_graph.py::test_the_users_model_is_not_changed",
    "capture/test_capture_graph.py::test_unfrozen*",
    "capture/test_capture_graph.py::test_user_passes*",
    "cli/test_commands.py",
    "dropin/test_cached_generation.py::test_generate_with_every_cache",
    "dropin/test_diffusers.py::test_dit",
    "dropin/test_peft.py::test_lora",
    "dropin/test_pipelines.py::test_image_classification",
    "dropin/test_sentence_transformers.py::test_encode",
    "dropin/test_service.py",
    "dynamo/test_bf16_compile.py::test_training",
    "dynamo/test_disc_backend.py",
    "dynamo/test_fresh_processes.py::test_by_name_without*",
    "dynamo/test_optimizers.py::test_fifty_steps*",
    "dynamo/test_training.py",
    "fallback/test_isolated_convert.py::test_a_crashing_node*",
    "fallback/test_isolated_convert.py::test_a_hang_there",
    "fallback/test_run_time.py",
    "report/test_pickling.py::test_inside_an_object*",
    "runtime/test_workers.py::test_many_callers*",
    "safety/test_fork.py::test_the_parent_used*",
    "selection/cache/test_decisions.py::test_what_was_chosen*",
    "selection/test_learn_paths.py::test_a_missing_path*",
    "selection/test_learn_paths.py::test_no_more_than*",
    "test_private_uses.py",
)

# Pure logic, the style of the sources, a run through each tier of fallback, and a small model through DISC.
CHECK: tuple[str, ...] = (
    "test_style.py",
    "test_tiers.py",
    "clustering",
    "config",
    "core/test_attempt.py",
    "partition",
    "program",
    "report/test_report.py",
    "fallback/test_reason_codes.py",
    "fallback/test_bisect.py",
    "verification/test_compare.py",
    "verification/test_cases.py",
    "selection/plan/test_select.py",
    "graph/shapes/test_shape_guards.py",
    "graph/torchscript/test_view.py",
    "backends/test_registry.py",
    "backends/disc/test_simplify.py",
    "backends/disc/test_facts.py",
    "backends/disc/test_fuse.py",
    "backends/disc/test_interpret.py",
    "backends/disc/test_views.py",
    # An op, a subgraph, a call: what fails falls back.
    "test_api.py::test_a_bad_node_does_not_cost_the_rest",
    "test_api.py::test_a_wrong_engine_never_serves",
    "test_api.py::test_an_engine_that_raises_when_tried_never_serves",
    "fallback/test_run_time.py::test_an_engine_that_breaks_later*",
    # A small model through DISC, saved, and loaded in another process.
    "test_api.py::test_disc_serves_saved_and_loaded_elsewhere",
)

# With each Python and torch, of what `make test` runs: whatever touches torch's internals, in three minutes on 2 cores.
MATRIX: tuple[str, ...] = (
    "test_api.py::test_disc_serves_saved_and_loaded_elsewhere",
    "test_jit_warnings.py",
    "test_private_uses.py",
    "backends/disc/test_decompositions.py",
    "backends/disc/test_ops.py::test_answers*",
    "backends/libraries/test_library_models.py::test_one_engine_serves*",
    "backends/shared/test_onnx_model.py",
    "capture/test_capture_control_flow.py::test_values_decide",
    "capture/test_capture_graph.py::test_saved_and_loaded",
    "capture/test_trace_flat.py",
    "capture/exported/test_export_script.py",
    "dropin/test_recording.py",
    "dynamo/test_disc_backend.py",
    "dynamo/test_training.py::test_a_step*",
    "fallback/test_opaque_fallback.py",
    "graph",
    "report/test_pickling.py::test_inside_an_object*",
    "runtime",
    "verification/test_index_guard.py",
    "verification/test_verify.py",
)


def deselected(items: Sequence[Any], tier: str) -> set[str]:
    """The node ids that ``tier`` leaves out."""
    if tier == "all":
        return set()
    if tier == "check":
        return {item.nodeid for item in items if not _is_any(item.nodeid, CHECK)}
    if tier == "matrix":
        others = {item.nodeid for item in items if not _is_any(item.nodeid, MATRIX)}
        return others | deselected(items, "test")
    seconds = durations()
    cases: dict[str, list[Any]] = {}
    for item in items:
        cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    files: dict[str, dict[str, list[str]]] = {}
    for name, group in cases.items():
        case_s = seconds.get(name.removeprefix("tests/"), 0.0)
        keeps = [row.keep for row in RELEASE if matches(name, row.pattern)]
        kept = [set(_kept(group, keep)) for keep in keeps or [_how_many(case_s)]]
        files.setdefault(name.partition("::")[0], {})[name] = sorted(set.intersection(*kept))
    run = {nodeid for tests in files.values() for nodeid in _quickest(tests, seconds)}
    return {item.nodeid for item in items} - run


def _quickest(tests: Mapping[str, list[str]], seconds: Mapping[str, float]) -> list[str]:
    """Of a file's tests and their cases, those that `make test` runs."""
    cost = {n: len(ids) * seconds.get(n.removeprefix("tests/"), 0.0) for n, ids in tests.items()}
    always = {name for name in tests if _is_any(name, (*PROMISES, *CHECK)) or _has_samples(name)}
    run = [nodeid for name in always for nodeid in tests[name]]
    left_s = FILE_S
    for name in sorted(tests.keys() - always, key=lambda name: (cost[name], name)):
        left_s -= cost[name]
        if left_s >= 0 or not run:
            run += tests[name]
    return run


def _has_samples(name: str) -> bool:
    return any(matches(name, row.pattern) for row in RELEASE if isinstance(row.keep, frozenset))


def durations() -> Mapping[str, float]:
    """Recorded seconds of a case, by test; tests that take less than a second in all are not listed."""
    found = json.loads((Path(__file__).parent / "durations.json").read_text(encoding="utf-8"))
    return {name: seconds / max(cases, 1) for name, (cases, seconds) in found.items()}


def _how_many(seconds: float) -> int:
    """Cases of a test without a row in ``RELEASE``: all of them unless one takes long."""
    return next((count for limit, count in SLOW if seconds > limit), 10**6)


def matches(nodeid: str, pattern: str) -> bool:
    """Whether a test, or a case of it, is one of ``pattern``."""
    name = nodeid.partition("[")[0].removeprefix("tests/")
    if "::" in pattern:
        return fnmatchcase(name, pattern)
    path = name.partition("::")[0]
    return fnmatchcase(path, pattern) or path.startswith(pattern.rstrip("/") + "/")


def _is_any(nodeid: str, patterns: Iterable[str]) -> bool:
    return any(matches(nodeid, pattern) for pattern in patterns)


def _kept(group: Sequence[Any], keep: int | frozenset[str]) -> list[str]:
    if isinstance(keep, frozenset):
        return [item.nodeid for item in group if _sample(item) in keep]
    count = min(keep, len(group))
    return [group[k * len(group) // count].nodeid for k in range(count)]


@cache
def _sample(item: Any) -> str:
    found = item.callspec.params.get("sample") if hasattr(item, "callspec") else None
    return str(getattr(found, "name", found))

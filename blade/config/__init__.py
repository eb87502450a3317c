# SPDX-License-Identifier: Apache-2.0
"""All options of ``blade.optimize``, in one frozen, checked value.

    config = Config(min_cluster_size=5)
    optimized = blade.optimize(model, inputs, config)     # explicitly, or
    with Config(enable_fp16=True):                        # for every call in this block
        optimized = blade.optimize(model, inputs)

A ``Config`` is also a context manager. The active ones are kept per thread and per asyncio task
(``contextvars``), never on the instance, so one instance may be entered twice, nested, or from many
threads and tasks at once. Only ``blade/api.py`` and ``blade/dynamo`` call ``Config.current()``; below them the value is
passed as an argument.
"""

import difflib
from collections.abc import Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from typing_extensions import Self

from blade.config.accuracy import DEFAULT
from blade.config.fields import (
    Budget,
    DynamicShapes,
    Folder,
    GpuTargets,
    JitPasses,
    Names,
    OpKinds,
    Pipeline,
    Seconds,
    Tracing,
    Tuning,
    TuningShapes,
    Weights,
)
from blade.errors import ConfigError

__all__ = ["Config", "TuningShapes"]


class Config(BaseModel):
    """The options of ``optimize``; every field has a default.

    Raises ``ConfigError`` on an unknown field, a wrong type or a value out of range.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, arbitrary_types_allowed=True
    )

    optimization_pipeline: Pipeline = Field(
        default="auto",
        description='The backend to use, case-insensitive ("DISC"), or "auto": whichever measures '
        "fastest.",
    )
    enable_fp16: bool = Field(
        default=False,
        description="Allow engines that compute in half precision: products in float16, or in bfloat16 where a "
        "sample's values do not fit into that.",
    )
    enable_bf16: bool = Field(
        default=False,
        description="Allow engines that compute products in bfloat16, which has float32's range.",
    )
    enable_int8: bool = Field(
        default=False, description="Allow engines that compute in quantized int8."
    )
    enable_fp8: bool = Field(
        default=False,
        description="Allow engines that compute in float8 (e4m3), on GPUs that have it (compute capability 8.9 and "
        "later).",
    )
    quantization_type: Literal["auto", "static", "dynamic", "weight_only"] = Field(
        default="auto",
        description='With enable_int8 or enable_fp8. "static": activations have one calibrated scale. "dynamic": '
        'each row has its own, chosen as it is computed. "weight_only": activations stay float. "auto": what measures '
        "fastest.",
    )
    accuracy_budget: Budget = Field(
        default=DEFAULT,
        validate_default=True,
        description="With enable_int8, enable_fp8, enable_fp16 or enable_bf16: how far outputs may be from the "
        'original\'s at the samples. A relative error (0.1 by default), {"cosine": 0.99}, {"snr_db": 30}, or '
        '{"metric": fn, "samples": [(inputs, label), ...], "drop": 0.01}, where fn(outputs, labels) is a number, the '
        "higher the better.",
    )
    calibration_method: Literal["min_max", "moving_average", "entropy", "percentile"] = Field(
        default="min_max",
        description="With static quantization: how the range of an activation follows from what was seen of it.",
    )
    calibration_samples: int = Field(
        default=128,
        ge=1,
        description="With enable_int8 or enable_fp8: how many of the samples are used, at most, to calibrate.",
    )
    symmetric_activations: bool | None = Field(
        default=None,
        description="With enable_int8: whether activations are quantized with equal reach on both sides of zero, as "
        "they always are on a GPU. None: where that costs little, if the scale is each row's own, and not where it is "
        "calibrated.",
    )
    weight_bits: Literal[8, 4] = Field(
        default=8,
        description="With weight_only: the bits of a weight; 4 have a scale per group of 128 inputs or fewer.",
    )
    preserved_attributes: Names = Field(
        default=(),
        description="Attributes and methods of the model that must survive freezing, by name.",
    )
    allow_tracing: Tracing = Field(
        default=None,
        description="None: trace, and script if tracing fails or does not answer everywhere; where neither does, "
        "keep the traced paths, with a warning (an error if strict). "
        "True: trace only. A list of submodule names: trace these and script the rest.",
    )
    max_paths: int = Field(
        default=8,
        ge=1,
        description="Ways through the model's Python code that are captured at most: each is a trace that answers "
        "only where the code takes the same decisions.",
    )
    python_fallback: bool = Field(
        default=True,
        description="Where no captured path answers, call the original model, in the process that optimized it. "
        "False, and in a process that loads the module: the call raises a RuntimeError that names the decision.",
    )
    background_paths: bool = Field(
        default=False,
        description="With python_fallback: capture the path of a call that none answers in a thread, and answer such "
        "calls by it from then on, in this process; up to max_paths in all. Saved files do not have it. It takes the "
        "memory of one more module. Not for quantized models.",
    )
    dynamic_shapes: DynamicShapes = Field(
        default=None,
        description="Narrows which sizes will be seen, per input (position or name) and axis: True "
        'or "auto" (any size, the default of every axis not named), an int (fixed), or (min, max). '
        "Other sizes still work: they run the original.",
    )
    dynamic_tuning_shapes: Tuning = Field(
        default=None,
        description='{"min": [shape per input], "opts": [[shape per input], ...], "max": [...]}: '
        "the range of sizes to serve, and the shapes to verify and measure at besides the samples.",
    )
    customize_op_white_list: OpKinds = Field(
        default=(),
        description='Op kinds ("aten::add", or one occurrence, "aten::add@3", counted from 0, or from '
        'the end: "aten::add@-1") to hand to backends although the default policy would not.',
    )
    customize_op_black_list: OpKinds = Field(
        default=(),
        description="Op kinds, written as in the white list, that must stay TorchScript.",
    )
    customize_jit_passes: JitPasses = Field(
        default=(),
        description="Functions run on the captured, frozen graph, in order, before clustering.",
    )
    min_cluster_size: int = Field(
        default=3,
        ge=1,
        description="Clusters of fewer ops stay TorchScript: they rarely pay for their boundary.",
    )
    freeze_module: bool = Field(
        default=True, description="Turn parameters into constants. False keeps them as attributes."
    )
    timing: bool = Field(
        default=True,
        description="Measure every verified candidate and keep the fastest. False: take the first "
        "that verifies, unmeasured.",
    )
    timing_repeats: int = Field(
        default=15,
        ge=1,
        description="Interleaved rounds per candidate and shape, at most; four times as many where noise hides "
        "what may be a win.",
    )
    time_budget: Seconds = Field(
        default=30.0,
        description="Seconds one optimize may look for something better, conversions and timing; what is best "
        "by then is taken; what was not begun stays TorchScript. The first backend of the largest cluster is always "
        "tried, and those of the others until twice the time. None: no limit. None of it is spent on "
        "tuning one backend's code: DISC needs none, and TVM's searches are for fixed sizes.",
    )
    sample_weights: Weights = Field(
        default=None,
        description="How much each sample counts when speeds are compared: one number > 0 per sample, and then "
        "one per shape of dynamic_tuning_shapes (min, opts, max), if given. None: all count alike.",
    )
    search: Literal["predicted", "all"] = Field(
        default="predicted",
        description='With optimization_pipeline="auto". "predicted": try DISC, and other backends unless measurements '
        'at similar models, here or shipped with blade, say that they lose. "all": try every backend.',
    )
    background: bool = Field(
        default=False,
        description="Return at once a module that runs the original, and let engines in as soon as they are ready "
        "(blade.wait). Its clusters are fixed from the start: one way to cut the graph, one engine per cluster.",
    )
    strict: bool = Field(
        default=False,
        description="Raise the error that would otherwise have become a fallback and a Reason.",
    )
    cache: bool = Field(
        default=True,
        description="Keep compiled code and verdicts in the folder BLADE_CACHE_DIR (~/.cache/blade), so that what "
        "was optimized once is not compiled and measured again.",
    )
    cache_limit_gb: float | None = Field(
        default=None,
        gt=0,
        description="How many GiB that folder may take; what was not used for longest goes. None: what the "
        "variable BLADE_CACHE_LIMIT_GB says, 1 without it.",
    )
    memory: Literal["normal", "low"] = Field(
        default="normal",
        description='"low": DISC reads every weight where it is. "normal": it may keep one copy of each, packed '
        "for its own products and convolutions, which are faster.",
    )
    dump_dir: Folder = Field(
        default=None,
        description="Folder for the intermediate representations of every cluster and pass, and for a "
        "script per failed conversion that reproduces it.",
    )
    gpu_targets: GpuTargets = Field(
        default=(),
        description="NVIDIA GPUs that an engine carries DISC's kernels for besides the one it is made on, by their "
        'compute capability: ["sm_80", "sm_90"]. A file then runs on each of them; tables choose the tiles there, as '
        "nothing can be timed.",
    )
    cuda_graphs: bool = Field(
        default=True,
        description="On a GPU, record what an engine launches at a shape when it is used for the second time, and "
        "replay that from then on where it is faster: not what is a kernel or two, or copies much. "
        "False: launch kernel by kernel, which takes longer and less memory.",
    )
    reuse_output_buffers: bool = Field(
        default=False,
        description="With cuda_graphs: return the very buffers that the next call at the same shape overwrites, "
        "instead of copies of them.",
    )
    conversion_deadline_s: float = Field(
        default=300.0,
        gt=0,
        allow_inf_nan=False,
        description="Seconds one conversion may take in the process it runs in, which is then ended.",
    )
    conversion_memory_mb: int | None = Field(
        default=None,
        ge=1,
        description="MiB of address space one conversion may take in its process. None: no limit.",
    )
    max_failures: int = Field(
        default=3,
        ge=1,
        description="Consecutive run-time failures after which an engine is no longer tried.",
    )
    recheck: float = Field(
        default=0.0,
        ge=0,
        le=1,
        allow_inf_nan=False,
        description="The share of calls that engine and original both answer, to be compared: 1e-4 is one in 10,000. "
        "An engine whose answers differ max_failures times in a row is retired (drifted).",
    )

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if both := set(self.customize_op_white_list) & set(self.customize_op_black_list):
            raise ValueError(
                f"customize_op_white_list and customize_op_black_list both name {min(both)!r}; "
                "an op kind can be in one of them"
            )
        if self.dynamic_shapes is not None and self.dynamic_tuning_shapes is not None:
            raise ValueError(
                "dynamic_shapes and dynamic_tuning_shapes both declare the range of sizes; give one"
            )
        return self

    # Hidden from type checkers, so that they keep checking the fields' own signature.
    if not TYPE_CHECKING:

        def __init__(self, **fields: Any) -> None:
            try:
                super().__init__(**fields)
            except ValidationError as error:
                raise ConfigError(_explain(error)) from None

        def __setattr__(self, name: str, value: object) -> None:
            raise ConfigError(f"a Config cannot be changed; use config.evolve({name}={value!r})")

    @property
    def reduces_precision(self) -> bool:
        """Whether engines may answer less exactly than the original."""
        return self.quantizes or self.enable_fp16 or self.enable_bf16

    @property
    def quantizes(self) -> bool:
        """Whether layers may be computed in 8 bits."""
        return self.enable_int8 or self.enable_fp8

    def evolve(self, **changes: Any) -> "Config":
        """A copy with ``changes``, checked like a new one; raises ``ConfigError``."""
        return Config(**{**{name: getattr(self, name) for name in Config.model_fields}, **changes})

    @staticmethod
    def current() -> "Config":
        """The innermost active ``Config`` of this thread or task, or the defaults."""
        stack = _active.get()
        return stack[-1] if stack else Config()

    def __enter__(self) -> Self:
        _active.set((*_active.get(), self))
        return self

    def __exit__(self, *exc_info: object) -> None:
        stack = _active.get()
        # Not always the top: generators may leave blocks in another order than they entered them.
        last = max(i for i, active in enumerate(stack) if active is self)
        _active.set(stack[:last] + stack[last + 1 :])


_active: ContextVar[tuple[Config, ...]] = ContextVar("blade_config", default=())


def _explain(error: ValidationError) -> str:
    """One sentence per problem: field, value, allowed values."""
    return "; ".join(dict.fromkeys(_explain_one(dict(one)) for one in error.errors()))


def _explain_one(one: Mapping[str, Any]) -> str:
    message = str(one["msg"]).removeprefix("Value error, ")
    if not one["loc"]:
        return f"Config: {message}"
    name, value = str(one["loc"][0]), one["input"]
    if one["type"] == "extra_forbidden":
        near = difflib.get_close_matches(name, Config.model_fields, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        known = ", ".join(sorted(Config.model_fields))
        return f"Config has no field {name!r} (given {value!r}): {hint}The fields are: {known}"
    return f"Config.{name}={value!r}: {message}. {Config.model_fields[name].description}"

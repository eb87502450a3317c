# SPDX-License-Identifier: Apache-2.0
"""The value that every negative decision in blade becomes.

    Reason(Stage.SUPPORT, Code.UNSUPPORTED_OP, "disc", "aten::nonzero", "disc has no rule for ...")

``code`` is of a closed enum, so that reports can be counted and each code has a test that produces it.
``detail`` is a full sentence that includes the numbers.
"""

from dataclasses import dataclass
from enum import Enum


class Stage(str, Enum):
    """The stage of the pipeline that made the decision."""

    CAPTURE = "capture"
    SUPPORT = "support"
    CLUSTER = "cluster"
    CONVERT = "convert"
    VERIFY = "verify"
    SELECT = "select"
    LOAD = "load"
    RUN = "run"


class Code(str, Enum):
    """The kind of decision. The values are stable: they are keys of ``stats`` and of JSON reports."""

    # capture
    TRACE_FAILED = "trace_failed"
    TRACE_SPECIALIZED = "trace_specialized"
    SCRIPT_FAILED = "script_failed"
    EXPORT_FAILED = "export_failed"
    TRACER_WARNING = "tracer_warning"
    BAKED_ARGUMENT = "baked_argument"
    RUNTIME_NODE = "runtime_node"
    # support
    BLACK_LISTED = "black_listed"
    UNSUPPORTED_OP = "unsupported_op"
    UNSUPPORTED_DTYPE = "unsupported_dtype"
    UNSUPPORTED_DEVICE = "unsupported_device"
    UNKNOWN_TYPE = "unknown_type"
    MUTATES = "mutates"
    ALIASES = "aliases"
    RANDOM = "random"
    DATA_DEPENDENT = "data_dependent"
    # cluster
    TOO_SMALL = "too_small"
    # convert
    BACKEND_UNAVAILABLE = "backend_unavailable"
    CONVERSION_FAILED = "conversion_failed"
    CONVERSION_CRASHED = "conversion_crashed"
    CONVERSION_TIMEOUT = "conversion_timeout"
    TIME_BUDGET = "time_budget"
    NOT_TRIED = "not_tried"
    CACHE_UNTRUSTED = "cache_untrusted"
    CALIBRATION = "calibration"
    ACCURACY = "accuracy"
    # capture and verify: the original crashed its process at a derived input
    PROBE_CRASHED = "probe_crashed"
    # verify, select
    WRONG_VALUES = "wrong_values"
    SLOWER = "slower"  # than the original
    NOT_FASTEST = "not_fastest"  # the original is as fast, or another engine or plan faster
    TOO_NOISY = "too_noisy"
    # load: the engine in a saved file cannot run in this process
    CPU_MISMATCH = "cpu_mismatch"
    DEVICE_MISMATCH = "device_mismatch"
    VERSION_MISMATCH = "version_mismatch"
    CORRUPT_PAYLOAD = "corrupt_payload"
    UNTRUSTED = "untrusted"
    # run: one call goes to the original
    GUARD_DTYPE = "guard_dtype"
    GUARD_DEVICE = "guard_device"
    GUARD_RANK = "guard_rank"
    GUARD_SHAPE = "guard_shape"
    GUARD_GRAD = "guard_grad"
    GUARD_AUTOCAST = "guard_autocast"
    ENGINE_RAISED = "engine_raised"
    CIRCUIT_OPEN = "circuit_open"
    DRIFTED = "drifted"
    DISABLED = "disabled"
    PENDING = "pending"


@dataclass(frozen=True)
class Reason:
    """One decision against something, with its cause.

    ``backend``: the backend that decided; ``None``: blade. ``subject``: the op, cluster or argument
    concerned. ``detail``: a full sentence. ``error``: the exception behind it and its location, if there was
    one.
    """

    stage: Stage
    code: Code
    backend: str | None
    subject: str
    detail: str
    error: str | None = None

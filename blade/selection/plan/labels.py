# SPDX-License-Identifier: Apache-2.0
"""What an optimized module carries beside its engines: its report, the structure of the original's output, and the
form of the samples.

    module = splice(captured, clusters)
    add_labels(module, captured)        # before it runs
    set_report(module, report)

torch's legacy executor, which libraries switch to for speed (``torch._C._jit_set_profiling_executor(False)``), ends
calls of a module whose class got an attribute after a first call.
"""

import torch

from blade.capture.inputs import MEASURED
from blade.core.captured import Captured
from blade.core.examples import text_of_samples
from blade.report import ATTRIBUTE, EXAMPLES, STRUCTURE, Report


def add_labels(module: torch.jit.ScriptModule, captured: Captured) -> None:
    """Register the attributes of ``module``; its report is empty."""
    _add(module, ATTRIBUTE, "")
    if captured.structure is not None:
        _add(module, STRUCTURE, captured.structure)
    if (examples := text_of_samples(captured.samples[:MEASURED])) is not None:
        _add(module, EXAMPLES, examples)


def set_report(module: torch.jit.ScriptModule, report: Report) -> None:
    """Replace the report that ``module`` carries."""
    module._c.setattr(ATTRIBUTE, report.to_json())


def name_outputs(module: torch.jit.ScriptModule, structure: str | None) -> None:
    """Give a module of an imported model the structure that names its outputs."""
    if structure is not None and not hasattr(module, STRUCTURE):
        _add(module, STRUCTURE, structure)


def _add(module: torch.jit.ScriptModule, name: str, text: str) -> None:
    module._c._register_attribute(name, torch._C.StringType.get(), text)

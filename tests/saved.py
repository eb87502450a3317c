# SPDX-License-Identifier: Apache-2.0
"""What a user gets of a module who saves it and loads it again."""

import io

import torch


def loaded(module: torch.jit.ScriptModule) -> torch.jit.ScriptModule:
    """``module``, saved and loaded."""
    file = io.BytesIO()
    torch.jit.save(module, file)
    file.seek(0)
    return torch.jit.load(file)

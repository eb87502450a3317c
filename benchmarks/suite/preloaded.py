# SPDX-License-Identifier: Apache-2.0
"""What cells on a CPU need, imported once, by the process that forks them; nobody else imports this module."""

import contextlib
import os
from pathlib import Path

from suite import cells, libraries

__all__ = ["cells"]

PACKAGES = "SUITE_PACKAGES"  # the folder of --packages

libraries.look_in(Path(os.environ[PACKAGES]) if PACKAGES in os.environ else None)
for name in ("transformers.modeling_utils", "timm"):
    with contextlib.suppress(ImportError):
        libraries.imported(name)

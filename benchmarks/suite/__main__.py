# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks.suite``: the modules beside and below this folder import each other by short names."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from suite.command import main

if __name__ == "__main__":
    main()

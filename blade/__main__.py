# SPDX-License-Identifier: Apache-2.0
"""``python -m blade doctor|optimize|bench|report|partition|bisect``; see ``--help``."""

from blade.cli.main import main

if __name__ == "__main__":
    main()

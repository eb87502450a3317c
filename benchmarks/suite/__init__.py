# SPDX-License-Identifier: Apache-2.0
"""Some ninety models in three families against other engines, inference and training, on a CPU or a GPU.

    python -m benchmarks.suite --out build/suite.jsonl                                  # CPU, one thread
    python3 -m benchmarks.suite --device cuda --out $OUT/suite.jsonl --minutes 8 --modes inference,training
    python -m benchmarks.suite --out build/suite.jsonl --summary                        # the tables of what there is

README.md beside this file says what is measured, and how.
"""

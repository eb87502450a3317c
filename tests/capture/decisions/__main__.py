# SPDX-License-Identifier: Apache-2.0
"""What becomes of every row today, as a table for benchmarks/RESULTS.md.

    python tests/capture/decisions                      # every row, with the original at hand
    python tests/capture/decisions --apart Confident    # without it, saved and loaded; one row

Columns: calls answered by a path, by the original in Python, raised with the place of a decision, raised
like the original, answered wrongly, raised in another way; and seconds of CPU. ``refused``: ``optimize``
raised ``InputError``; ``crashed``: it raised something else.
"""

import argparse
import os
import time

import torch

os.environ.setdefault("BLADE_BACKENDS", "disc")

import on_arguments  # noqa: F401 - each adds its rows to the table
import on_library_code  # noqa: F401
import on_lists  # noqa: F401
import on_loops  # noqa: F401
import on_numbers  # noqa: F401
import on_sizes  # noqa: F401
import on_values  # noqa: F401
from decision_check import Score, judge
from decision_table import ROWS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="rows; all by default")
    parser.add_argument("--apart", action="store_true", help="saved and loaded, without fallback")
    parser.add_argument("--traced", action="store_true", help="never scripted")
    parser.add_argument("--why", action="store_true", help="the first wrong answer of each row")
    options = parser.parse_args()
    torch.set_num_threads(2)
    total, seconds = Score(), 0.0
    print(f"{'row':22} {'decides':52} paths python named alike wrong unnam      s")
    for name in options.names or ROWS:
        started = time.process_time()
        apart = options.apart
        score = judge(
            ROWS[name], python_fallback=not apart, is_loaded=apart, is_traced=options.traced
        )
        took = time.process_time() - started
        seconds += took
        print(f"{name:22} {ROWS[name].kind:52} {_columns(score)} {took:6.2f}", flush=True)
        why = "".join([score.refused, *score.failures][:2])
        if options.why and why:
            print(f"    {why[-400:]!r}")
        total.paths += score.paths
        total.fallback += score.fallback
        total.raised += score.raised
        total.both_raise += score.both_raise
        total.wrong += score.wrong
        total.unnamed += score.unnamed
    print(f"{'calls':75} {_columns(total)} {seconds:6.2f}")


def _columns(score: Score) -> str:
    if score.refused or score.crashed:
        return f"{'refused' if score.refused else 'crashed':>35}"
    counts = score.paths, score.fallback, score.raised, score.both_raise, len(score.wrong)
    counts += (len(score.unnamed),)
    return " ".join(f"{count:>5}" for count in counts)


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Schedule loops that TVM would run as written: in parallel, with contiguous memory access.

    module = schedules()(module)

Nothing is searched or measured: TVM tunes for fixed sizes, and here sizes are symbolic. TVM proves that every
step preserves semantics, or refuses it; such a function stays as it is.
"""

from typing import Any

INNER = 512  # elements of an elementwise loop per task


def schedules() -> Any:
    """A pass over a module that schedules every function without a schedule."""
    from tvm import s_tir
    from tvm.s_tir import dlight

    class Rows(dlight.ScheduleRule):  # type: ignore[misc]
        def apply(self, function: Any, target: Any, tunable: bool) -> Any:
            schedule = s_tir.Schedule(function)
            try:
                for block in dlight.normalize_prim_func(schedule) or ():
                    _arrange(schedule, block)
            except s_tir.ScheduleError:
                return None
            return schedule

    return dlight.ApplyDefaultSchedule(Rows())


def _arrange(schedule: Any, block: Any) -> None:
    """Run rows of the result in parallel; within a row, reduction loops are outside, elements inside."""
    kinds = block.dom_kind()
    loops = list(zip(kinds, schedule.get_loops(block.block_rv), strict=True))
    across = [loop for kind, loop in loops if kind == "S"]
    summed = [loop for kind, loop in loops if kind == "R"]
    if not across or len(across) + len(summed) != len(loops):
        return
    if len(across) == 1 and not summed:
        outer, _ = schedule.split(across[0], factors=[None, INNER])
        schedule.parallel(outer)
        return
    *rows, inner = across if len(across) > 1 else (*across, None)
    if inner is not None:
        schedule.reorder(*rows, *summed, inner)
    schedule.parallel(schedule.fuse(*rows) if len(rows) > 1 else rows[0])
    if summed:
        schedule.decompose_reduction(block.block_rv, summed[0])

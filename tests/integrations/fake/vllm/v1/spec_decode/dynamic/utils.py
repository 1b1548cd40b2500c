from __future__ import annotations


def build_dynamic_sd_schedule_lookup(schedule: list[tuple[int, int, int]], most: int, drafts: int) -> list[int]:
    return [0, *(next(k for first, last, k in schedule if first <= n <= last) for n in range(1, most + 1))]

"""What sglang_engine.py found, in tables: counts side by side, times, and what observing costs."""

from __future__ import annotations

import collections
import json
import sys
import time
from typing import Any

from graphprobe.snapshot import ForwardSnapshot, Snapshot

TARGET, PREFILL = "sglang", "sglang.prefill"
MODES = ("decode_cuda_graph", "decode_none", "prefill_cuda_graph", "prefill_none")


def head() -> dict[str, Any]:
    import sglang
    import torch

    found = {"sglang": sglang.__version__, "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
    found["python"] = sys.version.split()[0]
    found["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return found


def snapshot(found: dict[str, Any]) -> Snapshot:
    return Snapshot.from_json(json.dumps(found["snapshot"]))


def forward(found: dict[str, Any], name: str) -> ForwardSnapshot | None:
    return snapshot(found).forwards.get(name)


def passes(found: dict[str, Any]) -> tuple[int, ...]:
    """Ours: decode by graph and eager, prefills likewise."""
    numbers: list[int] = []
    for name in (TARGET, PREFILL):
        one = forward(found, name)
        numbers += (0, 0) if one is None else (one.graph_calls, one.eager_calls)
    return tuple(numbers)


def own(found: dict[str, Any]) -> tuple[int, ...] | None:
    """SGLang's."""
    told = found.get("own")
    return None if told is None else tuple(int(told.get(f"cuda_graph_passes_total {mode}", 0)) for mode in MODES)


def buckets(found: dict[str, Any]) -> collections.Counter[tuple[int, int]]:
    """Graph calls by size and bucket."""
    one = forward(found, TARGET)
    sizes: collections.Counter[tuple[int, int]] = collections.Counter()
    for row in () if one is None else one.rows:
        if row.bucket is not None:
            sizes[row.batch_size, row.bucket] += row.calls
    return sizes


def verdict(name: str, found: dict[str, Any], expected: dict[str, tuple[int, ...]]) -> list[str]:
    """What does not fit; nothing where all does."""
    ours, theirs, wrong = passes(found), own(found), []
    if name.endswith("without"):
        return ["counted though switched off"] if any(ours) else []
    if theirs is not None and ours != theirs:
        wrong.append(f"the engine says {theirs}")
    if name in expected and ours != expected[name]:
        wrong.append(f"expected {expected[name]}")
    logged = {(raw, key): n for raw, key, n in found["replayed"]}
    if logged and logged != dict(buckets(found)):
        wrong.append("sizes differ from the log of replays")
    if found["snapshot"].get("internal_errors"):
        wrong.append(f"internal errors: {found['snapshot']['internal_errors']}")
    return wrong


def tell(results: dict[str, Any], expected: dict[str, tuple[int, ...]]) -> None:
    known = {name: found for name, found in results.items() if found}
    for name, found in known.items():
        details(name, found)
    print("\nscenario           decode graph/eager, prefill graph/eager   replays  logged  hit rate  digest")
    for name, found in known.items():
        one = forward(found, TARGET)
        rate = "-" if one is None or one.hit_rate is None else f"{one.hit_rate:.3f}"
        seen = (snapshot(found).replays_seen, found["replays"])
        logged = sum(n for *_, n in found["replayed"])
        fits = "; ".join(verdict(name, found, expected)) or "as it should be"
        print(f"{name:18} {passes(found)!s:30} {seen!s:14} {logged:6}  {rate:8}  {found['digest']}  {fits}")
    digests = {found["digest"].split()[0] for name, found in known.items() if name != "eagle"}
    print("tokens identical in all scenarios:", len(digests) == 1)
    for name, found in known.items():
        for part in ("throughput", "us per step of each hook"):
            if part in found:
                print(f"{name}: {part}: {found[part]}")
        if "us per step of each hook" in found:
            print(f"{name}: us per step, all hooks: {sum(found['us per step of each hook'].values()):.2f}")


def details(name: str, found: dict[str, Any]) -> None:
    print(f"== {name}: started in {found['start_seconds']:.0f} s, served for {found['work_seconds']:.1f} s")
    for one_name, one in snapshot(found).forwards.items():
        for row in one.rows:
            text = (row.phase, row.path, row.mode, row.batch_size, row.bucket, str(row.reason or ""), row.calls)
            print("  ", one_name, *text)
        times = {
            key: (each.count, round(1e3 * each.sum / each.count, 3)) for key, each in one.times.items() if each.count
        }
        print("  ", one_name, "ms per timed call (samples, mean):", times)
        print("  ", one_name, "pool", one.pool_bytes, "growth", dict(one.pool_growth))
        print("  ", one_name, "capture seconds", dict(one.capture_seconds), dict(one.capture_outcomes))
        print("  ", one_name, "kv tokens", one.kv_capacity_tokens, "uncovered", dict(one.uncovered))
    for key in ("own", "served", "sglang series", "said"):
        print("  ", key, found.get(key))
    print("   not bound", [hook for (_, hook), bound in snapshot(found).hooks.items() if not bound])

"""Writes the figures that are published on graphs as saved results of ``graphprobe account``, beside this file.

python docs/account/published.py; then: graphprobe account docs/account/server.json
"""

from __future__ import annotations

from pathlib import Path

from graphprobe.tools.balance import Account, Prefill, Step
from graphprobe.tools.cards import datasheet

QWEN3_8B = 16_400_000_000
"""Bytes of its weights in bfloat16."""

SERVER = Account(
    name="Qwen3-8B, transformers 5.17, batch 1",
    device="NVIDIA H200",
    steps=(Step(1, 2511, eager=42.9e-3, graph=9.1e-3),),
    bandwidth=QWEN3_8B / 3.8e-3,
    datasheet=datasheet("NVIDIA H200"),
    weight_bytes=QWEN3_8B,
    notes=(
        "eager 42.9 ms, graph 9.1 ms, floor 3.8 ms and 2,511 kernels were measured with hand-written probes",
        "the bandwidth is the one that makes 16.4 GB a floor of 3.8 ms",
    ),
)

CONSUMER = Account(
    name="8B model in bfloat16",
    device="consumer GPU, 736 GB/s",
    steps=(Step(1, eager=22.7e-3, graph=22.3e-3),),
    datasheet=736e9,
    weight_bytes=QWEN3_8B,
    notes=(
        "published are 736 GB/s, 16.4 GB of weights, a floor of 22.3 ms, and that a graph saves 0.4 ms",
        "the step times are not: a replay is set to the floor, of which any real one saves a smaller share",
    ),
)

OWN_ENGINE = Account(
    name="own engine in Python",
    device="",
    steps=(Step(1, 4000),),
    notes=("published is the count of 4,000 kernels per step alone",),
)

FUSED = Account(
    name="fused engine",
    device="NVIDIA GB300",
    steps=(Step(1, 839),),
    datasheet=datasheet("NVIDIA GB300"),
    per_kernel=283e-6 / 839,
    notes=(
        "published are 839 kernels, and 283 us of the device's part: 0.34 us each, of 0.3 to 0.5 reported",
        "without programmatic dependent launch about 1 us each is reported; 0.68 to 0.74 were measured on an H200",
    ),
)

MISSED = Account(
    name="engine with buckets 1, 2, 4, 8 and 16, exact dispatch",
    device="",
    hit_rate=2609 / (2609 + 1641),
    notes=(
        "published are 2,609 replays and 1,641 fallbacks, as batch 3 has no bucket",
        "its throughput at batch 3 went from 87.0 to 74.7 token/s with graphs on",
    ),
)

PREFILL = Account(
    name="graphs for prefill",
    device="",
    prefill=Prefill(share=0.013, pool_bytes=1_600_000_000),
    notes=("published are 1.3 % and 1.6 GB, not the times",),
)

CAPTURE = Account(
    name="captures of compiled forwards",
    device="",
    steps=(Step(1, capture=1.0, compile=0.78), Step(2, capture=1.0, compile=0.86)),
    notes=("published is that torch.compile takes 78 to 86 %; a capture is set to 1 s, the batches number the two",),
)

RESULTS = {
    "server": SERVER,
    "consumer": CONSUMER,
    "own_engine": OWN_ENGINE,
    "fused": FUSED,
    "missed": MISSED,
    "prefill": PREFILL,
    "capture": CAPTURE,
}


def main() -> None:
    """Write one file each."""
    for name, account in RESULTS.items():
        (Path(__file__).parent / f"{name}.json").write_text(account.to_json() + "\n")


if __name__ == "__main__":
    main()

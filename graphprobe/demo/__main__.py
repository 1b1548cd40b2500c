"""``python -m graphprobe.demo``: the demo without the command line's libraries."""

from __future__ import annotations

import argparse
import sys

from graphprobe.demo import MODELS, run
from graphprobe.errors import GraphprobeError


def main() -> int:
    """Run the demo; 1 where it failed, after one line that says why."""
    parser = argparse.ArgumentParser(prog="graphprobe.demo", description="A model answers through captured graphs.")
    parser.add_argument("--model", choices=MODELS, default="smollm2")
    parser.add_argument("--pad", action="store_true", help="serve sizes without a bucket from the next larger one")
    parser.add_argument("--device", help="cpu, cuda, ...; by default a GPU where there is one")
    asked = parser.parse_args()
    try:
        run(asked.model, pad=asked.pad, device=asked.device)
    except GraphprobeError as error:
        print(f"graphprobe demo: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

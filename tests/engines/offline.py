"""Run by the Python of an engine: a model in this process, asked three times; its last line says, as JSON, what was.

    python offline.py MODEL [VERSION]

Without GRAPHPROBE=1 it is observed by hand, except while it is asked the second time. VERSION is what vLLM pretends
to be.
"""

from __future__ import annotations

import json
import os
import sys

import vllm

import graphprobe

OPTIONS = {"enforce_eager": True, "max_model_len": 512, "max_num_seqs": 8}


def main() -> None:
    vllm.__version__ = sys.argv[2] if len(sys.argv) > 2 else vllm.__version__
    automatic = os.environ.get("GRAPHPROBE") == "1"
    refused = "" if automatic else by_hand()
    engine = vllm.LLM(sys.argv[1], distributed_executor_backend="uni", **OPTIONS)
    turns = [(answers(engine), calls())]
    for change in (lambda: graphprobe.uninstrument("vllm"), by_hand):
        if not automatic:
            change()
        turns.append((answers(engine), calls()))
    print(json.dumps({"turns": turns, "refused": refused}))


def by_hand() -> str:
    """Observe vLLM; what is said against it."""
    try:
        graphprobe.instrument("vllm")
    except graphprobe.DidNotInstrument as error:
        return str(error)
    return ""


def answers(engine: vllm.LLM) -> list[list[int]]:
    asked = vllm.SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    replies = engine.generate(["abc", "hello"], asked, use_tqdm=False)
    return [list(reply.outputs[0].token_ids) for reply in replies]


def calls() -> int:
    """All that have been counted so far."""
    forward = graphprobe.snapshot().forwards.get("vllm")
    return 0 if forward is None else forward.graph_calls + forward.eager_calls


if __name__ == "__main__":
    main()

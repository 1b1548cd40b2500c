"""Drives vLLM's dispatchers through graphprobe's hooks and prints what was counted, as JSON: in a process of its own.

The vLLM is the one that is imported first; vllm_cases.py says what is driven.
"""

from __future__ import annotations

import json
import logging
import os
import re
from dataclasses import replace
from typing import Any

os.environ["GRAPHPROBE_STRICT"] = "1"

import graphprobe
from graphprobe.ledger import LEDGER
from tests.engines import vllm_runners
from tests.engines.vllm_cases import CASES, COVERAGE
from tests.engines.vllm_device import no_device
from tests.engines.vllm_setups import Setup, Step, step

IDLE = step("2d1")


class Said(logging.Handler):
    """What graphprobe has logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it."""
        self.lines.append(record.getMessage())


def run(runner: str, setup: Setup, steps: tuple[Step, ...], said: Said, drafts: bool = False) -> dict[str, Any]:
    """Start an engine, serve the steps, and tell what was counted and what vLLM answered."""
    LEDGER.forwards.clear()
    said.lines.clear()
    with no_device(setup):
        try:
            made = vllm_runners.RUNNERS[runner](setup)
        except ValueError as error:
            return {"refused": str(error)}
        taken = made.runner.capture_model()
        # As dummy runs do, and ranks without requests: no step is around it, and nothing is counted for it.
        made.execute(vllm_runners.output_of(IDLE), IDLE)
        made.answers.clear()
        worker = vllm_runners.worker_of(made)
        for one in steps:
            vllm_runners.drive(worker, one)
            if drafts:
                made.draft(len(one.batch), made.answers[-1][0])
    found = json.loads(graphprobe.snapshot().to_json())["forwards"]
    return {
        **found.get("vllm", {}),
        "drafter": found.get("vllm.drafter", {}).get("rows", []),
        "taken": taken,
        "answers": made.answers,
        "said": list(said.lines),
    }


def advised(setup: Setup, said: list[str]) -> Setup | None:
    """The engine started anew with the line that the warning says; None where there was no warning."""
    lines = [found[1] for text in said if (found := re.search(r"--compilation-config '(.+?)'", text))]
    return replace(setup, sizes=tuple(json.loads(lines[0])["cudagraph_capture_sizes"]), limit=None) if lines else None


def main() -> None:
    """All of it."""
    said = Said()
    logging.getLogger("graphprobe").addHandler(said)
    graphprobe.instrument("vllm")
    found: dict[str, Any] = {"version": vllm_runners.VERSION, "cases": {}, "coverage": {}}
    for case in CASES:
        for runner in case.runners:
            found["cases"][f"{runner}: {case.name}"] = run(runner, case.setup, case.steps, said, bool(case.drafter))
    for check in COVERAGE:
        for runner in check.runners:
            told = run(runner, check.setup, (), said)
            setup = advised(check.setup, told.get("said", []))
            told["after"] = run(runner, setup, (), said)["uncovered"] if setup else {}
            found["coverage"][f"{runner}: {check.name}"] = told
    found["hooks"] = {hook: bound for (_, hook), bound in LEDGER.hooks.items()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()

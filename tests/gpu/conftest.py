"""GPU tests skip, with the reason printed, where there is no GPU. GRAPHPROBE_GPU_JSON=FILE keeps their outcome."""

from __future__ import annotations

import json
import os
import time
from typing import Any

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "/gpu/" in str(item.path):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU: torch.cuda.is_available() is False"))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    path = os.environ.get("GRAPHPROBE_GPU_JSON")
    if not path:
        return
    outcomes = {
        report.nodeid.split("::", 1)[1]: outcome
        for outcome in ("passed", "failed", "skipped")
        for report in terminalreporter.stats.get(outcome, [])
    }
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    result = {"device": device, "torch": torch.__version__, "date": time.strftime("%Y-%m-%d"), "tests": outcomes}
    with open(path, "w") as file:
        json.dump(result, file, indent=1)

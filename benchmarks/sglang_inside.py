"""In SGLang's scheduler, as a plugin: does what the benchmark asks for, in the thread that serves, while it is idle.

A request is a file ``ask`` in the folder $BENCH, its answer a file ``answer`` there.
"""

from __future__ import annotations

import functools
import json
import os
import time
from pathlib import Path
from typing import Any

import wrapt

FOLDER = Path(os.environ["BENCH"])
WAIT = 120.0


def load() -> None:
    """What SGLang calls, in each of its processes."""
    wrapt.register_post_import_hook(_watch, "sglang.srt.managers.scheduler")


def ask(what: str) -> Any:
    """Have the scheduler do something, once it is idle; from another process."""
    part, answer = FOLDER / "part", FOLDER / "answer"
    part.write_text(what)
    part.rename(FOLDER / "ask")
    end = time.monotonic() + WAIT
    while not answer.exists():
        if time.monotonic() > end:
            raise TimeoutError(f"the scheduler has not answered {what}")
        time.sleep(0.02)
    found = json.loads(answer.read_text())
    answer.unlink()
    return found


class Inside:
    """What the scheduler has been asked for."""

    def __init__(self) -> None:
        self.measuring: Any = None
        self.replays = 0
        self._blocks: Any = None

    def step(self, batch: Any) -> None:
        """A batch is about to run, or there is none."""
        if batch is not None:
            if self.measuring is not None:
                self.measuring.step(batch)
        elif (FOLDER / "ask").exists():
            self._obey((FOLDER / "ask").read_text())

    def _obey(self, what: str) -> None:
        (FOLDER / "ask").unlink()
        try:
            found = getattr(self, what)()
        except Exception as error:
            found = {"failed": f"{type(error).__name__}: {error}"}
        part = FOLDER / "told"
        part.write_text(json.dumps(found))
        part.rename(FOLDER / "answer")

    def watch_replays(self) -> None:
        """Count replays in our own way, too, around whatever is there."""
        import torch

        replay = torch.cuda.CUDAGraph.replay

        @functools.wraps(replay)
        def replayed(graph: Any) -> Any:
            self.replays += 1
            return replay(graph)

        torch.cuda.CUDAGraph.replay = replayed  # type: ignore[method-assign]

    def snapshot(self) -> Any:
        """The ledger, and our own count of replays."""
        import graphprobe

        return {"snapshot": json.loads(graphprobe.snapshot().to_json()), "replays": self.replays}

    def blocks(self) -> None:
        """What follows is one more generation of blocks with and without the hooks."""
        import sglang_speed

        self._blocks = self.measuring = self._blocks or sglang_speed.Blocks()
        self.measuring.generation()

    def plain(self) -> None:
        """What follows is measured in no way, and has no hooks."""
        import graphprobe

        self.measuring = None
        graphprobe.uninstrument("sglang")

    def speed(self) -> Any:
        """What the blocks took."""
        found, self.measuring, self._blocks = self._blocks.found(), None, None
        return found

    def clocks(self) -> None:
        """Clocks around the hooks."""
        import sglang_speed

        self.measuring = sglang_speed.Own(ours=True)

    def empty_clocks(self) -> None:
        """Clocks around nothing."""
        import sglang_speed

        self.measuring = sglang_speed.Own(ours=False)

    def own(self) -> Any:
        """What the clocks say."""
        found, self.measuring = self.measuring.found(), None
        return found


def _watch(module: Any) -> None:
    inside = Inside()
    step, original = inside.step, module.Scheduler.get_next_batch_to_run

    @functools.wraps(original)
    def get_next_batch_to_run(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        # Newer releases answer with a plan.
        step(getattr(found, "batch_to_run", found))
        return found

    module.Scheduler.get_next_batch_to_run = get_next_batch_to_run

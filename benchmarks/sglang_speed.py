"""What observing SGLang costs, measured in its scheduler: steps/s with the hooks and without, and what each hook takes.

Used by sglang_inside.py, which is in the process of the scheduler.
"""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from typing import Any

from clocks import Clocks, interval

import graphprobe
from graphprobe_sglang import HOOKS, PATCHES

BATCH, BLOCK, UNTIMED, SKIPPED = 16, 48, 16, 20
"""Requests, steps per block, steps before each, and steps at the start of a generation that belong to none.

After a class has got or lost a hook CPython looks its attributes up slowly for a while: that is what is not timed.
"""

ONCE = "batch"
"""A hook that is taken away after the first pass: placed at each turn it would be measured as it never is."""

REPLAY = ("replay", "torch.cuda.graphs", "CUDAGraph.replay")
"""Where launches are counted, which is no hook."""

PLACES = (*((hook.name, hook.module, hook.attribute) for hook in HOOKS), REPLAY)


class Blocks:
    """Steps of a full batch in short blocks, by turns with the hooks and without (on, off, off, on).

    A block is so short that the host's speed is the same in its neighbour. The exporter writes every 2 s of time with
    the hooks, as it would by itself, and never without them.
    """

    def __init__(self) -> None:
        _steady()
        self.seconds: dict[str, list[float]] = {"on": [], "off": []}
        self._exporter = graphprobe.start_exporter(None, directory=tempfile.mkdtemp(), interval=86_400)
        self._writes = self._generations = 0
        self._writer: threading.Thread | None = None
        self._steps = self._block = 0
        self._began = 0.0
        self._on = True

    def generation(self) -> None:
        """The steps from now on are those of a new one."""
        self._generations += 1
        self._steps = self._block = 0

    def step(self, batch: Any) -> None:
        """A step begins."""
        if not batch.forward_mode.is_decode() or batch.batch_size() != BATCH:
            return
        place = (self._steps - SKIPPED) % (BLOCK + UNTIMED)
        if self._steps >= SKIPPED and place == 0:
            if self._steps > SKIPPED:
                self._end()
            self._turn()
        elif self._steps > SKIPPED and place == UNTIMED:
            self._begin()
        self._steps += 1

    def _turn(self) -> None:
        self._on = (self._block + self._block // 2 + self._generations) % 2 == 0
        self._block += 1
        (graphprobe.instrument if self._on else graphprobe.uninstrument)("sglang")

    def _begin(self) -> None:
        due = self._on and sum(self.seconds["on"]) >= 2 * self._writes
        self._writer = threading.Thread(target=self._exporter.flush) if due else None
        self._writes += due
        self._began = time.perf_counter()
        if self._writer is not None:
            self._writer.start()

    def _end(self) -> None:
        self.seconds["on" if self._on else "off"].append(time.perf_counter() - self._began)
        if self._writer is not None:
            self._writer.join()

    def found(self) -> dict[str, Any]:
        """What came out, in JSON's types."""
        graphprobe.instrument("sglang")
        self._exporter.close()
        pairs = list(zip(self.seconds["on"], self.seconds["off"], strict=False))
        ratios = sorted(off / on for on, off in pairs)
        more = sorted((on - off) / BLOCK for on, off in pairs)
        low, high = interval(len(pairs))
        tokens = BATCH * BLOCK * len(pairs)
        return {
            "blocks": len(pairs),
            "steps per block": BLOCK,
            "batch": BATCH,
            "writes of the exporter": self._writes,
            "tokens/s on": tokens / sum(on for on, _ in pairs),
            "tokens/s off": tokens / sum(off for _, off in pairs),
            "on / off": statistics.median(ratios),
            "on / off, 95 % interval of the median": [ratios[low], ratios[high]],
            "us per step more": 1e6 * statistics.median(more),
            "us per step more, 95 % interval of the median": [1e6 * more[low], 1e6 * more[high]],
            "us per step off": 1e6 * statistics.median(off for _, off in pairs) / BLOCK,
        }


def _steady() -> None:
    PATCHES._hooks = tuple(hook for hook in HOOKS if hook.name != ONCE)


class Own:
    """Microseconds per step that each hook takes; with ``ours`` false, what the clocks take of it by themselves."""

    def __init__(self, *, ours: bool) -> None:
        _steady()
        self._clocks = Clocks(PLACES)
        self._steps = 0
        graphprobe.uninstrument("sglang")
        self._clocks.put(self._clocks.inside)
        if ours:
            graphprobe.instrument("sglang")
        self._clocks.put(self._clocks.outside)

    def step(self, batch: Any) -> None:
        """A step begins."""
        self._steps += 1

    def generation(self) -> None:
        """All steps count."""

    def found(self) -> dict[str, float]:
        """Take the clocks off."""
        self._clocks.take_off()
        graphprobe.uninstrument("sglang")
        self._clocks.take_off()
        graphprobe.instrument("sglang")
        return {name: spent / 1e3 for name, spent in self._clocks.spent(max(1, self._steps)).items()}

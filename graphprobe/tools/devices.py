"""What a trace holds of several devices, and the timeline of the one that did most."""

from __future__ import annotations

from dataclasses import dataclass, field

from graphprobe.errors import SourceError
from graphprobe.tools.findings import short
from graphprobe.tools.timeline import NODES, Mark, Timeline, Work

RECORD = "record work of a GPU: torch.profiler with ProfilerActivity.CUDA, or nsys profile --trace=cuda"


@dataclass(slots=True)
class Trace:
    """The work in a trace by device, and the host's ranges; ``notes`` are one sentence each."""

    devices: dict[str, list[Work]] = field(default_factory=dict)
    marks: list[Mark] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def timeline(self, name: str) -> Timeline:
        """The device with most kernels; SourceError, with the ``name`` of the trace, where none has any."""
        kernels = {device: sum(work.kind == "kernel" for work in works) for device, works in self.devices.items()}
        device = max(kernels, key=lambda key: (kernels[key], len(self.devices[key])), default="")
        if not kernels.get(device):
            raise SourceError(f"{name}: {self._nothing()}{''.join(f'; {note}' for note in self.notes)}")
        works, told = _once(self.devices[device])
        others = ", ".join(f"{short(key, 40)} ({kernels[key]:,})" for key in kernels if key != device)
        if others:
            told.insert(0, f"shown is {short(device, 40)}, with {kernels[device]:,} kernels; others: {others}")
        return Timeline(tuple(works), (*self.notes, *told), tuple(self.marks))

    def _nothing(self) -> str:
        works = [work for each in self.devices.values() for work in each]
        graphs = sum(work.kind == "graph" for work in works)
        if graphs:
            return f"graph launches are recorded as a whole ({graphs:,}), and no kernel. hint: {NODES}"
        if works:
            return f"copies and fills of a device ({len(works):,}), but no kernel. hint: record a whole step"
        return f"a trace without work of a device. hint: {RECORD}"


def _once(works: list[Work]) -> tuple[list[Work], list[str]]:
    """The works without repetition, as traces that were merged have it.

    Work of no length may be there twice: whole microseconds make equals of short kernels.
    """
    kept: list[Work] = []
    seen: set[Work] = set()
    for work in works:
        if work.end_us == work.start_us or work not in seen:
            kept.append(work)
            seen.add(work)
    twice = len(works) - len(kept)
    return kept, [f"work that was there twice counts once: {twice:,}"] if twice else []

"""What a demo hands back, and how it fails."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from graphprobe.errors import GraphprobeError
from graphprobe.snapshot import Snapshot


class DemoError(GraphprobeError, RuntimeError):
    """The demo cannot run here, or its identity check failed; ``result`` holds what there is by then."""

    def __init__(self, what: str, result: DemoResult | None = None) -> None:
        super().__init__(what)
        self.result = result


@dataclass(frozen=True, slots=True)
class Answer:
    """One request: its prompt, the generated text, and the token ids behind it (the stop token included)."""

    prompt: str
    text: str
    tokens: tuple[int, ...]
    finished: bool
    """Whether the model ended the answer itself, rather than the token limit."""


@dataclass(frozen=True, slots=True)
class DemoResult:
    """What happened: ``snapshot`` counts this run only, ``identical`` is None where nothing was compared."""

    model: str
    device: str
    backend: str
    pad: bool
    buckets: tuple[int, ...]
    answers: tuple[Answer, ...]
    batch_sizes: tuple[int, ...]
    """The batch size of each decode step, in order."""
    snapshot: Snapshot
    hit_rate: float | None
    identical: bool | None
    advice: str
    metrics_url: str
    metrics: tuple[str, ...]
    """Lines that ``/metrics`` answered while requests were served."""
    seconds: dict[str, float]
    """Wall time of each part: load, warmup, graphs, eager."""

    def to_json(self) -> str:
        """Everything above as one JSON object; ``snapshot`` in its own JSON form."""
        data = asdict(self) | {"snapshot": json.loads(self.snapshot.to_json())}
        return json.dumps(data, indent=2)

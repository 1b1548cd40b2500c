"""A continuous-batching loop: requests come and go between decode steps, and with them the batch size.

What happens in which step depends on the requests alone, never on the clock, so a second run meets the same batches.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from graphprobe.buckets import Buckets
from graphprobe.demo.llama import Llama

Decode = Callable[[Tensor, Tensor, Tensor], Tensor]
"""``(input_ids [batch], positions [batch], slots [batch]) -> next tokens [batch]``."""


PAD = {"input_ids": 0, "positions": 0}
"""What a pad row holds; its slot is the scratch slot, so no request's keys are written."""


@dataclass(eq=False, slots=True)
class Request:
    """One prompt, from its arrival (in steps) to its last token. ``slot`` is its place in the cache."""

    prompt: str
    ids: list[int]
    arrives: int
    limit: int
    slot: int = -1
    tokens: list[int] = field(default_factory=list)

    @property
    def position(self) -> int:
        """Where its newest token stands."""
        return len(self.ids) + len(self.tokens) - 1

    def fresh(self) -> Request:
        """The same request, not served yet."""
        return Request(self.prompt, self.ids, self.arrives, self.limit)


@dataclass(frozen=True, slots=True)
class Moment:
    """Where a run is after a step."""

    step: int
    batch: int
    answered: int


PROMPTS = (
    "What is the capital of France?",
    "What is tea?",
    "Name three fruits.",
    "What is bread made of?",
    "Write one sentence about the sea.",
    "What is the capital of Japan?",
    "What gas do plants absorb?",
    "What is an island?",
    "What is the opposite of hot?",
    "What does a doctor do?",
    "Tell me a fun fact about cats.",
    "What is a river?",
    "What is the capital of Italy?",
    "What is the sun?",
    "What is a good name for a dog?",
    "What is water made of?",
    "What is snow?",
    "What is a friend?",
    "What does a thermometer measure?",
    "What is the capital of Spain?",
    "What is a bicycle?",
    "What color is the sky on a clear day?",
    "What is a computer?",
    "How do birds fly?",
)
"""With the seed below their answers take every batch size from 1 to 16 through the engine."""

SEED = 1


def traffic(count: int, max_new_tokens: int, encode: Callable[[str], list[int]], natural: bool) -> list[Request]:
    """``count`` requests in order of arrival. Where no answer ends of itself (not ``natural``), the limits differ."""
    rng, step, requests = random.Random(SEED), 0, []
    limits = random.Random(SEED)
    for number in range(count):
        prompt = PROMPTS[number % len(PROMPTS)]
        limit = max_new_tokens if natural else limits.randint(max(2, max_new_tokens // 4 + 1), max_new_tokens)
        requests.append(Request(prompt, encode(prompt), step, limit))
        step += rng.choice((0, 0, 1, 1, 2, 3))
    return requests


def decode_with(model: Llama) -> Decode:
    """The decode step of ``model``: what a graph holds."""

    def decode(input_ids: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        next_tokens: Tensor = model(input_ids[:, None], positions[:, None], slots)
        return next_tokens

    return decode


class Engine:
    """Serves requests with greedy decoding. With ``pad_to`` it fills each batch up to a bucket itself."""

    def __init__(self, model: Llama, decode: Decode, stop: int | None, pad_to: Buckets | None = None) -> None:
        assert model.cache is not None, "allocate() first"
        self.model, self.decode, self.stop, self.pad_to = model, decode, stop, pad_to
        self.scratch, self.device = model.cache.scratch, model.cache.keys.device
        self.free = list(range(self.scratch))
        self.active: list[Request] = []
        self.answered = 0
        self.batch_sizes: list[int] = []
        self.seconds = 0.0
        """Wall time of the decode steps."""

    def serve(self, requests: Iterable[Request], watch: Callable[[Moment], None] = lambda moment: None) -> None:
        """Answer ``requests`` (in order of arrival); ``watch`` is told after each step."""
        waiting, step = deque(requests), 0
        while waiting or self.active:
            while waiting and self.free and waiting[0].arrives <= step:
                self._prefill(waiting.popleft())
            batch = len(self.active)
            if batch:
                self._step()
            step += 1
            watch(Moment(step, batch, self.answered))

    def _prefill(self, request: Request) -> None:
        request.slot = self.free.pop(0)
        ids, positions = self._tensor([request.ids]), self._tensor([range(len(request.ids))])
        request.tokens += self.model(ids, positions, self._tensor([request.slot])).tolist()
        self.active.append(request)
        self._retire()

    def _step(self) -> None:
        start = time.perf_counter()
        self.batch_sizes.append(len(self.active))
        rows = [(request.tokens[-1], request.position, request.slot) for request in self.active]
        rows += [(PAD["input_ids"], PAD["positions"], self.scratch)] * self._padding(len(rows))
        next_tokens = self.decode(*(self._tensor(column) for column in zip(*rows, strict=True))).tolist()
        for request, token in zip(self.active, next_tokens, strict=False):
            request.tokens.append(token)
        self._retire()
        self.seconds += time.perf_counter() - start

    def _padding(self, size: int) -> int:
        bucket = self.pad_to.select(size) if self.pad_to else None
        return bucket - size if bucket else 0

    def _retire(self) -> None:
        for request in [r for r in self.active if r.tokens[-1] == self.stop or len(r.tokens) >= r.limit]:
            self.active.remove(request)
            self.free.append(request.slot)
            self.answered += 1

    def _tensor(self, values: Sequence[object]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self.device)

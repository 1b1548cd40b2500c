"""Engines and steps of vLLM that tests drive, as data: for the process that imports vLLM and the one that starts it."""

from __future__ import annotations

from dataclasses import dataclass

DECODE = "d"
"""A request that has answered before, with one token to compute."""

VERIFY = "v"
"""The same with speculative tokens behind it."""

PREFILL = "p"
"""A new request's prompt."""


@dataclass(frozen=True)
class Setup:
    """One engine: what an operator would set, and what its model is."""

    requests: int = 8
    spec: int = 0
    mode: str = "FULL_AND_PIECEWISE"
    sizes: tuple[int, ...] | None = None
    limit: int | None = None
    adapters: int = 0
    specialize: bool = True
    encoder: bool = False
    breakable: bool = False
    peer: tuple[int, str] | None = None
    """Tokens and mode of the other rank of data parallelism."""


@dataclass(frozen=True)
class Step:
    """What the scheduler hands to a worker once: requests as kind and tokens (``v4``), active adapters, and images."""

    batch: tuple[str, ...]
    adapters: int = 0
    images: int = 0


def step(text: str, adapters: int = 0, images: int = 0) -> Step:
    """``3d1`` are three decodes of one token, ``2v4 p150`` two verified drafts of three and a prompt."""
    batch: list[str] = []
    for word in text.split():
        number, kind, tokens = "", "", ""
        for letter in word:
            if letter.isalpha():
                kind = letter
            elif kind:
                tokens += letter
            else:
                number += letter
        batch += [kind + tokens] * int(number or 1)
    return Step(tuple(batch), adapters, images)


@dataclass(frozen=True)
class Case:
    """Steps of one engine, and the rows that are counted; ``before`` a version other ones, as (version, rows)."""

    name: str
    runners: tuple[str, ...]
    setup: Setup
    steps: tuple[Step, ...]
    rows: tuple[str, ...]
    before: tuple[str, tuple[str, ...]] | None = None
    drafter: tuple[str, ...] = ()
    """The rows of a drafter, which runs after each step where there are any."""

    def expected(self, version: str) -> list[str]:
        """The rows in this release, sorted."""
        if self.before and _numbers(version) < _numbers(self.before[0]):
            return sorted(self.before[1])
        return sorted(self.rows)


@dataclass(frozen=True)
class Coverage:
    """How many decode steps of an engine have no full graph, and words of the warning."""

    name: str
    runners: tuple[str, ...]
    setup: Setup
    uncovered: int
    says: tuple[str, ...] = ()
    before: tuple[str, int] | None = None
    refused: str = ""
    """vLLM does not start, with this message."""

    def expected(self, version: str) -> int:
        """The number in this release."""
        return self.before[1] if self.before and _numbers(version) < _numbers(self.before[0]) else self.uncovered


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))

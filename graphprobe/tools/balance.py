"""The result of an account: what a step takes eagerly and as a graph, split into its parts, and what follows of that.

All times are seconds. A figure that was not measured is None, never 0.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

from graphprobe.errors import ConfigError, SourceError
from graphprobe.tools import forecast, reckoning, sheet
from graphprobe.tools.forecast import Expected
from graphprobe.tools.memory import Bill
from graphprobe.tools.parts import Prefill as Prefill
from graphprobe.tools.parts import Step as Step
from graphprobe.tools.parts import check, over
from graphprobe.tools.reckoning import Verdict

Kind = TypeVar("Kind", "Account", "Step", "Prefill")

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Account:
    """What one forward takes on one device.

    ``bandwidth`` are bytes per second measured by copying, read and written together, ``datasheet`` those that the card
    promises. ``per_kernel`` is what a graph saves of the device's time per kernel, in seconds, known before anything
    was captured: by another model on this device, or published (None: by the table of ``forecast``). ``hit_rate`` is
    the share of calls that a graph serves. ``residual_bytes``, ``kv_token_bytes`` and ``kv_capacity`` are those of
    ``memory.Bill``. ConfigError for a figure that is none, and where there is nothing to judge.
    """

    name: str
    device: str
    steps: tuple[Step, ...] = ()
    bandwidth: float | None = None
    datasheet: float | None = None
    weight_bytes: int | None = None
    hit_rate: float | None = None
    prefill: Prefill | None = None
    per_kernel: float | None = None
    residual_bytes: int | None = None
    kv_token_bytes: float | None = None
    kv_capacity: int | None = None
    versions: Mapping[str, str] | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("name", "device"):
            if not isinstance(getattr(self, name), str):
                raise ConfigError(f"{name} must be text, got {getattr(self, name)!r}")
        named = self.versions or {}
        if not isinstance(named, Mapping) or not all(isinstance(text, str) for pair in named.items() for text in pair):
            raise ConfigError(f"versions must be texts by name, got {named!r}")
        if not (self.steps or self.prefill or self.hit_rate is not None):
            raise ConfigError("an account without a step, a prefill or a hit rate", "measure one batch size at least")
        batches = [step.batch for step in self.steps]
        if batches != sorted(set(batches)):
            raise ConfigError(f"steps must ascend by batch, each once, got {batches}")
        check(self, ("bandwidth", "datasheet", "weight_bytes"), least=1.0)
        check(self, ("per_kernel",), above=0.0)
        check(self, ("hit_rate",), least=0.0)
        if self.hit_rate is not None and self.hit_rate > 1:
            raise ConfigError(f"hit_rate must be a share from 0 to 1, got {self.hit_rate!r}", "61.4 % is 0.614")
        _ = self.bill

    def floor(self, step: Step) -> float | None:
        """Seconds below which no step falls: what it reads at the bandwidth measured, or else the datasheet's.

        Where it isn't known what a step reads, the weights alone are taken: the floor is then too low, not too high.
        """
        return over(step.bytes_read or self.weight_bytes, self.bandwidth or self.datasheet)

    def floor_share(self, step: Step) -> float | None:
        """The floor as a share of a replay, or of an eager step where none was measured."""
        return over(self.floor(step), step.graph or step.eager)

    def expected(self, kernels: int) -> Expected:
        """What the device saves with a graph of ``kernels`` kernels, before anything is captured."""
        return forecast.expected(kernels, self.device, self.per_kernel)

    def predicted_graph(self, step: Step) -> float | None:
        """Seconds of a replay, from what was measured eagerly; see ``forecast.predicted_graph``."""
        return forecast.predicted_graph(self, step)

    @property
    def bill(self) -> Bill:
        """What the graphs take of the memory."""
        grown = {step.batch: step.pool_bytes for step in self.steps if step.pool_bytes is not None}
        return Bill(grown, self.residual_bytes, self.kv_token_bytes, self.kv_capacity)

    @property
    def judged(self) -> Verdict:
        """What is to be done, why, and what comes after it."""
        return reckoning.judged(self)

    @property
    def verdict(self) -> str:
        """The same in words, on one line."""
        return str(self.judged)

    def as_dict(self) -> dict[str, Any]:
        """The fields, and what follows of them, for JSON."""
        steps = [{**asdict(step), **self._derived(step)} for step in self.steps]
        bill = self.bill.as_dict() if self.bill.grown else None
        return {**asdict(self), "steps": steps, "bill": bill, "verdict": self.judged._asdict()}

    def to_json(self) -> str:
        """One JSON object with the names used here."""
        return json.dumps({"schema": SCHEMA, **self.as_dict()}, allow_nan=False)

    @staticmethod
    def from_json(text: str | bytes) -> Account:
        """The account that ``to_json`` wrote; SourceError where ``text`` is something else."""
        try:
            data = json.loads(text)
            if data["schema"] != SCHEMA:
                raise SourceError(f"account schema {data['schema']!r}, this version reads {SCHEMA}")
            steps = tuple(_read(Step, step) for step in data.get("steps") or ())
            prefill = None if data.get("prefill") is None else _read(Prefill, data["prefill"])
            return _read(Account, {**data, "steps": steps, "prefill": prefill})
        except SourceError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise SourceError(f"not a graphprobe account: {type(error).__name__}: {error}") from error

    def __str__(self) -> str:
        """Plain ASCII: a table of the steps, what was found, and the verdict."""
        return sheet.text(self)

    def _derived(self, step: Step) -> dict[str, Any]:
        names = ("gain", "host_part", "device_part", "device_per_kernel", "launch_per_kernel", "compile_share")
        reckoned = {name: getattr(self, name)(step) for name in ("floor", "floor_share", "predicted_graph")}
        return {**{name: getattr(step, name) for name in names}, **reckoned}


def _read(kind: type[Kind], data: dict[str, Any]) -> Kind:
    given = {field.name: data[field.name] for field in fields(kind) if field.name in data}
    notes = given.get("notes") or ()
    if isinstance(notes, str) or not all(isinstance(note, str) for note in notes):
        raise ConfigError(f"notes must be a list of texts, got {notes!r}")
    return kind(**{**given, "notes": tuple(notes)})

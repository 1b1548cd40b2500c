"""A page of metrics: byte for byte what prometheus_client writes, without writing again what is the same every time.

Of a line everything but its value is. The client writes it once, in the format that was asked for, and that text is
kept with the line; a family that is not ours, and any format beyond the first few, is the client's alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from prometheus_client.core import Metric, Sample
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from graphprobe.unhurried import give_way, unhurried

Encoder = Callable[[Collector], bytes]

FORMATS = 24
"""Formats whose text is kept: a client may ask for any number of versions."""


class Line:
    """One line of a page but for its value: the name, the labels, and both as text in each format."""

    __slots__ = ("labels", "name", "starts")

    def __init__(self, name: str, labels: dict[str, str]) -> None:
        self.name = name
        self.labels = labels
        self.starts: dict[str, str] = {}


class Samples(list[Sample]):
    """Samples that give way to whoever serves, while the client writes them."""

    def __iter__(self) -> Iterator[Sample]:
        return unhurried(super().__iter__())


class Family(Metric):
    """A family of the client, of lines that are kept from scrape to scrape, and their values now."""

    def __init__(self, name: str, documentation: str, kind: str, unit: str) -> None:
        self.lines: list[Line] = []
        self.values: list[float] = []
        super().__init__(name, documentation, kind, unit)
        # Not the empty list that the client's constructor has set.
        self.others: list[Sample] | None = None
        """What somebody has put in the place of the samples."""

    def add(self, lines: Iterable[Line], values: Iterable[float]) -> None:
        """Add lines, and the value of each."""
        self.lines += lines
        self.values += values

    @property
    def samples(self) -> list[Sample]:
        """What the client reads, with labels of its own: whoever reads it may change them."""
        if self.others is not None:
            return self.others
        pairs = zip(self.lines, self.values, strict=True)
        return Samples(Sample(line.name, line.labels.copy(), value) for line, value in unhurried(pairs))

    @samples.setter
    def samples(self, samples: list[Sample]) -> None:
        self.others = samples

    def add_sample(self, *args: Any, **kwargs: Any) -> None:
        """Add one as the client does; from then on the family is written by the client."""
        self.samples = list(self.samples)
        super().add_sample(*args, **kwargs)


class _Only(Collector):
    def __init__(self, *families: Metric) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families


class Writer:
    """Writes in one format: the encoder of the client, and a name for what it writes."""

    def __init__(self, encoder: Encoder, form: str) -> None:
        self._encoder = encoder
        self._form = form
        self._end = encoder(_Only()).decode()
        self._heads: dict[str, str] = {}

    def page(self, registry: Collector) -> bytes:
        """All of a registry."""
        parts: list[str] = []
        for family in registry.collect():
            give_way()
            ours = isinstance(family, Family) and family.others is None
            parts += self._known(family) if ours else [self._text(family)]  # type: ignore[arg-type]
        return "".join([*parts, self._end]).encode()

    def _text(self, family: Metric) -> str:
        return self._encoder(_Only(family)).decode().removesuffix(self._end)

    def _known(self, family: Family) -> list[str]:
        """The client's text of a family, from what is kept of it."""
        form = self._form
        if family.name not in self._heads or any(form not in line.starts for line in family.lines):
            return [self._learn(family)]
        pairs = unhurried(zip(family.lines, family.values, strict=True))
        lines = [f"{line.starts[form]} {floatToGoString(value)}\n" for line, value in pairs]  # type: ignore[no-untyped-call]
        return [self._heads[family.name], *lines]

    def _learn(self, family: Family) -> str:
        """The client's text, of which the start of each line is kept."""
        text = self._text(family)
        rows = text.split("\n")[:-1]
        heads = [f"{row}\n" for row in rows if row.startswith("#")]
        if len(rows) == len(heads) + len(family.lines):
            for line, row in zip(family.lines, unhurried(rows[len(heads) :]), strict=True):
                line.starts[self._form] = row.rpartition(" ")[0]
            self._heads[family.name] = "".join(heads)
        return text

"""A day in the order of its decode steps, and how long its batch size stays alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy

from graphprobe.tools.arrivals import Request
from graphprobe.tools.simulate import Seconds, _Engine, _Steps


@dataclass(slots=True)
class _Watched(_Engine):
    """The engine of the simulator, which keeps its batch sizes in order."""

    seen: list[int] = field(default_factory=list)

    def _decode(self) -> None:
        batch, before = len(self.running), self.step
        _Engine._decode(self)
        self.seen += [batch] * (self.step - before)


def sizes(requests: Iterable[Request], graph: Seconds, *, max_batch: int, prefill: Seconds | None = None) -> list[int]:
    """The batch size of each decode step, in order, by an engine with a graph of every size."""
    queue = sorted(requests, key=lambda request: request.arrival)
    steps = _Steps(tuple(range(1, max_batch + 1)), graph, graph, True, 1)
    engine = _Watched(queue, steps, max_batch, 1.0, prefill)
    engine.run()
    return engine.seen


def pieces(every: Sequence[int], steps: int, number: int) -> list[int]:
    """``steps`` of the steps: so many pieces, evenly from the first to the last, each in its order."""
    each = -(-steps // number)
    if len(every) <= each * number:
        return list(every[:steps])
    starts = [(len(every) - each) * piece // max(1, number - 1) for piece in range(number)]
    return [size for start in starts for size in every[start : start + each]][:steps]


def autocorrelation_time(values: Sequence[float], window: float = 5.0) -> float:
    """Steps of a series that count as one independent observation of its mean: the integrated autocorrelation time.

    1 + 2 * (the sum of the autocorrelations up to lag m), with the smallest m of at least ``window`` times the result.
    Source: Sokal, "Monte Carlo Methods in Statistical Mechanics: Foundations and New Algorithms", in: Functional
    Integration, Plenum 1997, section 3.
    """
    series = numpy.asarray(values, dtype=float) - numpy.mean(values)
    # Twice as long, so that the end does not meet the beginning.
    power = numpy.abs(numpy.fft.rfft(series, 2 * len(series))) ** 2
    correlation = numpy.fft.irfft(power)[: len(series)]
    times = 2 * numpy.cumsum(correlation / correlation[0]) - 1
    enough = numpy.arange(len(series)) >= window * times
    return float(times[numpy.argmax(enough)] if enough.any() else times[-1])

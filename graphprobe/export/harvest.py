"""What every route sends: the samples of a ledger now, and the labels that all of its series have."""

from __future__ import annotations

import logging

from graphprobe import metrics
from graphprobe.errors import internal_error
from graphprobe.ledger import LEDGER, Ledger
from graphprobe.snapshot import Snapshot

logger = logging.getLogger("graphprobe")


class Harvest:
    """Reads a ledger for one route. The labels of the environment are read once, when it is made.

    ``rank`` is the label of a process whose rank is unknown: where RANK is not set and torch.distributed is not
    initialised; empty for none. It is decided with the first count that is read, since a series whose labels changed
    later would fall to nothing, and be born above 0.
    """

    def __init__(self, ledger: Ledger | None = None, where: str = "export", rank: str = "") -> None:
        self.ledger = LEDGER if ledger is None else ledger
        self.where = where
        self._rank = rank
        self._constant = metrics.constant_labels()
        self._settled = "rank" in self._constant
        self._folds: dict[str, int] = {}
        self._memory: metrics.Memory = {}
        self._own: dict[tuple[metrics.Metric | str, ...], metrics.Series] = {}
        self.snapshot = Snapshot()
        """What the last look at the samples has seen."""

    def constant(self) -> dict[str, str]:
        """The labels of all series, as of the last look at the samples."""
        return self._constant

    def _settle(self, snapshot: Snapshot) -> None:
        rank = metrics.rank_of_group() or self._rank
        if rank:
            self._constant = {**self._constant, "rank": rank}
            # What was made of its series had other labels.
            self._memory, self._own = {}, {}
        self._settled = snapshot.counted

    def samples(self) -> list[metrics.Sample]:
        """All samples, without the constant labels. A forward that cannot be read is counted and left out."""
        snapshot = self.snapshot = self.ledger.snapshot()
        if not self._settled:
            self._settle(snapshot)
        found: list[metrics.Sample] = []
        folds = 0
        for name, forward in snapshot.forwards.items():
            try:
                samples, folded = metrics.forward_samples(forward, self._memory)
            except Exception as error:
                internal_error(self.where, error)
                continue
            self._say(name, folded, metrics.limit(forward.source))
            folds += folded
            found += samples
        own = self._own
        for series, value in metrics.process_samples(snapshot, folds):
            known = own.setdefault((series.metric, *series.labels.values()), series)
            found.append(metrics.Sample(known, value))
        return found

    def _say(self, name: str, folds: int, limit: int) -> None:
        if folds > self._folds.get(name, 0):
            self._folds[name] = folds
            text = "%s: more than %d label sets; its labels are folded, step %d (counts stay exact, see the snapshot)"
            logger.warning(text, name, limit, folds)

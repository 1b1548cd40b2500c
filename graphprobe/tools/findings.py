"""What can be wrong with a page of metrics, as one table, and the findings that name its rows."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import NamedTuple

from graphprobe.tools.table import literal

MANY = 5
"""Findings of one kind that are told one by one; the others are counted."""

KINDS = 100
"""Most kinds of findings on one page."""


class Rule(NamedTuple):
    """What a finding says. An error breaks the contract; a warning is allowed, and most likely not intended."""

    severity: str
    meaning: str


def _error(meaning: str) -> Rule:
    return Rule("error", meaning)


def _warning(meaning: str) -> Rule:
    return Rule("warning", meaning)


RULES: dict[str, Rule] = {
    "content-type": _error("Prometheus does not read pages of this content type, or the page is of another one"),
    "encoding": _error("the page is no UTF-8, or binary"),
    "syntax": _error("a line that Prometheus cannot read: it refuses the whole page for one"),
    "openmetrics": _error("the page is OpenMetrics and breaks a rule of it"),
    "openmetrics-elsewhere": _warning("another metric breaks a rule of OpenMetrics; some readers refuse the page"),
    "too-long": _error("the page is far longer than one of metrics is, and was not read to its end"),
    "no-metric": _error("no metric of the contract is on the page"),
    "metadata": _error("the lines of a metric do not stand together, or its metadata comes twice or after samples"),
    "type": _error("a metric has no type, or another one"),
    "help": _warning("a metric has no help text"),
    "unit": _error("a metric declares another unit"),
    "timestamp": _warning("a sample has a time of its own: what is gone then stays visible for minutes"),
    "unknown-metric": _error("the prefix `graphprobe_` on a name that the contract does not have"),
    "unknown-label": _error("a label that the metric does not have"),
    "missing-label": _error("a label of the metric is missing or empty"),
    "label-on-some": _error("a label of your own (`rank`, ...) is on most series, but not on all"),
    "unknown-word": _error("a label has a value that is not in its closed list"),
    "own-word": _warning("a phase or unit that is allowed, but that no dashboard knows"),
    "batch-size": _error("a batch size that is written in another way, or above its bucket"),
    "bucket": _error("a bucket, or the list of them, that is written in another way"),
    "unlisted-bucket": _warning("a bucket with calls that its forward does not list: its series are not born at 0"),
    "value": _error("a value that the metric cannot have: NaN, negative, half a call, ..."),
    "padding": _warning("the padding is not what the calls explain: it is the rows added, not the padded total"),
    "duplicate": _error("a series, or an info of one thing, twice"),
    "histogram": _error("a histogram that is not cumulative, not whole, or has no `+Inf`"),
    "bounds": _error("series of one histogram have different bounds"),
    "unbounded": _error("more label sets than a forward may have, or a label with a value per request"),
    "many-forwards": _warning("more forwards than a model has: the name may hold a request, a layer or an instance"),
    "contract": _error("the page keeps another version of the contract"),
    "missing": _error("a series that must exist is missing"),
    "no-zero": _error("a series that must exist at 0 from the start is missing"),
    "no-forward": _warning("nothing was captured or counted yet, so there is little to look at"),
    "ended": _warning("a process has ended, or exports no gauge and no info: its counters may stay"),
    "hook": _warning("a hook into an engine found nothing to hook: what it would see is not counted"),
    "internal-error": _warning("graphprobe failed at something: the call ran eagerly, and the log has the cause"),
    "engine-silent": _warning("an engine counts iterations or launches graphs, and none of its steps is counted here"),
    "engine-launches": _warning("calls were counted as graph calls, and no graph was launched in them"),
    "engine-steps": _warning("an engine's own count of iterations does not explain the steps that are counted here"),
    "fell": _error("a counter went down between the two reads"),
    "gone": _error("a series of a counter vanished between the two reads"),
    "second-read": _error("the page could not be read a second time"),
}
"""Name -> what it says. The names are those of ``Finding.rule``, and stay."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it must be. ``rule`` is a name of RULES; ``metric`` is empty for the page."""

    severity: str
    rule: str
    metric: str
    what: str
    hint: str

    @property
    def kind(self) -> tuple[str, str, str]:
        """What findings that differ in nothing but ``what`` have in common."""
        return (self.rule, self.metric, self.hint)


class Findings:
    """Collects findings; of those that differ in nothing but ``what``, the first few, and how many more there are."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[str, str, str], list[str]] = {}
        self._more: dict[tuple[str, str, str], int] = {}
        self._near: dict[tuple[str, tuple[str, ...]], str] = {}

    def add(self, rule: str, metric: str, what: str, hint: str) -> None:
        """Tell ``what`` is wrong with ``metric``, by a rule of RULES, and in ``hint`` what to write instead."""
        key = (rule, short(metric), hint)
        if key not in self._kinds and len(self._kinds) >= KINDS:
            key = (rule, "", "mend the others first")
        told = self._kinds.setdefault(key, [])
        if what in told:
            return
        if len(told) < MANY:
            told.append(what)
        else:
            self._more[key] = self._more.get(key, 0) + 1

    def near(self, value: str, words: tuple[str, ...]) -> str:
        """The word that ``value`` is most like, or nothing; looked for a few times only, since it takes long."""
        key = (value, words)
        if key not in self._near and len(self._near) < KINDS:
            # FULL and NoExactBucket are how other languages spell full and no_exact_bucket.
            snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[-. ]", "_", value[:100]).lower()
            self._near[key] = next(iter(difflib.get_close_matches(snake, words, 1)), "")
        return self._near.get(key, "")

    @property
    def failed(self) -> bool:
        """Whether there is an error."""
        return any(RULES[rule].severity == "error" for rule, _, _ in self._kinds)

    def all(self) -> tuple[Finding, ...]:
        """Every finding, errors first, in the order in which they were made."""
        found = []
        for key, told in self._kinds.items():
            rule, metric, hint = key
            more = [f"and {self._more[key]:,} more like these"] if key in self._more else []
            found += [Finding(RULES[rule].severity, rule, metric, what, hint) for what in (*told, *more)]
        return tuple(sorted(found, key=lambda finding: finding.severity))


def short(text: object, length: int = 100) -> str:
    """``text`` on one printable line of at most ``length`` characters."""
    plain = literal(str(text)[: length + 1])
    return plain if len(plain) <= length else f"{plain[: length - 3]}..."

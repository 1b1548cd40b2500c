"""A Prometheus server and a window of time -> the snapshot of that window, and those of its parts.

Counters are read as ``increase()``, so a restart inside the window does no harm, and what was counted before it is not
seen. What a series had counted when it was scraped first is not seen either.
"""

from __future__ import annotations

import http.client
import json
import math
import time
import urllib.error
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, NamedTuple
from urllib.parse import urlencode, urlunsplit

from graphprobe import metrics
from graphprobe.buckets import as_size
from graphprobe.errors import ConfigError, SourceError
from graphprobe.metrics import Metric
from graphprobe.snapshot import Snapshot
from graphprobe.tools.fetch import seconds
from graphprobe.tools.findings import short
from graphprobe.tools.infos import newest
from graphprobe.tools.rebuild import rebuild, refused_if_folded
from graphprobe.tools.series import Series
from graphprobe.tools.web import Wanted, ask, http_url, opener, read_all

MAX_BYTES = 64 << 20
"""Longest answer to one query."""

PARTS = 1000
"""Most parts of a window; Prometheus answers a query with at most 11,000 points of a series."""

LONGEST = 10 * 365 * 86_400.0
"""Longest window, in seconds."""

LOOKS = 200
"""Looks at an info in a part."""

SCRAPES = 4
"""Fewest scrapes in a part: increase() of two or three would guess much of it."""

AHEAD = 60.0
"""Seconds that the clock of the server may be ahead of ours."""

CALLS = f'__name__=~"{metrics.GRAPH_CALLS.name}|{metrics.EAGER_CALLS.name}"'
COUNTERS, GAUGES = (tuple(one for one in metrics.CATALOGUE if one.kind == kind) for kind in ("counter", "gauge"))

WANTED = Wanted(
    "application/json",
    "a page of metrics",
    "with a window of time, give the address of a Prometheus server, as http://HOST:9090; an exporter has no history",
    "is it up, and is this the address of Prometheus, as http://HOST:9090?",
)


@dataclass(frozen=True, slots=True)
class Span:
    """A window of time: ``parts`` steps of ``step`` milliseconds, the last of which ends at ``end``, in them, too."""

    end: int
    step: int
    parts: int

    @property
    def start(self) -> int:
        """When the first step ends."""
        return self.end - self.step * (self.parts - 1)

    def divided(self, parts: int) -> Span:
        """The same window in another number of parts."""
        return Span(self.end, math.ceil(self.step * self.parts / parts), parts)

    def __str__(self) -> str:
        ends = (self.start - self.step, self.end)
        return (
            " to ".join(f"{datetime.fromtimestamp(at / 1000, timezone.utc):%Y-%m-%d %H:%M:%S}" for at in ends) + " UTC"
        )


def span(window: float, end: float | None, parts: int) -> Span:
    """The window of ``window`` seconds up to ``end`` (None: now); ConfigError where there is no such window."""
    if as_size(parts, "parts") > PARTS:
        raise ConfigError(f"parts must be at most {PARTS}, got {parts}", "each part is one snapshot")
    if not _number(window) or not 1 <= window <= LONGEST:
        raise ConfigError(f"a window is in seconds, at least 1 and at most ten years, got {window!r}")
    now = time.time()
    last = now if end is None else end
    if not _number(last) or not window <= last <= now + AHEAD:
        raise ConfigError(f"end must be a time of the past, in seconds of the epoch, got {end!r}")
    return Span(int(last * 1000), math.ceil(window * 1000), 1).divided(parts)


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


class History(NamedTuple):
    """The snapshot of a window, those of its parts, and what their reader must know."""

    snapshot: Snapshot
    windows: tuple[Snapshot, ...]
    notes: tuple[str, ...]
    processes: Mapping[str, int]


def read(url: str, asked: Span, match: str, timeout: float) -> History:
    """What the server at ``url`` has of that window. ``match`` selects series, as ``job="vllm",instance=~"gpu1.*"``.

    ``timeout`` in seconds is for each of its answers. SourceError where it gives none, or has nothing of the window.
    """
    server = _Server(url, match, timeout)
    seen = server.scraped(asked)
    infos = list(server.series(seen, (metrics.FORWARD_INFO,)))
    whole = [one for _, one in server.series(seen.divided(1), (*COUNTERS, *GAUGES))]
    today, processes = server.infos(seen)
    rebuilt = refused_if_folded(rebuild([*whole, *today]), short(url))
    parts: list[list[Series]] = [[] for _ in range(seen.parts)]
    for part, one in (*infos, *server.series(seen, COUNTERS)):
        parts[part].append(one)
    windows = tuple(rebuild(part).snapshot for part in parts)
    notes = (*server.notes(seen, asked, max(processes.values(), default=0)), *rebuilt.notes)
    return History(rebuilt.snapshot, windows, notes, processes)


class _Server:
    """The HTTP API of one server, asked for the series that ``match`` selects."""

    def __init__(self, url: str, match: str, timeout: float) -> None:
        parts = http_url(url, "http://HOST:9090")
        path = parts.path.rstrip("/").removesuffix("/graph").removesuffix("/query")
        self.url, self.timeout = url, seconds(timeout, "timeout")
        self._address = parts._replace(path=f"{path}/api/v1/query_range", fragment="")
        self._match = match.strip().removeprefix("{").removesuffix("}").strip(" ,")
        self._warnings: dict[str, None] = {}

    def scraped(self, asked: Span) -> Span:
        """The window, in as many of the parts as have enough scrapes; SourceError where it has none."""
        seen, scrapes = asked, self._scrapes(asked)
        while scrapes < SCRAPES and seen.parts > 1:
            seen = seen.divided(seen.parts // 2)
            scrapes = self._scrapes(seen)
        if scrapes < 2:
            what = "only one scrape" if scrapes else "no series of graphprobe's calls"
            of = f" that match {{{short(self._match)}}}" if self._match else ""
            hint = "take a longer window" if scrapes else "is the engine scraped, and are match, window and end right?"
            raise SourceError(f"{short(self.url)}: {what}{of} from {asked}. hint: {hint}")
        return seen

    def series(self, at: Span, wanted: Iterable[Metric]) -> Iterator[tuple[int, Series]]:
        """Every part in which a series is, and its value there.

        Processes are summed, of a gauge it is the largest, and of an info how many have it. Comparing leaves NaN out.
        """
        for metric in wanted:
            read = "increase" if metric.kind == "counter" else "last_over_time"
            how = {"counter": "sum", "info": "count"}.get(metric.kind, "max")
            read = f"({read}({metric.name}{{{self._match}}}[{at.step}ms]) >= 0)"
            for labels, part, value in self._query(f"{how} by ({', '.join(metric.labels)}) {read}", at):
                known = {label: str(labels.get(label, "")) for label in metric.labels}
                yield part, Series(metric, "", known, (), value, known, frozenset())

    def infos(self, seen: Span) -> tuple[list[Series], dict[str, int]]:
        """Today's infos, each with how many processes have it, and how many have each forward."""
        of = f"timestamp({metrics.FORWARD_INFO.name}{{{self._match}}})[{seen.step}ms:{max(1000, seen.step // LOOKS)}ms]"
        return newest(self._query(f"max_over_time({of})", seen))

    def notes(self, seen: Span, asked: Span, processes: int) -> list[str]:
        """One sentence for each thing that a reader must know of the window, and of what the server has said."""
        told = (
            (True, f"counts are increase() of {seen}: rounded, and between scrapes guessed"),
            (seen.parts < asked.parts, f"{seen.parts} parts, not {asked.parts}: a part needs {SCRAPES} scrapes"),
            (processes > 1, f"{processes} processes are summed"),
        )
        return [*(note for happened, note in told if happened), *self._warnings]

    def _scrapes(self, at: Span) -> int:
        """How often the series that is scraped most often was, in a part."""
        selected = ",".join(filter(None, (CALLS, self._match)))
        found = self._query(f"max(count_over_time({{{selected}}}[{at.step}ms]))", at)
        return max((_whole(value) for _, _, value in found), default=0)

    def _query(self, query: str, at: Span) -> list[tuple[dict[str, Any], int, float]]:
        """Labels, part and value of each point."""
        times = {name: f"{ms / 1000:.3f}" for name, ms in (("start", at.start), ("end", at.end), ("step", at.step))}
        asked = filter(None, (self._address.query, urlencode({"query": query, **times})))
        answer = self._ask(urlunsplit(self._address._replace(query="&".join(asked))))
        try:
            self._warnings |= dict.fromkeys(f"Prometheus warns: {short(text)}" for text in answer.get("warnings") or ())
            points = ((one["metric"], *point) for one in answer["data"]["result"] for point in one["values"])
            found = [(dict(labels), round((ms * 1000 - at.start) / at.step), float(v)) for labels, ms, v in points]
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise self._strange() from error
        if any(not 0 <= part < at.parts for _, part, _ in found):
            raise self._strange()
        return found

    def _ask(self, url: str) -> Any:
        try:
            body = ask(url, WANTED, MAX_BYTES, self.timeout).body
        except SourceError as error:
            if isinstance(error.__cause__, urllib.error.HTTPError):
                self._refused(self._complaint(url))
            raise
        if len(body) > MAX_BYTES:
            what = f"an answer longer than {MAX_BYTES >> 20} MiB"
            raise SourceError(f"{short(self.url)}: {what}. hint: take fewer parts, or let match select fewer series")
        answer = _json(body)
        self._refused(answer)
        if not isinstance(answer, dict) or answer.get("status") != "success":
            raise self._strange()
        return answer

    def _complaint(self, url: str) -> Any:
        """What the server answers beside the status of an error."""
        try:
            with opener(url).open(url, timeout=self.timeout) as answer:
                return _json(read_all(answer.read, MAX_BYTES))
        except urllib.error.HTTPError as error:
            with error:
                return _json(read_all(error.read, MAX_BYTES))
        except (OSError, http.client.HTTPException):
            return None

    def _refused(self, answer: Any) -> None:
        if isinstance(answer, dict) and answer.get("status") == "error":
            hint = (
                'write match as job="vllm",instance=~"gpu.*"'
                if answer.get("errorType") == "bad_data"
                else "see its log"
            )
            raise SourceError(f"{short(self.url)}: Prometheus says: {short(answer.get('error'), 300)}. hint: {hint}")

    def _strange(self) -> SourceError:
        return SourceError(f"{short(self.url)}: no answer of Prometheus. hint: {WANTED.absent}")


def _whole(value: float) -> int:
    return round(value) if math.isfinite(value) else 0


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None

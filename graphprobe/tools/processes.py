"""The series of one process, and of a forward in it, together: what must be there, how much may be, what agrees.

And between two reads of a process: its counters only grow.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from graphprobe import metrics
from graphprobe.metrics import Metric
from graphprobe.observe import spans
from graphprobe.reasons import FallbackReason
from graphprobe.tools.findings import Findings, short
from graphprobe.tools.series import NUMBER, PID, Known, Process, Series, as_written

FORWARDS = 200
"""Most forwards that one process is expected to have."""

SLACK = 64
"""Calls that may come between the reads of two counters of one page."""

BORN = "export it at 0 from the start, since a counter that is born above 0 shows no increase"


def look_at_processes(series: list[Series], known: Known, found: Findings) -> None:
    """What is missing, double or too much in a process or a forward goes to ``found``."""
    _duplicates(series, found)
    _limits(series, found)
    _builds(series, known, found)
    _forwards(series, known, found)
    _times(series, found)
    _own(series, found)
    groups: dict[tuple[Process, str], list[Series]] = defaultdict(list)
    for one in series:
        groups[one.owner].append(one)
    for owner, buckets in known.buckets.items():
        if owner[0] not in known.folded:
            _paddings(groups[owner], found)
            if buckets:
                _born(groups[owner], buckets, found)


def _duplicates(series: list[Series], found: Findings) -> None:
    seen: set[object] = set()
    for one in series:
        key = (one.metric, one.part, one.all_but())
        if key in seen:
            hint = "Prometheus keeps one of the two; add them up"
            found.add("duplicate", one.metric.name, f"twice on the page: {one}", hint)
        seen.add(key)


def _limits(series: list[Series], found: Findings) -> None:
    sets: dict[tuple[Process, str], set[object]] = defaultdict(set)
    names: dict[Process, set[str]] = defaultdict(set)
    sources: dict[tuple[Process, str], str] = {}
    for one in series:
        forward = one.labels.get("forward")
        owner = one.metric.name if forward is None else f"forward {short(forward)}"
        sets[one.process, owner].add((one.metric, one.all_but("le", PID)))
        if one.metric is metrics.FORWARD_INFO:
            sources[one.process, owner] = one.labels.get("source", "")
        if forward is not None:
            names[one.process].add(forward)
    for (process, owner), group in sets.items():
        most = metrics.limit(sources.get((process, owner), ""))
        if len(group) > most:
            what = f"{owner} has {len(group):,} label sets{_of(process)}"
            hint = f"at most {most}: write ranges of batch sizes, and nothing that belongs to a request"
            found.add("unbounded", "", what, hint)
    for process, forwards in names.items():
        if len(forwards) > FORWARDS:
            what = f"{len(forwards):,} forwards in one process{_of(process)}"
            hint = "a forward is a function of the model: name no request, layer or instance"
            found.add("many-forwards", "", what, hint)


def _builds(series: list[Series], known: Known, found: Findings) -> None:
    """Which processes live, and which contract each of them keeps."""
    build = metrics.BUILD_INFO
    for process in sorted(known.ended):
        who = ", ".join(f"{short(label)} {short(value)}" for label, value in process)
        hint = f"if that was not planned, see its log; if it lives, it has to export {build.name}"
        found.add("ended", "", f"{who} has ended: its counters stay, its gauges and infos are gone", hint)
    builds = [one for one in series if one.metric is build]
    hint = f'export one with contract="{metrics.CONTRACT}" per process'
    if all(one.metric.kind not in ("gauge", "info") for one in series):
        hint += "; only counters are here: has every process of this page ended?"
    for process in sorted({one.process for one in series} - {one.process for one in builds} - known.ended):
        found.add("missing", build.name, f"missing{_of(process)}", hint)
    _second(builds, found)
    for version in sorted({one.labels["contract"] for one in builds} - {"", metrics.CONTRACT}):
        what = f"contract {short(version)!r}, this graphprobe checks {metrics.CONTRACT}"
        found.add("contract", build.name, what, "use the graphprobe of that contract")


def _second(infos: list[Series], found: Findings) -> None:
    """An info that changes is a second series, whose first one stays for minutes."""
    seen: set[object] = set()
    for one in infos:
        key = (one.owner, one.written.get(PID))
        if key in seen:
            what = f"a second one of {short(one.labels.get('forward', 'the process'))}{_of(one.process)}"
            found.add("duplicate", one.metric.name, what, "there is one, which never changes")
        seen.add(key)


def _forwards(series: list[Series], known: Known, found: Findings) -> None:
    """What each forward is."""
    infos = [one for one in series if one.metric is metrics.FORWARD_INFO]
    counted = {one.owner for one in series if one.labels.get("forward")}
    for process, forward in sorted(counted - {one.owner for one in infos}):
        if process in known.ended:
            continue
        what = f"missing for forward {short(forward)}{_of(process)}"
        hint = "export one per forward: its unit, buckets and source"
        found.add("missing", metrics.FORWARD_INFO.name, what, hint)
    _second(infos, found)
    if not counted:
        found.add("no-forward", "", "no forward yet", "check again when the engine has captured or counted one")


def _of(process: Process) -> str:
    return f" ({', '.join(f'{short(k)}={short(v)}' for k, v in process)})" if process else ""


def _times(series: list[Series], found: Findings) -> None:
    """Durations come three ways that agree: as a distribution, as a sum and as a count."""
    three = (metrics.FORWARD_DURATION, metrics.FORWARD_SECONDS, metrics.FORWARD_SAMPLES)
    labels = ("forward", "phase", "path")
    seen = {metric: {(one.process, one.of(*labels)) for one in series if one.metric is metric} for metric in three}
    hint = f"export {', '.join(metric.name for metric in three)} together, or none"
    for metric in three:
        for process, where in sorted(set().union(*seen.values()) - seen[metric]):
            named = ", ".join(f"{label} {short(value)}" for label, value in zip(labels, where, strict=True))
            what = f"missing for {named}{_of(process)}"
            found.add("missing", metric.name, what, hint)


def _own(series: list[Series], found: Findings) -> None:
    """What graphprobe says of itself: hooks that are not in place, and its own failures."""
    for one in series:
        if one.metric is metrics.HOOK_BOUND and one.value == 0:
            what = f"{short(one.labels['engine'])}: {short(one.labels['hook'])} is not bound{_of(one.process)}"
            hint = "the engine's log says why; is its version one of those that docs/engines.md lists?"
            found.add("hook", one.metric.name, what, hint)
        if one.metric is metrics.INTERNAL_ERRORS and one.value > 0 and one.labels["where"] != "label_limit":
            what = f"{one.value:,.0f} at {short(one.labels['where'])}{_of(one.process)}"
            found.add("internal-error", one.metric.name, what, "the log of that process has the first of each")


def _paddings(series: list[Series], found: Findings) -> None:
    """Whether the calls explain the padding of each bucket, as near as counters that are read one by one can."""
    rows: dict[tuple[str, ...], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for one in series:
        if one.metric is metrics.GRAPH_CALLS and NUMBER.fullmatch(one.labels["bucket"]):
            row, bucket = rows[one.of("phase", "bucket")], int(one.labels["bucket"])
            least, most = _extent(one.labels["batch_size"], bucket)
            row[0] += one.value * (bucket - most)
            row[1] += one.value * (bucket - least)
    for one in series:
        if one.metric is metrics.PADDING_ROWS and one.of("phase", "bucket") in rows:
            low, high = rows[one.of("phase", "bucket")]
            slack = SLACK * int(one.labels["bucket"])
            if not low * 0.9 - slack <= one.value <= high * 1.1 + slack:
                what = f"{one.value:g} rows, the calls explain {low:g}{f' to {high:g}' if high > low else ''}: {one}"
                found.add("padding", one.metric.name, what, "add bucket - batch_size at each graph call")


def _extent(size: str, bucket: int) -> tuple[int, int]:
    """The least and the most that a batch size may be; everything where it cannot be read."""
    least, _, most = size.rpartition("-")
    if size == "0" or not NUMBER.fullmatch(most):
        return 0, 0 if size == "0" else bucket
    return int(least if NUMBER.fullmatch(least) else most), int(most)


def _born(series: list[Series], buckets: tuple[int, ...], found: Findings) -> None:
    """Zero series of one forward: in at least one phase each must be there, at 0 or above."""
    there: dict[str, set[Zero]] = defaultdict(set)
    for one in series:
        if one.metric in (metrics.GRAPH_CALLS, metrics.EAGER_CALLS, metrics.PADDING_ROWS):
            size, bucket, reason = (one.labels.get(label, "") for label in OF_ZEROS)
            there[one.labels["phase"]].add((one.metric, size, bucket, reason))
    gaps = {phase: _gaps(buckets, there[phase]) for phase in sorted(there) or ["decode"]}
    phase = min(gaps, key=lambda phase: sum(len(sizes) for _, sizes, _ in gaps[phase]))
    where = f"forward {short(series[0].labels['forward'])}, phase {short(phase)}{_of(series[0].process)}"
    for what, sizes, (metric, *values) in gaps[phase]:
        labels = {**series[0].labels, "phase": phase, "mode": "full", **dict(zip(OF_ZEROS, values, strict=True))}
        example = f"{metric.name}{as_written({label: labels[label] for label in metric.labels})} 0"
        listed = ", ".join(map(str, sizes)) if what == "bucket" else spans(sizes)
        found.add("no-zero", metric.name, f"missing for {where}: {what} {short(listed)}", f"{BORN}: {example}")


OF_ZEROS = ("batch_size", "bucket", "reason")
Zero = tuple[Metric, str, str, str]


def _gaps(buckets: tuple[int, ...], there: set[Zero]) -> list[tuple[str, list[int], Zero]]:
    """The zero series that one phase lacks: what they are, their sizes, and the first of them."""
    exact, large = FallbackReason.NO_EXACT_BUCKET.value, FallbackReason.BATCH_TOO_LARGE.value
    small = sorted(set(range(1, min(metrics.EXACT_LABELS, buckets[-1]) + 1)) - set(buckets))
    over = buckets[-1] + 1
    wanted: list[tuple[str, dict[int, Zero]]] = [
        ("bucket", {b: (metrics.GRAPH_CALLS, metrics.size_label(b, buckets), str(b), "") for b in buckets}),
        ("bucket", {b: (metrics.PADDING_ROWS, "", str(b), "") for b in buckets}),
        (f"{exact} at size", {n: (metrics.EAGER_CALLS, str(n), "", exact) for n in small}),
        (f"{large} at size", {over: (metrics.EAGER_CALLS, metrics.size_label(over, buckets), "", large)}),
    ]
    lacks = ((what, [size for size, zero in zeros.items() if zero not in there], zeros) for what, zeros in wanted)
    return [(what, sizes, zeros[sizes[0]]) for what, sizes, zeros in lacks if sizes]


def compare(earlier: Iterable[Series], later: Iterable[Series], found: Findings) -> None:
    """Counters, and the parts of histograms, only grow and never vanish while a process lives."""
    after = {(one.metric, one.part, one.all_but()): one.value for one in later}
    for one in earlier:
        if one.metric.kind != "counter" and not one.part:
            continue
        value = after.get((one.metric, one.part, one.all_but()))
        if value is None:
            hint = "a series stays until the process ends"
            found.add("gone", one.metric.name, f"gone at the second read: {one}", hint)
        elif value < one.value:
            what = f"fell from {one.value:g} to {value:g}: {one}"
            found.add("fell", one.metric.name, what, "a counter never goes down; if the process restarted, check again")

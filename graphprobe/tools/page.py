"""A page of metrics -> the snapshot that it stands for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from graphprobe import metrics
from graphprobe.errors import SourceError
from graphprobe.tools import exposition, vllm
from graphprobe.tools.findings import Findings, short
from graphprobe.tools.rebuild import Rebuilt, rebuild, refused_if_folded
from graphprobe.tools.series import Series, identified, processes

UNREAD = ("syntax", "encoding", "too-long")
"""Findings after which the numbers may not be all, or not be right."""


def from_page(body: bytes, name: str) -> Rebuilt:
    """What the page of metrics in ``body`` stands for; SourceError, with ``name``, where it says nothing of calls."""
    found = Findings()
    page = exposition.parse(body, found)
    series = identified(page, found)
    if not series:
        hint = "give the page of a process after graphprobe.start_exporter(), or of an engine started with GRAPHPROBE=1"
        raise SourceError(f"{name}: these are metrics, but none of graphprobe's. hint: {hint}")
    once = {(one.metric, one.part, tuple(sorted(one.written.items()))): one for one in series}
    rebuilt = refused_if_folded(rebuild(once.values()), name)
    summed = processes(series)
    told = _notes(found, summed, len(series) - len(once))
    return rebuilt._replace(
        notes=(*told, *rebuilt.notes),
        processes=_by_forward(once.values(), summed),
        spec_tokens=vllm.spec_tokens(page.beside),
    )


def _by_forward(series: Iterable[Series], summed: int) -> dict[str, int]:
    """How many processes have each forward; all where no info tells."""
    infos = Counter(one.labels["forward"] for one in series if one.metric is metrics.FORWARD_INFO)
    names = {one.labels["forward"] for one in series if "forward" in one.labels}
    return {name: infos[name] or summed for name in names}


def _notes(found: Findings, summed: int, twice: int) -> list[str]:
    broken = [finding.what for finding in found.all() if finding.rule in UNREAD]
    strange = dict.fromkeys(short(finding.metric) for finding in found.all() if finding.rule == "unknown-metric")
    told = (
        (summed > 1, f"{summed} processes are summed"),
        (twice > 0, f"{twice:,} series are there twice, and the last of each counts"),
        (bool(strange), f"names that are none of the contract's: {', '.join(strange)}; are its suffixes kept?"),
        (bool(broken), f"the page is not whole ({''.join(broken[:1])}): see graphprobe check"),
    )
    return [note for happened, note in told if happened]

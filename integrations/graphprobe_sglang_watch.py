"""One model runner of SGLang, watched: its forwards in the ledger, its graphs, and where the counts go."""

from __future__ import annotations

import sys
import weakref
from bisect import bisect_left
from typing import Any

from graphprobe import __version__, metrics
from graphprobe.buckets import Buckets, decode_buckets
from graphprobe.errors import INFO, WARNING, log
from graphprobe.export.route import label_rank, route
from graphprobe.instrument import kept
from graphprobe.ledger import LEDGER, Forward
from graphprobe.observe import Probe, observe, spans
from graphprobe.sentinel import SENTINEL
from graphprobe.stopwatch import Stopwatch
from graphprobe.tools.paste import line
from graphprobe_sglang import INTEGRATION, PATCHES

HINT = "SGLang's passes are counted, but served nowhere: start it with --enable-metrics, or export GRAPHPROBE_PORT=9464"

MODES = {"BreakableCudaGraphBackend": "breakable", "TcPiecewiseCudaGraphBackend": "piecewise"}
"""How much of a pass the graphs of a backend cover; those of all others cover it whole."""

LEGACY = {"PiecewiseCudaGraphRunner": "piecewise", "BreakableCudaGraphRunner": "breakable"}
"""The same before 0.5.14, where each kind was a runner of its own."""

EAGER = "EagerRunner"
"""SGLang's runner without graphs, which may stand where one with graphs would."""


class Graphs:
    """A runner of SGLang that has graphs: its sizes, ascending, and how much of a pass they cover."""

    def __init__(self, runner: Any) -> None:
        self.runner = weakref.ref(runner)
        self.exact = bool(getattr(runner, "disable_padding", False))
        prefill = by_tokens(runner)
        self.sizes = sorted(getattr(runner, "capture_num_tokens" if prefill else "capture_bs", None) or ())
        backend = type(getattr(runner, "backend", None)).__name__
        self.mode = MODES.get(backend) or LEGACY.get(type(runner).__name__, "full")
        # The CPU's runner keeps the size of an earlier pass, and that of prefill keeps none: both pad to the next.
        self.tells = not prefill and type(runner).__name__ != "CPUGraphRunner"

    def bucket(self, runner: Any, size: int) -> int:
        """The padded size of the pass that has just been replayed."""
        if self.tells:
            return max(size, int(runner.bs))
        index = bisect_left(self.sizes, size)
        return self.sizes[index] if index < len(self.sizes) else size


class Usual:
    """A decode pass that a graph has served before; what such a pass takes is looked up here."""

    __slots__ = ("bucket", "cell", "every", "left", "mode", "phase", "size", "state")

    def __init__(self, probe: Probe, size: int, bucket: int, mode: str, phase: str, every: int) -> None:
        self.size, self.bucket, self.mode, self.phase = size, bucket, mode, phase
        self.cell = probe.forward.graph_cell(size, bucket, phase, mode)
        self.state = SENTINEL.state()
        """The launches of the thread that serves; another thread's passes are not like these."""
        self.every = self.left = every
        """One of so many calls is timed, and how many are left until then."""


class Watch:
    """A model runner and what is counted of it. Made with its first capture, or its first pass."""

    def __init__(self, runner: Any) -> None:
        self.device = str(getattr(runner, "device", ""))
        self.on_gpu = self.device not in ("", "cpu")
        self.drafts = bool(getattr(runner, "is_draft_worker", False))
        self.name = "sglang.drafter" if self.drafts else "sglang"
        self.stopwatch = Stopwatch(self.device)
        self.published = False
        self.usual: dict[tuple[Any, int], Usual] = {}
        """The passes that are like earlier ones, by SGLang's mode and the number of requests."""
        self.costs: dict[str, dict[str, dict[int, tuple[float, int | None]]]] = {}
        """What graphs took, by forward, kind of SGLang's runner and size: seconds and bytes."""
        self.draft_graphs: dict[str, Graphs] = {}
        """Graphs that a drafter's worker owns, by phase."""
        self._runner = weakref.ref(runner)
        self._graphs: dict[int, Graphs] = {}
        self.probe = self._observe("", "requests")
        spec = getattr(runner, "spec_algorithm", None)
        speculative = spec is not None and not spec.is_none()
        self.probe.forward.phases = ("draft",) if self.drafts else ("verify",) if speculative else ("decode",)
        self._prefill: Probe | None = None

    @property
    def prefill(self) -> Probe:
        """The probe of passes that are counted in tokens: they have graphs and sizes of their own."""
        if self._prefill is None:
            self._prefill = self._observe(".prefill", "tokens")
            self._prefill.forward.phases = ("prefill",)
        return self._prefill

    def _observe(self, part: str, unit: str, buckets: Buckets | None = None) -> Probe:
        role = "drafter" if self.drafts else "target"
        return observe(f"{self.name}{part}", buckets, unit=unit, source="engine", role=role, backend=self.device)

    def graphs(self, runner: Any) -> Graphs | None:
        """What is known of a runner of SGLang's; None where it has no graphs."""
        found = self._graphs.get(id(runner))
        if found is None or found.runner() is not runner:
            if runner is None or type(runner).__name__ == EAGER:
                return None
            # Those of runners that SGLang has made anew since are no longer asked for.
            self._graphs = {key: known for key, known in self._graphs.items() if known.runner() is not None}
            found = self._graphs[id(runner)] = Graphs(runner)
        return found

    def captured(self) -> None:
        """All graphs are made: their sizes, and which decode passes have none."""
        self.usual.clear()
        runner = self._runner()
        decode, prefill = (self.graphs(found) for found in graph_runners(runner))
        self.probe.forward.kv_capacity_tokens = kv_tokens(runner)
        if decode is not None and decode.sizes:
            self._observe("", "requests", Buckets(decode.sizes[:1024]))
            self.check(runner, decode)
        if prefill is not None and prefill.sizes:
            self._observe(".prefill", "tokens", Buckets(prefill.sizes[:1024]))

    def keep(self, phase: str, runner: Any) -> None:
        """Graphs of a drafter's worker, where nobody else finds them."""
        found = self.graphs(runner)
        if found is not None and found.sizes:
            self.draft_graphs[phase] = found
            if self.probe.forward.buckets is None:
                self._observe("", "requests", Buckets(found.sizes))

    def check(self, runner: Any, decode: Graphs) -> None:
        """Warn of the batches that may be admitted and have no graph."""
        most = getattr(runner, "max_running_requests", None)
        if not isinstance(most, int) or most < 1:
            return
        forward, exact, largest = self.probe.forward, decode.exact, decode.sizes[-1]
        missing = [n for n in range(1, most + 1) if (n not in decode.sizes if exact else n > largest)]
        forward.uncovered[forward.phases[0]] = len(missing)
        if missing:
            what = f"{len(missing)} of the batches up to {most} requests (max_running_requests) have no CUDA graph"
            text = f"{what}: {spans(missing)}. {self._remedy(runner, decode, most)}"
            forward.explain(f"uncovered/{forward.phases[0]}", text)

    def _remedy(self, runner: Any, decode: Graphs, most: int) -> str:
        """What to start SGLang with instead."""
        largest = decode.sizes[-1]
        more = {n for n in decode_buckets(most) if n > largest} | ({most} if most > largest else set())
        # The first line is the spelling from 0.5.14 on, the last one that before it.
        legacy = -1 if "graph_runner" in vars(runner) else 0
        option = line("sglang", sorted({*decode.sizes, *more})).splitlines()[legacy].rpartition(": ")[2]
        drop = "Leave out --disable-cuda-graph-padding" if decode.exact else ""
        if most <= largest:
            return drop
        more_of = f"{drop}, and capture" if drop else "Capture"
        return f"{more_of} more: {option}, or admit fewer: --max-running-requests {largest}"

    def publish(self, runner: Any) -> None:
        """The way of all metrics out of this process, with the first pass."""
        self.published = True
        try:
            # Once more: graphs of prefill may have been made last.
            self.captured()
        except Exception as error:
            PATCHES.failed("start", error)
        if self.on_gpu:
            SENTINEL.judges(self.probe.forward)
        arguments: Any = getattr(runner, "server_args", None)
        rank = _rank(arguments, runner)
        shared = bool(getattr(arguments, "enable_metrics", False))
        if self.drafts:
            return
        served = route(self.probe.forward, rank, "SGLang's own /metrics", HINT, shared=shared)
        if rank == 0:
            _say(self.probe.forward, self.graphs(graph_runners(runner)[1]), served)


def _say(forward: Forward, prefill: Graphs | None, served: str) -> None:
    decode = f"decode graphs up to {forward.buckets.largest} requests" if forward.buckets else "no decode graphs"
    others = f"prefill graphs up to {prefill.sizes[-1]} tokens ({prefill.mode})" if prefill and prefill.sizes else ""
    text = "graphprobe %s observes SGLang %s: %s, %s, %s, metrics: %s"
    values = (__version__, INTEGRATION.found(), decode, others or "no prefill graphs", PATCHES.placed, served)
    log(INFO, text, *values)


def graph_runners(runner: Any) -> tuple[Any, Any]:
    """SGLang's runners of decode and of prefill graphs, as they are called from 0.5.14 on and before."""
    found = vars(runner)
    decode = found.get("decode_cuda_graph_runner", found.get("graph_runner"))
    return decode, found.get("prefill_cuda_graph_runner", found.get("piecewise_cuda_graph_runner"))


def by_tokens(graph: Any) -> bool:
    """Whether a runner of SGLang's has its graphs by tokens, as that of prefill, and not by requests."""
    return getattr(graph, "capture_bs", None) is None


def draft_phase(graph: Any) -> str:
    """What a drafter's own graphs are for."""
    return "draft_extend" if "Extend" in type(graph).__name__ else "draft"


def kv_tokens(runner: Any) -> int | None:
    """Tokens that the KV cache holds."""
    found = getattr(runner, "max_total_num_tokens", None)
    return found if isinstance(found, int) else None


def watch_of(runner: Any) -> Watch:
    """The watch of a model runner, made at the first call."""
    return kept(runner, Watch)


def _rank(arguments: Any, runner: Any) -> int:
    """A number of this process among all of the server: each replica of data parallelism counts its ranks from 0."""
    rank = int(metrics.rank_of_group() or 0)
    size = int(getattr(arguments, "dp_size", 1) or 1)
    if size > 1 and not getattr(arguments, "enable_dp_attention", False):
        rank += _replica(runner) * int(getattr(arguments, "tp_size", 1)) * int(getattr(arguments, "pp_size", 1))
        label_rank(rank)
    return rank


def _replica(runner: Any) -> int:
    # It has moved with 0.5.16, 0.5.21 and 0.5.22.
    context = getattr(sys.modules.get("sglang.srt.runtime_context"), "get_parallel", lambda: None)
    for holder in (runner, getattr(runner, "ps", None), context()):
        found = getattr(holder, "dp_rank", None)
        if isinstance(found, int):
            return found
    return 0


def missed(batches: int) -> None:
    """``batches`` were run, and no pass was seen."""
    LEDGER.hooks["sglang", "dispatch"] = False
    text = "sglang: instrumented, but never called: %d batches ran and no pass of a model runner was seen in %s"
    log(WARNING, text, batches, PATCHES.release)

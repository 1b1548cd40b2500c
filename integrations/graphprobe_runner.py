"""One runner of a small engine, watched: its calls in the ledger, some of them timed, and what its captures took.

What nano-vllm and mini-sglang have in common: a dict of graphs by size, one place that dispatches, one that captures,
and no metrics of their own. Whether a call ran as a graph is seen, not reckoned: the engine looked a graph up, or not.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from graphprobe import __version__
from graphprobe.buckets import Buckets
from graphprobe.errors import INFO, log
from graphprobe.export.route import route
from graphprobe.instrument import KEY, Function, Patches
from graphprobe.ledger import LEDGER, Forward, Holder, ignore_active, ignored
from graphprobe.observe import observe
from graphprobe.reasons import FallbackReason
from graphprobe.sentinel import SENTINEL
from graphprobe.stopwatch import Stopwatch, free_bytes

UNSEEN = 16
"""Steps without one call of the forward, after which there is a warning."""

Reason = Callable[[Any, int, str], FallbackReason]
"""Why a call of the runner, with so many rows and of this phase, ran eagerly."""


class Graphs(dict[int, Any]):
    """An engine's graphs by size, in a dict that notes which one was looked up last."""

    last: int | None = None

    def __getitem__(self, bucket: int) -> Any:
        self.last = bucket
        return dict.__getitem__(self, bucket)


class Books:
    """What the graphs took that are captured from now on, each by itself and all together. Never raises."""

    def __init__(self, patches: Patches) -> None:
        self.graphs: dict[int, tuple[float, int | None]] = {}
        """Seconds and bytes by the id of a graph; torch.cuda.graph alone, without the warm-up before it."""
        self.seconds = 0.0
        self.bytes: int | None = None
        self._patches = patches
        self._open: dict[int, tuple[float, int | None]] = {}
        # The driver first: what it takes to answer is not the graphs'.
        self._free = self._left()
        self._began = time.perf_counter()

    def begin(self, graph: Any) -> None:
        """A capture begins."""
        free = self._left()
        self._open[id(graph)] = (time.perf_counter(), free)

    def end(self, graph: Any) -> None:
        """It is done."""
        now = time.perf_counter()
        began, before = self._open.pop(id(graph), (now, None))
        self.graphs[id(graph)] = (now - began, _less(before, self._left()))

    def close(self) -> None:
        """All are."""
        self.seconds = time.perf_counter() - self._began
        self.bytes = _less(self._free, self._left())

    def _left(self) -> int | None:
        try:
            return free_bytes()
        except Exception as error:
            self._patches.failed("capture", error)
            return None


class Capturing(threading.local):
    """The captures that this thread is in."""

    books: Books | None = None


CAPTURING = Capturing()


def captures(patches: Patches, original: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Books]:
    """Run an engine's capture of all its graphs; what it returned, and what they took. What it raises is raised."""
    books = CAPTURING.books = Books(patches)
    try:
        return original(*args, **kwargs), books
    finally:
        CAPTURING.books = None
        books.close()


def graph_begin(original: Function) -> Function:
    """Around ``torch.cuda.graph.__enter__``. Outside of a capture that is watched it does nothing."""

    def __enter__(context: Any) -> Any:
        if CAPTURING.books is not None:
            CAPTURING.books.begin(getattr(context, "cuda_graph", None))
        return original(context)

    return __enter__


def graph_end(original: Function) -> Function:
    """Around ``torch.cuda.graph.__exit__``."""

    def __exit__(context: Any, *error: Any) -> Any:
        result = original(context, *error)
        if CAPTURING.books is not None:
            CAPTURING.books.end(getattr(context, "cuda_graph", None))
        return result

    return __exit__


class Watch:
    """The ``owner`` of graphs, which are in its dict ``attribute``, and what is counted of it."""

    def __init__(self, patches: Patches, owner: Any, attribute: str, *, unit: str, device: str) -> None:
        self._none = Graphs()
        self._patches = patches
        self._attribute = attribute
        self.sizes = sorted(self._adopt(owner))
        """Of its graphs; the graphs themselves are the owner's, which must be able to let go of them."""
        buckets = Buckets(self.sizes) if self.sizes else None
        self.probe = observe(patches.engine, buckets, unit=unit, source="engine", role="target", backend=device)
        self.forward: Forward = self.probe.forward
        self._stopwatch = Stopwatch(device)
        every = self._stopwatch.every
        self._every, self._second = (every, 2 % every) if every else (1, 1)  # 1, 1: never
        self._turns: dict[int, int] = {}
        self.steps = 0
        self._called = False
        self._holder: Holder | None = None
        SENTINEL.judges(self.forward)

    def _adopt(self, owner: Any) -> Graphs:
        held = getattr(owner, self._attribute, None)
        if not isinstance(held, dict):
            return self._none
        if type(held) is not Graphs:
            held = Graphs(held)
            setattr(owner, self._attribute, held)
        return held

    def call(
        self, owner: Any, size: int, phase: str, why: Reason, original: Function, args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """One call of what dispatches, ``original``. It is counted when it has ended, and not where it raises.

        Written in one piece: in an engine, where nothing is in a cache, each function of ours takes its time.
        """
        mark, before, graphs = None, 0, self._none
        launched = SENTINEL.state()
        try:
            held = getattr(owner, self._attribute, None)
            graphs = held if type(held) is Graphs else self._adopt(owner)
            graphs.last = None
            before = launched.count
            # Which graph it will be is not known yet; prompts have too many lengths to have a second each.
            kind = size if phase == "decode" else 0
            turn = self._turns[kind] = self._turns.get(kind, 0) + 1
            if turn % self._every == self._second and not (ignore_active[0] and ignored()):
                mark = self._stopwatch.begin(self.forward)
        except Exception as error:
            self._patches.failed("begin", error)
        try:
            result = original(*args, **kwargs)
        except BaseException:
            self._cancel(mark)
            raise
        try:
            bucket = graphs.last
            if mark is not None:
                self._stopwatch.end(mark, self.forward, "" if bucket is None else "full", bucket, phase)
            if bucket is not None:
                self.probe.graph_call(size, bucket, "full", phase)
            else:
                self.probe.eager_call(size, self._patches.why(why, owner, size, phase), phase)
            if not self._called:
                self._called = True
                SENTINEL.called(self._patches.engine)
            if (launched.count != before) is (bucket is None):
                SENTINEL.judge(self.forward, "eager" if bucket is None else "graph", before)
        except Exception as error:
            self._patches.failed("count", error)
        return result

    def _cancel(self, mark: Any) -> None:
        try:
            if mark is not None:
                self._stopwatch.cancel(mark)
        except Exception as error:
            self._patches.failed("cancel", error)

    def stepped(self) -> None:
        """So many steps have ended in which calls should have been."""
        if self._called:
            return
        LEDGER.hooks[self._patches.engine, "dispatch"] = False
        text = f"instrumented, but never called: {UNSEEN} steps ran, and none came by the place where calls are counted"
        self.forward.explain("unseen", f"{text} ({self._patches.release} dispatches elsewhere)")

    def captured(self, owner: Any, books: Books) -> None:
        """The graphs are made: what each took, and all."""
        forward, known = self.forward, 0.0
        # Of its own: two engines in a process share the forward.
        holder = self._holder = self._holder or forward.holder()
        holder.buckets |= frozenset(self.sizes)
        holder.pool_bytes = books.bytes
        for bucket, graph in self._adopt(owner).items():
            seconds, growth = books.graphs.get(id(graph), (None, None))
            if seconds is not None:
                forward.captured(bucket, "ok", seconds, growth)
                known += seconds
        text = f"{len(self.sizes)} graphs in {books.seconds:.1f} s, of which {known:.1f} s are captures"
        forward.explain("captures", f"{text}; the rest is what runs before them, compilation in it", INFO)

    def publish(self, kv_tokens: int, rank: int) -> None:
        """What the engine knows of its memory, and the way of the metrics out of this process."""
        self.forward.kv_capacity_tokens = kv_tokens
        served = "graphprobe.table() in this process"
        if any(os.environ.get(name) for name in ("GRAPHPROBE", "GRAPHPROBE_PORT", "PROMETHEUS_MULTIPROC_DIR")):
            hint = f"{self._patches.engine}: its calls are counted, but served nowhere: export GRAPHPROBE_PORT=9464"
            served = route(self.forward, rank, "", hint, shared=False)
        if rank == 0:
            graphs = f"graphs up to {self.sizes[-1]}" if self.sizes else "no CUDA graphs"
            text = "graphprobe %s observes %s: %s, %s, metrics: %s"
            log(INFO, text, __version__, self._patches.release, graphs, self._patches.placed, served)


def stepped(patches: Patches, owner: Any, watching: Callable[[Any], Watch | None]) -> None:
    """A step of what calls the place where calls are counted has ended; after some of them there must be calls."""
    try:
        watch = getattr(owner, KEY, None) or watching(owner)
        if watch is not None:
            watch.steps += 1
            if watch.steps == UNSEEN:
                watch.stepped()
    except Exception as error:
        patches.failed("step", error)


def lost(patches: Patches, unit: str, listed: list[int], made: Mapping[int, Any], error: BaseException) -> None:
    """A capture has raised, which ends the start of these engines: the largest size that has none is the one."""
    try:
        missing = set(listed) - set(made)
        if missing:
            outcome = "oom" if "OutOfMemory" in type(error).__name__ else "error"
            probe = observe(patches.engine, Buckets(sorted(listed)), unit=unit, source="engine", role="target")
            probe.forward.captured(max(missing), outcome, 0.0, None)
    except Exception as failure:
        patches.failed("capture", failure)


def _less(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else before - after

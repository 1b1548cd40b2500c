"""Which decode steps have a graph, before any traffic: what can be sent, held against what the engine captures.

With k speculative tokens a step of n requests has n * (1 + k) rows, so a list that counts requests leaves the larger
steps eager, and no engine says so.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from graphprobe.buckets import MAX_BUCKETS, Buckets, as_max_batch, as_size, decode_buckets
from graphprobe.tools.engines import ENGINE, REFUSES, Rule, rule
from graphprobe.tools.paste import line

SPANS = 12
"""Runs of sizes that are named in one place."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """What ``check`` found; all sizes are in the unit of the engine's forward, ascending."""

    rule: Rule
    max_seqs: int
    spec_tokens: int
    given: tuple[int, ...]
    """The list that was checked."""
    needed: tuple[int, ...]
    """The sizes of steps that can occur."""
    captured: tuple[int, ...]
    """The decode graphs that the engine makes of the list."""
    uncovered: tuple[int, ...]
    """Steps without a graph: eager, in vLLM piecewise up to the largest size of the list."""
    never_hit: tuple[int, ...]
    """Sizes of the list that serve no step that can occur."""
    proposal: tuple[int, ...]
    """The list with what it lacks, without what is never hit; for padded dispatch where exact dispatch would need more
    graphs than there may be buckets, and empty where the engine allows no size."""
    warnings: tuple[str, ...] = ()
    starts: bool = True
    """Whether the engine starts with this configuration."""

    @property
    def largest_needed(self) -> int:
        """The step of all requests."""
        return self.needed[-1]

    @property
    def ok(self) -> bool:
        """Whether the engine starts and each step that can occur has a graph."""
        return self.starts and not self.uncovered

    @property
    def made(self) -> dict[int, int | None]:
        """What became of each size of the list: the size of its decode graph, None where there is none."""
        return {n: _graph(self.rule, self.captured, n) for n in self.given}

    @property
    def pads(self) -> bool:
        """Whether ``proposal`` is for padded dispatch."""
        return self.rule.pads or len(self.needed) > MAX_BUCKETS

    @property
    def line(self) -> str:
        """The text to paste for ``proposal``; empty where there is none."""
        if not self.proposal:
            return ""
        prefill = [n for n in self.given if n > self.largest_needed] if self.rule.engine == "vllm" else []
        # To an exact decorator max_batch would mean that each size up to it is sent.
        most = self.largest_needed if self.pads or not self.spec_tokens else None
        return line(self.rule.engine, [*self.proposal, *prefill], max_batch=most, pad=self.pads)

    def __str__(self) -> str:
        """Plain ASCII lines; where something is to be changed, the last ones are what to paste."""
        each = f" of 1 + {self.spec_tokens} tokens" if self.spec_tokens else ""
        lines = [
            f"{self.rule.engine}, up to {self.max_seqs} requests{each}: steps of {spans(self.needed)} {self.rule.unit}",
            f"captured: {spans(self.captured) or 'nothing'}",
            *([f"of the list: {moved}"] if (moved := _moved(self)) else []),
            f"without a graph: {spans(self.uncovered) or 'no step'}",
            *(f"warning: {text}" for text in self.warnings),
        ]
        if self.uncovered and self.proposal:
            lines.append(f"captures {'the others' if _left(self) else 'them'}: {self.line}")
        return "\n".join(lines)


def check(
    buckets: Iterable[int],
    max_seqs: int,
    spec_tokens: int = 0,
    engine: str = "graphprobe",
    pad: bool | None = None,
    tensor_parallel: int = 1,
    largest: int | None = None,
) -> Coverage:
    """Whether ``buckets`` cover every decode step of up to ``max_seqs`` requests, by the rule of ``engine``.

    ``buckets`` are what the engine is told, in its unit: tokens for vLLM and for a decorated forward with speculative
    tokens, requests for the others. ``pad`` and ``tensor_parallel`` are those of ``engines.rule``; ``largest`` is a
    limit set by hand, in vLLM max_cudagraph_capture_size. ConfigError for what is no list, no engine or no number of
    requests.
    """
    given, requests = Buckets(buckets).sizes, as_size(max_seqs, "max_seqs")
    bounded = partial(rule, engine, spec_tokens=spec_tokens, tensor_parallel=tensor_parallel, pad=pad)
    each = 1 if bounded().unit == "requests" else 1 + spec_tokens
    needed = tuple(range(each, as_max_batch(requests * each) + 1, each))
    # No engine makes a decode graph for more than all its requests; a decorated forward captures what it is told.
    whole = bounded(largest=None if engine == "graphprobe" else needed[-1])
    by_hand = [] if largest is None else [as_size(largest, "largest")]
    limits = [*by_hand, *([whole.largest] if whole.largest else [])]
    bound = bounded(largest=min(limits)) if limits else whole
    captured = bound.resolve(given)
    servers = {n: _server(bound, captured, n) for n in needed}
    served = {bucket for bucket in servers.values() if bucket is not None}
    eager = tuple(n for n, bucket in servers.items() if bucket is None)
    idle = tuple(n for n in given if _graph(bound, captured, n) not in served)
    found = Coverage(bound, requests, spec_tokens, given, needed, captured, eager, idle, ())
    if found.pads == whole.pads:
        proposal = _proposal(found, whole, served)
    else:
        proposal = check(given, requests, spec_tokens, engine, True, tensor_parallel).proposal
    found = replace(found, proposal=proposal)
    clash = engine == "vllm" and largest is not None and largest != given[-1]
    refuses = clash or (not captured and ENGINE[engine].without == REFUSES)
    return replace(found, warnings=tuple(_warnings(found, whole, largest)), starts=not refuses)


def spans(sizes: Sequence[int]) -> str:
    """Ascending sizes as text: ``1, 2, 4, 8 to 64 by 8``; of many runs the first ones, and how many sizes follow."""
    parts: list[str] = []
    i = 0
    while i < len(sizes):
        if len(parts) == SPANS:
            return f"{', '.join(parts)} and {len(sizes) - i} more"
        j = _run(sizes, i)
        step = sizes[j] - sizes[j - 1] if j > i else 0
        parts.append(f"{sizes[i]} to {sizes[j]}{f' by {step}' if step > 1 else ''}" if j > i else f"{sizes[i]}")
        i = j + 1
    return ", ".join(parts)


def _run(sizes: Sequence[int], i: int) -> int:
    """Where the run of equal steps that begins at ``i`` ends; ``i`` itself where it has not three sizes."""
    j = i
    while j + 1 < len(sizes) and sizes[j + 1] - sizes[j] == sizes[i + 1] - sizes[i]:
        j += 1
    return j if j - i > 1 else i


def _server(bound: Rule, captured: Sequence[int], size: int) -> int | None:
    """The graph that serves a step, None where it runs eagerly."""
    index = bisect_left(captured, size)
    if index == len(captured) or not (bound.pads or captured[index] == size):
        return None
    return captured[index]


def _graph(bound: Rule, captured: Sequence[int], size: int) -> int | None:
    """The graph that the engine makes of one size of a list, None where it drops it."""
    rounded = -(-size // bound.rounds) * bound.rounds
    return rounded if size % bound.divisor == 0 and rounded in captured else None


def _proposal(found: Coverage, whole: Rule, served: set[int]) -> tuple[int, ...]:
    if not whole.pads:
        return tuple(sorted(served | {n for n in found.uncovered if whole.allows(n)}))
    cover = _cover(found, whole)
    if not cover:
        return ()
    add = {_server(whole, cover, n) for n in found.uncovered}
    return tuple(sorted({n for n in served | add if n is not None and n < cover[-1]} | {cover[-1]}))


def _cover(found: Coverage, whole: Rule) -> list[int]:
    """Allowed sizes for all steps, sparsely; the last one holds the step of all requests wherever one may."""
    each = found.needed[0]
    sizes = {whole.ceil(n * each) for n in decode_buckets(found.max_seqs)}
    if None in sizes and whole.largest is not None:
        sizes.add(whole.largest // whole.multiple * whole.multiple)
    return sorted(n for n in sizes if n)


def _left(found: Coverage) -> list[int]:
    """Steps without a graph that ``proposal`` does not cover either."""
    covering = replace(found.rule, pads=found.pads)
    return [n for n in found.uncovered if _server(covering, found.proposal, n) is None]


def _moved(found: Coverage) -> str:
    """Where the sizes of the list are that are not captured as they stand, and which graphs are none of them."""
    made = found.made
    rounded = {graph: [n for n in found.given if made[n] == graph != n] for graph in found.captured}
    none, more = [n for n in found.given if made[n] is None], [n for n in found.captured if n not in made.values()]
    parts = [f"{spans(sizes)} rounded up to {graph}" for graph, sizes in rounded.items() if sizes]
    parts += [f"no decode graph of {spans(none)}"] if none else []
    parts += [f"{spans(more)} captured beside it"] if more else []
    return "; ".join(parts)


def _warnings(found: Coverage, whole: Rule, largest: int | None) -> Iterator[str]:
    engine, top = whole.engine, found.largest_needed
    if largest is not None and engine == "vllm" and largest != found.given[-1]:
        yield (
            f"max_cudagraph_capture_size {largest} is not the largest size {found.given[-1]}: vLLM refuses to start if "
            "it is told both, and takes the smaller if the list is its own"
        )
    if largest is not None and largest < top:
        yield f"the limit of {largest} {whole.unit} is below the largest step, {top}: raise it, or leave it out"
    if not found.captured:
        why = f" ({'; '.join(found.rule.why)})" if found.rule.why else ""
        yield f"{engine} captures no decode graph of {spans(found.given)}{why}: {ENGINE[engine].without}"
    yield from _unused(found)
    if not found.uncovered:
        return
    if found.captured:
        yield from _missed(found)
    if left := _left(found):
        yield f"no list covers {spans(left)}: {'; '.join(whole.why)}"


def _unused(found: Coverage) -> Iterator[str]:
    engine, unit, top = found.rule.engine, found.rule.unit, found.largest_needed
    above = [n for n in found.never_hit if n > top]
    below = [n for n in found.never_hit if n <= top]
    dropped = [n for n in below if _graph(found.rule, found.captured, n) is None]
    idle = [n for n in below if n not in dropped]
    if above:
        rest = ", only steps with prefill" if engine == "vllm" else ""
        hint = ""
        if unit == "requests" and found.spec_tokens:
            hint = f"; sizes are requests here, and the 1 + {found.spec_tokens} tokens of each are captured apart"
        yield f"{spans(above)} can serve no decode step{rest}: the largest has {top} {unit}{hint}"
    if dropped and found.captured:
        yield f"{engine} makes no decode graph of {spans(dropped)}: {'; '.join(found.rule.why)}"
    if idle:
        yield f"{spans(idle)} can never be hit: no step that can occur is served by it"


def _missed(found: Coverage) -> Iterator[str]:
    each, unit = found.needed[0], found.rule.unit
    highest = found.captured[-1] if found.captured else 0
    whole = found.given[-1] if found.rule.engine == "vllm" else highest
    above = {
        "run piecewise at best": [n for n in found.uncovered if highest < n <= whole],
        "run eagerly": [n for n in found.uncovered if n > max(highest, whole)],
    }
    for how, sizes in above.items():
        if sizes:
            named = f" ({spans(sizes)} {unit})" if each > 1 else ""
            yield (
                f"the largest step has {found.largest_needed} {unit}, the largest decode graph {highest}: "
                f"{spans([n // each for n in sizes])} requests{named} {how}"
            )
    holes = [n for n in found.uncovered if n < highest]
    if holes:
        fewer = len(decode_buckets(found.max_seqs))
        yield f"{spans(holes)} {unit} run eagerly, as no graph has exactly that size; with padding {fewer} cover all"

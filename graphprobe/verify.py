"""Verification in traffic: one in N graph calls is run eagerly, too, on the same inputs and state.

A verified call waits for the device, since its two results are compared on the host.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import torch

from graphprobe.ledger import Cell, Forward, add
from graphprobe.options import Options
from graphprobe.outputs import described
from graphprobe.reasons import FallbackReason
from graphprobe.routes import Captured, GraphWork, Serve
from graphprobe.signature import Node
from graphprobe.turn import unserved


class Verifier:
    """Compares graph calls of one forward with eager."""

    def __init__(self, options: Options, entry: Forward, invoke: Callable[..., Any]) -> None:
        self.options = options
        self.entry = entry
        self._invoke = invoke

    def period(self, captured: Captured) -> int:
        """One in how many calls of a graph is compared; 0 where running twice would not give the same."""
        if not self.options.verify:
            return 0
        why = ""
        if captured.random:
            why = "the forward draws random numbers"
        elif captured.undeclared:
            why = captured.undeclared
        if why:
            self.entry.explain("verify/off", f"verify is off: {why}")
            return 0
        return self.options.verify

    def compare(self, work: GraphWork, serve: Serve, call: tuple[Any, ...], phase: str) -> Any:
        """Serve one call by graph and by eager; hand out the graph's result where they agree, else eager's."""
        owner, args, kwargs, tensors, cell = call
        touched = self._touched(work, tensors)
        before = _copies(touched.values())
        uncounted: Cell = [0]
        result = serve(owner, args, kwargs, tensors, uncounted)
        if unserved(result):
            return result
        # Of the results, too: one may be a cache, which the second run writes again.
        node, results = described(result)
        left, have = _copies(touched.values()), _copies(results)
        with torch.no_grad():
            for tensor, saved in zip(touched.values(), before, strict=True):
                tensor.copy_(saved)
        expected = self._invoke(owner, args, kwargs)
        difference = self._difference(node, have, expected) or self._drift(touched, left)
        if difference is None:
            add(cell, uncounted[0])
            return result
        bucket = work.captured.bucket
        work.captured.life.lose(FallbackReason.VERIFY_FAILED)
        self.entry.mismatch(bucket)
        text = f"bucket {bucket}: the graph's {difference}; the graph is given up"
        self.entry.explain(f"verify_failed/{bucket}", text, logging.ERROR)
        add(self.entry.eager_cell(work.size, FallbackReason.VERIFY_FAILED, phase), uncounted[0])
        return expected

    def _touched(self, work: GraphWork, tensors: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
        """What a second run would find changed by the first, by name: the declared state, the written inputs."""
        state = self.options.state
        declared = [] if state is None or isinstance(state, str) else state
        named = {f"state[{i}]": tensor for i, tensor in enumerate(declared)}
        if state == "rewrites":
            # A cache is written with the same values again; a position beside it would move twice.
            counters = work.captured.counters
            named |= {f"written tensor {i} of shape {list(t.shape)}": t for i, t in enumerate(counters)}
        return named | {item.path: tensors[item.index] for item, _ in work.back}

    def _drift(self, touched: dict[str, torch.Tensor], left: list[torch.Tensor]) -> str | None:
        """Which tensor the graph left different from eager, and how far."""
        for (name, want), have in zip(touched.items(), left, strict=True):
            if text := self._apart(have, want):
                return f"`{name}` is left different from eager: {text}"
        return None

    def _apart(self, have: torch.Tensor, want: torch.Tensor) -> str:
        try:
            torch.testing.assert_close(have, want, equal_nan=True, **self._tolerance())
        except AssertionError as error:
            # Else its frames keep the wrapper in a cycle with its graphs.
            traceback.clear_frames(error.__traceback__)
            lines = str(error).splitlines()
            return next((line for line in lines if "difference" in line), lines[0]).strip()
        return ""

    def _difference(self, node: Node, have: list[torch.Tensor], expected: Any) -> str | None:
        """Which output differs and how far, None where all agree within the tolerance."""
        other, want = described(expected)
        if _skeleton(node) != _skeleton(other) or len(have) != len(want):
            return f"result is another structure ({node.type.__name__}, {len(have)} tensors) than eager's"
        leaves = list(node.leaves("tensor"))
        for leaf, a, b in zip(leaves, have, want, strict=True):
            if text := self._apart(a, b):
                return f"`{leaf.path}` differs from eager: {text}"
        return None

    def _tolerance(self) -> dict[str, Any]:
        tol = self.options.verify_tol
        return {} if tol is None else {"rtol": tol, "atol": tol}


def _copies(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    with torch.no_grad():
        return [tensor.clone() for tensor in tensors]


def _skeleton(node: Node) -> Any:
    """The structure of a result without the types of its tensors: a graph gives a Tensor for eager's Parameter."""
    if node.kind == "tensor":
        return node.kind
    return (*node.key[:-1], tuple(_skeleton(child) for child in node.children))

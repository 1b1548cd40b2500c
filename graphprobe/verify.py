"""Verification in traffic: one in N graph calls is run eagerly, too, on the same inputs and state.

A verified call waits for the device, since its two results are compared on the host.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from graphprobe.ledger import Cell, Forward, add
from graphprobe.options import Options
from graphprobe.outputs import described
from graphprobe.reasons import FallbackReason
from graphprobe.routes import Captured, GraphWork, Serve
from graphprobe.turn import unserved


class Verifier:
    """Compares graph calls of one forward with eager."""

    def __init__(self, options: Options, entry: Forward, invoke: Callable[..., Any]) -> None:
        self.options = options
        self.entry = entry
        self._invoke = invoke

    def period(self, captured: Captured, writes: str) -> int:
        """One in how many calls of a graph is compared; 0 where running twice would not give the same."""
        if not self.options.verify:
            return 0
        why = ""
        if captured.random:
            why = "the forward draws random numbers"
        elif writes and self.options.state is None:
            why = f"the forward writes to a tensor outside ({writes}); declare state="
        if why:
            self.entry.explain("verify/off", f"verify is off: {why}")
            return 0
        return self.options.verify

    def compare(self, work: GraphWork, serve: Serve, call: tuple[Any, ...], phase: str) -> Any:
        """Serve one call by graph and by eager; hand out the graph's result where they agree, else eager's."""
        owner, args, kwargs, tensors, cell = call
        state = list(self.options.state) if self.options.state is not None and self.options.state != "rewrites" else []
        touched = [*state, *(tensors[item.index] for item, _ in work.back)]
        before = [t.clone() for t in touched]
        uncounted: Cell = [0]
        result = serve(owner, args, kwargs, tensors, uncounted)
        if unserved(result):
            return result
        for tensor, saved in zip(touched, before, strict=True):
            tensor.copy_(saved)
        expected = self._invoke(owner, args, kwargs)
        difference = self._difference(result, expected)
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

    def _difference(self, result: Any, expected: Any) -> str | None:
        """Which output differs and how far, None where all agree within the tolerance."""
        node, have = described(result)
        other, want = described(expected)
        if node.key != other.key or len(have) != len(want):
            return f"result is another structure ({node.type.__name__}, {len(have)} tensors) than eager's"
        leaves = list(node.leaves("tensor"))
        for leaf, a, b in zip(leaves, have, want, strict=True):
            try:
                torch.testing.assert_close(a, b, equal_nan=True, **self._tolerance())
            except AssertionError as error:
                first = [line for line in str(error).splitlines() if "difference" in line] or str(error).splitlines()
                return f"`{leaf.path}` differs from eager: {first[0].strip()}"
        return None

    def _tolerance(self) -> dict[str, Any]:
        tol = self.options.verify_tol
        return {} if tol is None else {"rtol": tol, "atol": tol}

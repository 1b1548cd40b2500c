"""The look-up tables of the hot path: spelling -> plan -> route."""

from __future__ import annotations

from typing import Any

from graphprobe.calls import Call, Describer
from graphprobe.routes import Plan

MOST = 4096
"""Structures, and sizes per structure, with cached decisions; others are decided afresh at each call."""


class Plans:
    """``hot`` has, for each spelling, the plan that served last. ``generation`` grows when graphs change."""

    MOST_RECENT = 8

    def __init__(self) -> None:
        self.hot: dict[Any, Plan] = {}
        self.generation = 0
        self._structures: dict[Any, Plan] = {}
        self._recent: dict[Any, tuple[Plan, ...]] = {}

    def plan(self, call: Call, describer: Describer) -> Plan:
        """The plan of calls with the structure and the spelling of this one."""
        key = (call.spelling, tuple(node.key for node in call.nodes))
        plan = self._structures.get(key)
        if plan is None:
            plan = Plan(describer.picker(call), call.batch or (0, 0))
            if len(self._structures) < MOST:
                self._structures[key] = plan
        return plan

    def serve_by(self, spelling: Any, plan: Plan) -> None:
        """Try this plan first for calls of this spelling."""
        self.hot[spelling] = plan
        recent = [p for p in self._recent.get(spelling, ()) if p is not plan]
        self._recent[spelling] = (plan, *recent[: self.MOST_RECENT - 1])

    def recent(self, spelling: Any) -> tuple[Plan, ...]:
        """The plans of a spelling that served lately: several where constants alternate, say."""
        return self._recent.get(spelling, ())

    def forget(self) -> None:
        """Every decision is made afresh."""
        self.generation += 1
        # Those beyond the limit are in no structure, but served.
        recent = [plan for plans in list(self._recent.values()) for plan in plans]
        for plan in [*self.hot.copy().values(), *recent, *list(self._structures.values())]:
            plan.forget()
        self.hot.clear()
        self._recent = {}

    def clear(self) -> None:
        """Forget the structures, too."""
        self.forget()
        self._structures = {}

"""What a predicate of an engine asks, in its order: the names that each condition reads, and its text."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Condition:
    """A condition without which the predicate is false. Two are the same where they read the same."""

    reads: frozenset[str]
    text: str


def conditions(function: ast.FunctionDef) -> list[Condition]:
    """Its conditions: those of early returns, and then the parts of what it returns at the end.

    What a condition reads through local variables counts, too, with what decided their values.
    """
    local = _Locals(function)
    parts = [part for tests, end in _ends(function.body, []) for part in [*tests, *_parts(end)]]
    found = [Condition(local.reads(part), ast.unparse(part)) for part in parts]
    return [condition for index, condition in enumerate(found) if condition.reads and condition not in found[:index]]


def _ends(body: list[ast.stmt], tests: list[ast.expr]) -> Iterator[tuple[list[ast.expr], ast.expr]]:
    """Each return statement that may say no: the conditions it is under, and its value."""
    for node in body:
        if isinstance(node, ast.Return) and node.value is not None and ast.unparse(node.value) != "True":
            yield tests, node.value
        for name in ("body", "orelse"):
            inside = getattr(node, name, [])
            if isinstance(inside, list):
                more = [node.test] if isinstance(node, ast.If) else [node.iter] if isinstance(node, ast.For) else []
                yield from _ends(inside, [*tests, *more])


def _parts(value: ast.expr) -> list[ast.expr]:
    """The parts of an and-chain."""
    return value.values if isinstance(value, ast.BoolOp) and isinstance(value.op, ast.And) else [value]


class _Locals:
    """The local variables of a function, and what their values come from."""

    def __init__(self, function: ast.FunctionDef) -> None:
        arguments = function.args
        names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        self._arguments = set(names) - {"self", "forward_batch"}
        self._from: dict[str, list[ast.expr]] = {}
        self._collect(function.body, [])

    def reads(self, value: ast.AST, seen: frozenset[str] = frozenset()) -> frozenset[str]:
        """Attributes, arguments and functions that a value comes from."""
        found: set[str] = set()
        for node in ast.walk(value):
            if isinstance(node, ast.Attribute):
                found.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
                found.add(node.value)  # getattr's
            elif isinstance(node, ast.Name) and node.id in self._from:
                for origin in self._from[node.id] if node.id not in seen else ():
                    found |= self.reads(origin, seen | {node.id})
            elif isinstance(node, ast.Name) and node.id in self._arguments:
                found.add(node.id)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                found |= {node.func.id} - set(dir(builtins)) - set(self._from)
        return frozenset(found)

    def _collect(self, body: list[ast.stmt], under: list[ast.expr]) -> None:
        for node in body:
            if isinstance(node, ast.Assign):
                for target in (name for whole in node.targets for name in ast.walk(whole)):
                    if isinstance(target, ast.Name):
                        self._from.setdefault(target.id, []).extend([node.value, *under])
            elif isinstance(node, ast.If):
                self._collect(node.body, [*under, node.test])
                self._collect(node.orelse, [*under, node.test])
            elif isinstance(node, ast.For):
                for name in ast.walk(node.target):
                    if isinstance(name, ast.Name):
                        self._from.setdefault(name.id, []).append(node.iter)
                self._collect(node.body, under)

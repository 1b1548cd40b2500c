"""What a released engine defines, read off its source: classes, functions, their arguments, and what instances have.

Which releases: those in ``RELEASES``, of each line the last one; with GRAPHPROBE_RELEASES=newest the newest alone.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterable, Iterator, Mapping
from functools import cache

from packaging.version import Version

from graphprobe.instrument import Hook
from tests.wheels import Wheel, cache_folder, newest

RELEASES = {
    "vllm": ("0.26.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0"),
    "sglang": (
        *("0.5.11", "0.5.13.post1", "0.5.14", "0.5.15.post1", "0.5.16", "0.5.17"),
        *("0.5.18", "0.5.20", "0.5.21", "0.5.22", "0.5.23"),
    ),
}
"""What the integrations are tested with, oldest first."""

NEWEST = os.environ.get("GRAPHPROBE_RELEASES", "") == "newest"


def chosen(engine: str) -> tuple[str, ...]:
    """The releases of this run."""
    return (newest(engine),) if NEWEST else RELEASES[engine]


def told(engine: str) -> str:
    """What the newest release is to us, in words."""
    version, known = newest(engine), RELEASES[engine]
    if version in known:
        return f"{engine} {version} is the newest release, and one of those that are always tested"
    more = "newer than" if Version(version) > Version(known[-1]) else "not newer than"
    add = "where nothing fails, add it to RELEASES in tests/integrations/releases.py"
    return f"{engine} {version} is the newest release, {more} {known[-1]}, the last that is always tested: {add}"


def before(release: Release) -> Release | None:
    """The release that is tested before this one; None for the first."""
    older = [known for known in RELEASES[release.engine] if Version(known) < Version(release.version)]
    return opened(release.engine, older[-1]) if older else None


class Release:
    """One release. Names are those that its modules have at run time, whether defined there or imported."""

    def __init__(self, engine: str, version: str) -> None:
        self.engine, self.version = engine, version
        self._wheel = Wheel(engine, version, cache_folder())
        self._trees: dict[str, ast.Module | None] = {}
        self._homes: dict[ast.AST, str] = {}

    def __str__(self) -> str:
        return f"{self.engine} {self.version}"

    def tree(self, module: str) -> ast.Module | None:
        """The source of a module; None where this release has none."""
        if module not in self._trees:
            path = module.replace(".", "/")
            text = self._wheel.text(f"{path}.py") or self._wheel.text(f"{path}/__init__.py")
            self._trees[module] = None if text is None else ast.parse(text)
        return self._trees[module]

    def find(self, module: str, dotted: str) -> ast.AST | None:
        """A class or function by its dotted name; through one import, as ``from module import name`` hands it on."""
        first, *rest = dotted.split(".")
        found = self._top(module, first)
        for name in rest:
            found = self._member(module, found, name) if isinstance(found, ast.ClassDef) else None
        return found

    def function(self, module: str, dotted: str) -> ast.FunctionDef:
        """The same, where it must be a function."""
        found = self.find(module, dotted)
        assert isinstance(found, ast.FunctionDef), f"{self}: {module} has no function {dotted}"
        return found

    def attributes(self, module: str, dotted: str) -> set[str]:
        """All that instances of a class have: methods, fields, what methods set on self, and the same of its bases."""
        found = self.find(module, dotted)
        assert isinstance(found, ast.ClassDef), f"{self}: {module} has no class {dotted}"
        names, home = set(_members(found)), self._homes.get(found, module)
        for base in map(ast.unparse, found.bases):
            if isinstance(self.find(home, base), ast.ClassDef):
                names |= self.attributes(home, base)
        return names

    def _top(self, module: str, name: str) -> ast.AST | None:
        tree = self.tree(module)
        for node in _statements(tree.body if tree else []):
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name:
                self._homes[node] = module
                return node
            if isinstance(node, ast.ImportFrom) and any((a.asname or a.name) == name for a in node.names):
                original = next(a.name for a in node.names if (a.asname or a.name) == name)
                return self._top(node.module or "", original)
        return None

    def _member(self, module: str, kind: ast.ClassDef, name: str) -> ast.AST | None:
        own = [n for n in kind.body if isinstance(n, (ast.ClassDef, ast.FunctionDef)) and n.name == name]
        if own:
            return own[-1]
        home = self._homes.get(kind, module)
        bases = (self.find(home, ast.unparse(base)) for base in kind.bases)
        return next((f for b in bases if isinstance(b, ast.ClassDef) and (f := self._member(home, b, name))), None)


def there(release: Release, hooks: Iterable[Hook]) -> list[Hook]:
    """The hooks whose module this release has."""
    return [hook for hook in hooks if release.tree(hook.module)]


def find_all(release: Release, hooks: Iterable[Hook]) -> None:
    """Fail with the places of hooks that this release does not have."""
    missing = [hook for hook in hooks if not release.find(hook.module, hook.attribute)]
    places = "; ".join(f"{hook.attribute} in {hook.module} (hook {hook.name})" for hook in missing)
    assert not missing, f"{release} does not have: {places}"


def kept(release: Release, hooks: Iterable[Hook], gone: Mapping[str, str]) -> list[Hook]:
    """The hooks that have a place in the release before, but for those that are ``gone`` since this one."""
    earlier = before(release)
    return [
        hook
        for hook in hooks
        if earlier and earlier.find(hook.module, hook.attribute) and gone.get(hook.name) != release.version
    ]


@cache
def opened(engine: str, version: str) -> Release:
    """A release, of which each module is read once."""
    return Release(engine, version)


def _statements(body: list[ast.stmt], inside: bool = False) -> Iterator[ast.stmt]:
    """The statements of a module, also under if, try and with: engines define by platform. ``inside``: all of them."""
    for node in body:
        yield node
        if inside or isinstance(node, (ast.If, ast.Try, ast.With)):
            for name in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(node, name, []), inside)
            for handler in getattr(node, "handlers", []):
                yield from _statements(handler.body, inside)


def _members(kind: ast.ClassDef) -> Iterator[str]:
    for node in _statements(kind.body, inside=True):
        if isinstance(node, ast.FunctionDef):
            yield node.name
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in (t for whole in targets for t in ast.walk(whole)):
                if isinstance(target, ast.Name) and node in kind.body:
                    yield target.id
                elif isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                    yield target.attr


def arguments(function: ast.FunctionDef) -> list[str]:
    """Its arguments in order, without self; those by keyword alone at the end."""
    names = [a.arg for a in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]
    return names[1:] if names[:1] == ["self"] else names


def calls(function: ast.FunctionDef, name: str) -> list[ast.Call]:
    """The calls inside it of what is written as ``name``."""
    return [n for n in ast.walk(function) if isinstance(n, ast.Call) and ast.unparse(n.func) == name]


def returned(function: ast.FunctionDef) -> list[list[str]]:
    """The tuples that it returns, as the source of their parts."""
    found = [n.value for n in ast.walk(function) if isinstance(n, ast.Return)]
    return [[ast.unparse(part) for part in value.elts] for value in found if isinstance(value, ast.Tuple)]

"""The shape of the package: its floors, its public names, and what an import of it costs."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

import graphprobe

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "graphprobe"

FLOORS = (
    {"errors", "reasons", "timers", "unhurried"},
    {"buckets", "signature", "attributes", "operators", "backends", "staging", "outputs", "watch"},
    {"dispatch"},
    {"feed", "ledger", "snapshot"},
    {"metrics", "observe", "sentinel", "stopwatch"}
    | {"turn", "options", "calls", "routes", "signatures", "recording", "verify", "sampling", "plans", "captures"}
    | {"decisions", "hits", "graphs", "warmup", "graphed"},
    {"export", "tools", "instrument"},
    {"__init__"},
    {"demo", "testing", "integrations", "dashboards", "armed"},
    {"cli"},
)
"""Lowest first. A package is one name here: `tools` is `graphprobe.tools` and every module in it.

`__init__` hands names of the floors below it on; those above may use them as a user does.
"""

TORCH = {
    *("backends", "timers", "signature", "attributes", "operators", "staging", "outputs", "watch"),
    *("calls", "routes", "hits", "recording", "verify", "captures", "decisions", "graphs", "warmup", "graphed"),
    *("stopwatch", "tools.account", "tools.stepping", "tools.filled", "tools.reads", "tools.gaps", "demo"),
}
"""Where torch may be imported: with anything else a machine without torch can work."""

PLAIN = set().union(*FLOORS[:5]) - {"warmup", "sentinel"}
"""What a forward passes through: beside torch it imports nothing but the standard library.

Warm-up is ahead of traffic, and shows its progress; the sentinel is placed ahead of it, and waits for torch with wrapt.
"""

KNOWN = ["graphed imports graphprobe.export.prometheus.register"]
"""Imports that point up all the same, each listed under "Known violations" in ARCHITECTURE.md."""

HEAVY = ("torch", "prometheus_client", "opentelemetry", "wrapt", "typer", "rich")


class Import(NamedTuple):
    """One import statement: who, what, and whether only a type checker executes it."""

    module: str
    target: str
    typing_only: bool


def module_name(path: Path) -> str:
    """`tools.table` for graphprobe/tools/table.py, `tools` for the package itself, `__init__` for the root."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


SOURCES = {module_name(path): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def floor(module: str) -> int | None:
    """Index of the floor of `module`, None where it has none."""
    return next((n for n, names in enumerate(FLOORS) if module.split(".")[0] in names), None)


def statements(node: ast.AST, typing_only: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    """Every node below `node`, those of functions too, with whether it stands under `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(node):
        yield child, typing_only
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            positive = not isinstance(child.test, ast.UnaryOp)
            for part, only in ((child.body, positive), (child.orelse, not positive)):
                for statement in part:
                    yield statement, typing_only or only
                    yield from statements(statement, typing_only or only)
        else:
            yield from statements(child, typing_only)


def targets(node: ast.AST, module: str) -> list[str]:
    """The absolute names that `node` imports; a name taken from a package may be a module of its own."""
    match node:
        case ast.Import(names=names):
            return [alias.name for alias in names]
        case ast.ImportFrom(module=source, names=names, level=0):
            return [f"{source}.{alias.name}" for alias in names]
        case ast.ImportFrom(level=level):
            pytest.fail(f"{module}: relative import of level {level}; write it absolute")
        case ast.Call(func=ast.Name(id="import_module" | "__import__"), args=[ast.Constant(value=str(name)), *_]):
            return [name]
        case ast.Call(func=ast.Attribute(attr="import_module"), args=[ast.Constant(value=str(name)), *_]):
            return [name]
    return []


def imports() -> list[Import]:
    """Every import in the package, wherever it stands."""
    return [
        Import(module, target, typing_only)
        for module, tree in SOURCES.items()
        for node, typing_only in statements(tree)
        for target in targets(node, module)
    ]


def ours(target: str) -> str | None:
    """The module of this package that `target` (a module, or a name in one) belongs to; None for another's."""
    if target.split(".")[0] != "graphprobe":
        return None
    inner = target.removeprefix("graphprobe").removeprefix(".")
    while inner and inner not in SOURCES:
        inner = inner.rpartition(".")[0]
    return inner or "__init__"


INTERNAL = [(i, inner) for i in imports() if (inner := ours(i.target)) is not None]


def test_every_module_has_a_floor() -> None:
    """A new module is given its floor on purpose, in FLOORS and in ARCHITECTURE.md."""
    assert [module for module in SOURCES if floor(module) is None] == []


def test_imports_point_down() -> None:
    """No module imports from a floor above its own, be it inside a function or for a type checker only."""
    upward = [
        f"{i.module} imports {i.target}"
        for i, inner in INTERNAL
        if (floor(inner) or 0) > (floor(i.module) or 0) and i.target != "graphprobe.__version__"
    ]
    assert upward == KNOWN


def test_modules_import_each_other_in_no_circle() -> None:
    """Modules of one floor may import each other, never in a circle; hiding it in a function does not help."""
    graph: dict[str, set[str]] = {module: set() for module in SOURCES}
    for i, inner in INTERNAL:
        if not i.typing_only and inner != i.module:
            graph[i.module].add(inner)
    TopologicalSorter(graph).prepare()


def test_torch_is_imported_only_where_a_forward_is() -> None:
    """Counting, exporting and reading work on a machine without torch."""
    elsewhere = {
        i.module
        for i in imports()
        if i.target.split(".")[0] == "torch" and not i.typing_only and not {i.module, i.module.split(".")[0]} & TORCH
    }
    assert elsewhere == set()


def test_the_path_of_a_forward_needs_no_third_party() -> None:
    """Up to the floor of `graphed` only torch is imported beside the standard library: no metrics client, no wrapt."""
    third_party = {
        f"{i.module} imports {i.target}"
        for i in imports()
        if i.module.split(".")[0] in PLAIN
        and i.target.split(".")[0] not in sys.stdlib_module_names | {"torch", "graphprobe", "__future__"}
    }
    assert third_party == set()


def test_returns_are_annotated() -> None:
    """Every function says what it returns."""
    bare = [
        f"{module}.{node.name}"
        for module, tree in SOURCES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns is None
    ]
    assert bare == []


def run(code: str) -> str:
    """What a fresh interpreter prints for `code`."""
    return subprocess.run([sys.executable, "-c", code], check=True, text=True, capture_output=True).stdout.strip()


def test_import_is_light() -> None:
    """`import graphprobe` loads neither torch nor an exporter nor the CLI's libraries."""
    assert run(f"import sys, graphprobe; print([m for m in {HEAVY!r} if m in sys.modules])") == "[]"


def test_import_loads_little_of_the_standard_library() -> None:
    """Until something is read, logged or timed: each of these takes as long to load as all of graphprobe."""
    dear = ("argparse", "asyncio", "dataclasses", "inspect", "json", "logging", "socket", "subprocess", "typing")
    code = "import sys; before = set(sys.modules); import graphprobe; print(sorted((set(sys.modules) - before) & {0}))"
    assert run(code.format(set(dear))) == "[]"


def test_public_names_are_sorted_and_few() -> None:
    """`__all__` is sorted, without duplicates, and small enough to be read."""
    assert graphprobe.__all__ == sorted(set(graphprobe.__all__))
    assert len(graphprobe.__all__) <= 20


def test_public_names_are_complete() -> None:
    """Whatever `__init__` imports or defines without an underscore is public, but for what it needs itself."""
    defined = {
        alias.asname or alias.name
        for node, _ in statements(SOURCES["__init__"])
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("graphprobe")
        for alias in node.names
    } | {node.name for node in SOURCES["__init__"].body if isinstance(node, ast.FunctionDef)}
    assert {name for name in defined if not name.startswith("_")} - {"LEDGER"} == set(graphprobe.__all__)


@pytest.mark.parametrize("name", graphprobe.__all__)
def test_public_name_is_documented(name: str) -> None:
    """Each public name can be fetched and explains itself."""
    value = getattr(graphprobe, name)
    assert not inspect.ismodule(value)
    assert inspect.getdoc(value)


def test_dir_lists_the_public_names() -> None:
    """Completion offers lazily loaded names before their first use."""
    assert set(graphprobe.__all__) <= set(dir(graphprobe))


def test_unknown_name_is_an_attribute_error() -> None:
    """A misspelt name fails as on any module."""
    with pytest.raises(AttributeError, match="'graphprobe' has no attribute 'captured'"):
        graphprobe.captured  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize(
    "first",
    [
        "import graphprobe",
        "import graphprobe.{name}",
        "from graphprobe.{name} import *",
        "import graphprobe.{name} as alias",
        "import importlib; importlib.import_module('graphprobe.{name}')",
        "import graphprobe.ledger",
        "import graphprobe.tools.table",
    ],
)
@pytest.mark.parametrize("name", ["snapshot", "observe"])
def test_function_is_not_replaced_by_its_module(name: str, first: str) -> None:
    """`graphprobe.snapshot` and `graphprobe.observe` are functions whatever was imported before or since."""
    before, since = first.format(name=name), f"import graphprobe.{name}, graphprobe.ledger"
    seen = f"print(type(graphprobe.{name}).__name__)"
    assert run(f"{before}\nimport graphprobe\n{seen}\n{since}\n{seen}") == "function\nfunction"


def test_types_are_taken_from_the_module_of_the_same_name() -> None:
    """The modules behind the functions stay importable by their dotted name."""
    assert run("from graphprobe.snapshot import Row; import graphprobe; print(Row.__module__)") == "graphprobe.snapshot"
    found = run("import importlib; print(type(importlib.import_module('graphprobe.snapshot')).__name__)")
    assert found == "module"


def test_version_is_one() -> None:
    """`__version__`, the distribution and the newest heading of the changelog name the same version."""
    declared = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    released = re.search(r"^## \[(\d.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert declared and declared[1] == graphprobe.__version__
    assert released and released[1] == graphprobe.__version__


def test_extras_pin_one_torch() -> None:
    """Both extras pin the same torch, and nothing else asks for one: it would be a CUDA build of gigabytes."""
    text = (ROOT / "pyproject.toml").read_text()
    assert re.findall(r'^ +"(torch.*)",$', text, re.MULTILINE) == ["torch==2.13.0"] * 2


def test_architecture_describes_every_module() -> None:
    """ARCHITECTURE.md has a sentence for each module."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    paths = [
        f"{module.replace('.', '/')}.py" for module in SOURCES if not (PACKAGE / module.replace(".", "/")).is_dir()
    ]
    assert [path for path in paths if f"`{path}`" not in text] == []


def test_files_name_no_machine() -> None:
    """Nothing that is shipped names a path of one machine or the host of a registry."""
    # Spelt with brackets so that this file does not find itself.
    local = re.compile(r"/w[o]rk/|/f[a]rm/|/r[o]ot/|p[y]pi\.org|files\.p[y]thonhosted|registry\.n[p]mjs|deb\.d[e]bian")
    folders = ("graphprobe", "integrations", "dashboards", "benchmarks", "docs", "tests", ".ci")
    files = [path for path in ROOT.iterdir() if path.is_file()]
    files += [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    text = {path: path.read_bytes().decode(errors="ignore") for path in files if path.suffix != ".pyc"}
    assert [str(path.relative_to(ROOT)) for path, content in text.items() if local.search(content)] == []

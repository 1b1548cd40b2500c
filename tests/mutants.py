"""Breaks one guard of graphprobe at a time, in a copy, and says which test notices it.

    python tests/mutants.py [NAME ...]

Each entry of MUTANTS names a guard, the file and the text that are it, what stands there instead, and the tests that
have to fail then. Prints a table; the exit status is 1 where a broken guard is not noticed, or where its text is not
found exactly once, so that the table must follow the code. Tests that fail without a mutant are left out. A NAME
chooses the guards whose description contains it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("graphprobe", "integrations", "tests", "pyproject.toml")
LIMIT = 300
"""Seconds for the tests of one mutant; a guard whose absence makes them hang is noticed, too."""


@dataclass(frozen=True)
class Mutant:
    """One broken guard: ``old`` is in ``file`` of graphprobe once, and ``new`` stands in its place."""

    guard: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


GRAPHS, VERIFY = "tests/test_graphs.py", "tests/test_verify.py"
HITS, STAGING = "tests/test_hits.py", "tests/test_staging.py"

MUTANTS = (
    Mutant(
        "tensors are compared with those captured",
        "signature.py",
        "TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check",
        "lambda *given: True",
        ("tests/test_signature.py", GRAPHS),
    ),
    Mutant(
        "what a graph reads is held weakly, and its end noticed",
        "routes.py",
        "self._refs = follow(outside, self.life.lose)",
        "self._refs = []",
        (GRAPHS,),
    ),
    Mutant("a dead graph is not replayed", "routes.py", "if not life.live or", "if False or", (GRAPHS,)),
    Mutant(
        "addresses of weights are compared",
        "watch.py",
        "tensor.data_ptr() != pointer",
        "False",
        ("tests/test_watch.py",),
    ),
    Mutant(
        "a call unlike the last one is dispatched",
        "hits.py",
        "            or not guard(*tensors)\n",
        "",
        (HITS, STAGING, GRAPHS),
    ),
    Mutant(
        "another grad mode is dispatched",
        "hits.py",
        "            or (grad is not None and grad is not grad_now())\n",
        "",
        (HITS, STAGING, GRAPHS),
    ),
    Mutant(
        "another function mode is dispatched",
        "hits.py",
        "            or modes_now() != modes\n",
        "",
        (HITS, STAGING, GRAPHS),
    ),
    Mutant(
        "a module that trains is dispatched",
        "hits.py",
        '            or (module is not None and getattr(module(), "training", None) is not training)\n',
        "",
        (HITS, STAGING, GRAPHS),
    ),
    Mutant("ignored calls are dispatched", "hits.py", "            or active[0]\n", "", (HITS, STAGING, GRAPHS)),
    Mutant(
        "a route that is retired leads nowhere",
        "routes.py",
        "        self.live[0] = None\n",
        "        pass\n",
        (HITS, STAGING, GRAPHS),
    ),
    Mutant(
        "a route is reached by its hit weakly",
        "hits.py",
        "        weakref.ref(route),",
        "        lambda: route,",
        (HITS, STAGING, GRAPHS),
    ),
    Mutant(
        "one thread at a time replays by a hit",
        "hits.py",
        " or turn.owner != me or turn.inside:",
        " or False:",
        (HITS, STAGING, GRAPHS),
    ),
    Mutant(
        "a hit sees that its graph was lost",
        "hits.py",
        "                if life.live:\n",
        "                if True:\n",
        (HITS, STAGING, GRAPHS),
    ),
    Mutant(
        "memory of a static input is read before it is written",
        "staging.py",
        "elif tensor.untyped_storage().data_ptr() in memory:",
        "elif False:",
        (HITS, STAGING, GRAPHS),
    ),
    Mutant(
        "what is handed out is an alias",
        "staging.py",
        "view.detach() for buffer, view",
        "view for buffer, view",
        (HITS, STAGING, GRAPHS),
    ),
    Mutant(
        "pad rows are filled where a caller may write",
        "staging.py",
        "        self.drifting = True\n        return self.handed",
        "        return self.handed",
        (HITS, STAGING, GRAPHS),
    ),
    Mutant("a pending sign keeps its dtype", "staging.py", " or source.is_neg()", "", (HITS, STAGING, GRAPHS)),
    Mutant(
        "kinds beyond the limit are forgotten, too",
        "plans.py",
        "*self.hot.copy().values(), *recent, ",
        "",
        (HITS, STAGING, GRAPHS),
    ),
    Mutant(
        "addresses of static tensors and the like are compared",
        "hits.py",
        "if (strays is not None and strays(tensors)) or",
        "if",
        (GRAPHS,),
    ),
    Mutant("widths are compared", "routes.py", "if any(not least <= tensors", "if any(not 0 <= tensors", (GRAPHS,)),
    Mutant(
        "one word for all pads is refused where a write would land outside",
        "decisions.py",
        "if landing and isinstance(self.options.pad, str):",
        "if False:",
        (GRAPHS,),
    ),
    Mutant(
        "how outputs follow the batch is known from two sizes",
        "decisions.py",
        "not signature.shapes.known",
        "False",
        (GRAPHS,),
    ),
    Mutant("verify restores the state", "verify.py", "tensor.copy_(saved)", "pass", (VERIFY,)),
    Mutant(
        "state that is not declared is not verified",
        "verify.py",
        "elif captured.undeclared:",
        "elif False:",
        (VERIFY,),
    ),
    Mutant(
        "one thread replays at a time",
        "routes.py",
        "if turn.owner != me or turn.inside:",
        "if turn.inside == me:",
        (GRAPHS,),
    ),
    Mutant("results are clones", "outputs.py", "else view.clone)", "else _same(view))", ("tests/test_outputs.py",)),
    Mutant(
        "results are cut to the caller's rows",
        "outputs.py",
        "return tensor.narrow(dim, 0, rows * tensor.shape[dim] // self.rows)",
        "return tensor",
        ("tests/test_outputs.py", GRAPHS),
    ),
    Mutant("a forked child leaves graphs alone", "decisions.py", "if self.forked:", "if False:", (GRAPHS,)),
    Mutant(
        "a call that takes part in autograd is eager",
        "decisions.py",
        "if torch.is_grad_enabled() and self._needs_grad(owner, call):",
        "if False:",
        (GRAPHS,),
    ),
    Mutant(
        "a module in training is eager",
        "decisions.py",
        "if self._module and owner.training:",
        "if False:",
        (GRAPHS,),
    ),
    Mutant(
        "what the forward writes into an argument is given back",
        "routes.py",
        "if back is not None:",
        "if False:",
        (GRAPHS,),
    ),
    Mutant(
        "arguments that share written memory are refused",
        "routes.py",
        "return any(places.count(places[index]) > 1 for index in self.written)",
        "return False",
        (GRAPHS,),
    ),
    Mutant(
        "constant pad rows are written again over an earlier call's rows",
        "staging.py",
        "if self._padded_from > rows or",
        "if",
        ("tests/test_staging.py",),
    ),
    Mutant(
        "numbers among the arguments are compared, down to the sign of zero",
        "signature.py",
        '{variable}.hex() == {value.hex()!r}"',
        '{variable} == {value!r}"',
        ("tests/test_signature.py", GRAPHS),
    ),
    Mutant(
        "nothing is captured after warmup",
        "captures.py",
        "return not self.closed if",
        "return True if",
        (GRAPHS,),
    ),
    Mutant(
        "no more graphs than max_graphs",
        "signatures.py",
        "return self.graphs >= self.max_graphs",
        "return False",
        ("tests/test_signatures.py", GRAPHS),
    ),
    Mutant(
        "ignored calls are not counted",
        "ledger.py",
        "return ignore_active[0] > 0 and _ignoring.depth > 0",
        "return False",
        ("tests/test_property.py::test_ignored_calls_in_a_row_are_counted_nowhere",),
    ),
    Mutant(
        "a recording run is undone",
        "backends/recorder.py",
        "recording.restore()",
        "pass",
        ("tests/test_recorder.py",),
    ),
    Mutant(
        "one address is compared at each call",
        "routes.py",
        "if tensor is None or address_of(tensor) != address:",
        "if False:",
        ("tests/cases/test_weights.py", GRAPHS),
    ),
    Mutant(
        "attributes of modules are compared",
        "routes.py",
        "elif name := self.settings.changed():",
        "elif name := '':",
        ("tests/cases/test_weights.py",),
    ),
    Mutant(
        "an attribute that a forward sets keeps it from a graph",
        "recording.py",
        "if before is not None and (name := before.changed()):",
        "if False:",
        ("tests/cases/test_wrong_output.py",),
    ),
    Mutant(
        "names of open keywords tell calls apart",
        "signatures.py",
        "nodes = tuple((node.path, node.key) for node in call.nodes)",
        "nodes = tuple((0, node.key) for node in call.nodes)",
        ("tests/cases/test_shapes.py",),
    ),
    Mutant(
        "a tensor passed twice is one tensor in a graph",
        "staging.py",
        "first = found.setdefault(id(tensors[item.index]), place)",
        "first = place",
        (GRAPHS,),
    ),
    Mutant(
        "what a graph leaves in declared state is compared",
        "verify.py",
        "or self._drift(touched, left)",
        "or None",
        (VERIFY,),
    ),
)


def pytest(place: Path, *arguments: str, limit: float | None = None) -> list[str]:
    """The tests that fail in the copy at ``place``, first one first."""
    command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-rfE", "-p", "no:cacheprovider", *arguments]
    # The copy goes before whatever graphprobe is installed.
    environment = {**os.environ, "PYTHONPATH": str(place), "PYTHONDONTWRITEBYTECODE": "1", "GRAPHPROBE_STRICT": "1"}
    try:
        done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return [f"no end within {limit} s"]
    lines = [line.split(" - ")[0] for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    if done.returncode not in (0, 1, 2):
        raise SystemExit(f"pytest {' '.join(arguments)} cannot run:\n{done.stdout}{done.stderr}")
    return [line.partition(" ")[2] for line in lines] or ["collection"] * (done.returncode == 2)


def copied(place: Path) -> None:
    """What the tests need, under ``place``."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, place / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy(source, place / name)


def killer(mutant: Mutant, place: Path, failing: list[str]) -> str:
    """The first test that notices, empty where none does or there is nothing to break."""
    file = place / "graphprobe" / mutant.file
    text = file.read_text()
    if text.count(mutant.old) != 1:
        print(f"{mutant.guard}: {mutant.old!r} is {text.count(mutant.old)} times in {mutant.file}, not once")
        return ""
    file.write_text(text.replace(mutant.old, mutant.new))
    try:
        left_out = [part for name in failing for part in ("--deselect", name)]
        return next(iter(pytest(place, "-x", *left_out, *mutant.tests, limit=LIMIT)), "")
    finally:
        file.write_text(text)


def main(wanted: list[str]) -> int:
    """Break every guard, print who noticed; 1 where nobody did."""
    chosen = [m for m in MUTANTS if not wanted or any(name in m.guard for name in wanted)]
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        copied(place)
        failing = pytest(place, *sorted({test for mutant in chosen for test in mutant.tests}))
        if failing:
            print(f"left out, since they fail without a mutant: {', '.join(failing)}")
        width = max(len(m.guard) for m in chosen)
        print(f"{'guard':{width}} | {'broken in':20} | killed by", flush=True)
        survivors = 0
        for mutant in chosen:
            found = killer(mutant, place, failing)
            survivors += not found
            print(f"{mutant.guard:{width}} | {mutant.file:20} | {found or 'SURVIVED'}", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} broken guards are noticed")
    return 1 if survivors else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

"""The independent count of launches, on a class that stands where torch's graphs do: a launch is a list's append."""

from __future__ import annotations

import ast
import functools
import inspect
import subprocess
import sys
import textwrap
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from graphprobe import errors
from graphprobe.buckets import Buckets
from graphprobe.ledger import Forward, Ledger, ignore
from graphprobe.observe import observe
from graphprobe.sentinel import PATIENCE, SILENT, Sentinel
from tests.wheels import Unavailable, Wheel, cache_folder

BELOW = ("2.11.0", "2.12.1")
"""Releases of torch that have no hooks for all graphs; the one that is installed is looked at itself."""

HOOKS = "2.14.1"
"""One that has."""


def graphs_module(hooks: bool = False) -> ModuleType:
    """A stand-in for ``torch.cuda.graphs``."""
    launched: list[Any] = []
    registered: list[Callable[[Any], None]] = []

    def replay(self: Any) -> None:
        launched.append(self)
        for hook in registered:
            hook(self)

    module = types.ModuleType("torch.cuda.graphs")
    # A function of that module, as in torch.
    method = types.FunctionType(replay.__code__, vars(module), "replay", None, replay.__closure__)
    vars(module).update(CUDAGraph=type("CUDAGraph", (), {"replay": method}), launched=launched, HOOKS=registered)
    if hooks:
        vars(module)["register_graph_replay_end_hook"] = functools.partial(_register, registered)
    return module


def _register(hooks: list[Callable[[Any], None]], hook: Callable[[Any], None]) -> Any:
    hooks.append(hook)
    return types.SimpleNamespace(remove=lambda: hooks.remove(hook))


@pytest.fixture(params=[False, True], ids=["class", "hooks"])
def graphs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """torch with CUDA, below 2.14 and from there on."""
    return stand_in(monkeypatch, graphs_module(request.param))


def stand_in(monkeypatch: pytest.MonkeyPatch, module: ModuleType, **built: str | None) -> ModuleType:
    version, cuda = types.ModuleType("torch.version"), types.ModuleType("torch.cuda")
    vars(version).update(built or {"cuda": "13.0"})
    vars(cuda)["CUDAGraph"] = module.CUDAGraph
    for stand in (version, cuda, module):
        monkeypatch.setitem(sys.modules, stand.__name__, stand)
    return module


@pytest.fixture
def sentinel(ledger: Ledger, graphs: ModuleType) -> Iterator[Sentinel]:
    """Placed, for the engine toy."""
    placed = Sentinel(ledger)
    placed.place("toy")
    yield placed
    placed.remove("toy")


@pytest.fixture
def forward(ledger: Ledger) -> Forward:
    """The forward of an engine on a GPU."""
    return observe("toy", [4], source="engine", backend="cuda", ledger=ledger).forward


def test_launches_are_counted(sentinel: Sentinel, graphs: ModuleType, ledger: Ledger) -> None:
    """Each replay is one launch, of this thread and of the process; the graph is launched once and gets its result."""
    assert (sentinel.launches(), ledger.snapshot().replays_seen) == (0, 0)
    graph = graphs.CUDAGraph()
    for _ in range(3):
        assert graph.replay() is None
    assert (sentinel.launches(), ledger.snapshot().replays_seen, graphs.launched) == (3, 3, [graph] * 3)
    assert sentinel.state().count == 3


def test_a_sentinel_that_is_placed_twice_counts_once(sentinel: Sentinel, graphs: ModuleType) -> None:
    """``place`` may be called by several engines, and by one several times."""
    sentinel.place("toy")
    sentinel.place("other")
    graphs.CUDAGraph().replay()
    assert sentinel.launches() == 1


def test_a_thread_sees_its_own_launches_and_the_process_loses_none(
    sentinel: Sentinel, graphs: ModuleType, ledger: Ledger
) -> None:
    """A thread sees its own launches only; the process loses none of eight threads."""
    seen = []

    def launch() -> None:
        graph = graphs.CUDAGraph()
        for _ in range(2_000):
            graph.replay()
        seen.append(sentinel.launches())

    threads = [threading.Thread(target=launch) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (seen, sentinel.launches(), ledger.snapshot().replays_seen) == ([2_000] * 8, 0, 16_000)


def test_without_a_gil_launches_are_counted_under_a_lock(
    sentinel: Sentinel, graphs: ModuleType, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a build without a GIL the process's count is taken under the lock of counts."""
    monkeypatch.setattr("graphprobe.sentinel.FREE_THREADED", True)
    monkeypatch.setattr("graphprobe.ledger.COUNT_LOCK", lock := Lock())
    graphs.CUDAGraph().replay()
    assert (ledger.snapshot().replays_seen, lock.taken) == (1, 1)


class Lock:
    """Counts how often it was taken."""

    def __init__(self) -> None:
        self.taken = 0

    def __enter__(self) -> None:
        self.taken += 1

    def __exit__(self, *error: object) -> None:
        pass


def test_a_launch_that_fails_is_not_counted(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine gets the error of its own graph; a launch that did not happen is none, and the next one counts."""
    graphs = stand_in(monkeypatch, graphs_module())
    fault = [RuntimeError("an illegal memory access")]

    def replay(graph: Any) -> None:
        if fault:
            raise fault.pop()

    graphs.CUDAGraph.replay = replay
    sentinel = Sentinel(ledger)
    sentinel.place("toy")
    with pytest.raises(RuntimeError, match="illegal memory"):
        graphs.CUDAGraph().replay()
    assert sentinel.launches() == 0
    graphs.CUDAGraph().replay()
    assert sentinel.launches() == 1


def test_all_is_as_before_once_the_last_engine_has_gone(sentinel: Sentinel, graphs: ModuleType, ledger: Ledger) -> None:
    """Once the last engine has gone, all is as before: the class, the hooks, and no count is told."""
    sentinel.place("other")
    sentinel.remove("toy")
    graphs.CUDAGraph().replay()
    assert ledger.snapshot().replays_seen == 1
    sentinel.remove("other")
    assert vars(graphs.CUDAGraph)["replay"].__globals__ is vars(graphs)
    assert (graphs.HOOKS, ledger.snapshot().replays_seen, sentinel.bound) == ([], None, False)
    graphs.CUDAGraph().replay()
    assert sentinel.launches() == 1
    sentinel.place("toy")
    graphs.CUDAGraph().replay()
    assert (sentinel.launches(), ledger.snapshot().replays_seen) == (2, 2)


def test_an_inherited_method_is_given_back(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class that has no ``replay`` of its own has none afterwards."""
    graphs = stand_in(monkeypatch, graphs_module())
    graphs.CUDAGraph = type("CUDAGraph", (graphs.CUDAGraph,), {})
    sentinel = Sentinel(ledger)
    sentinel.place("toy")
    graphs.CUDAGraph().replay()
    assert (sentinel.launches(), "replay" in vars(graphs.CUDAGraph)) == (1, True)
    sentinel.remove("toy")
    assert "replay" not in vars(graphs.CUDAGraph)


def test_what_another_tool_put_upon_ours_stays_when_we_go(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """What another tool put upon ours stays; ours beneath it counts no more."""
    graphs = stand_in(monkeypatch, graphs_module())
    sentinel = Sentinel(ledger)
    sentinel.place("toy")
    ours = graphs.CUDAGraph.replay
    graphs.CUDAGraph.replay = theirs = lambda graph: ours(graph)
    sentinel.remove("toy")
    graphs.CUDAGraph().replay()
    assert (graphs.CUDAGraph.replay, sentinel.launches(), len(graphs.launched)) == (theirs, 0, 1)


@pytest.mark.parametrize("path", ["graph", "eager"])
def test_passes_that_fit_are_no_mismatch(sentinel: Sentinel, graphs: ModuleType, forward: Forward, path: str) -> None:
    """A graph call with one launch or many (piecewise), and an eager one without any, are as they should be."""
    assert sentinel.judges(forward)
    for launches in (1, 30) if path == "graph" else (0,):
        before = sentinel.launches()
        for _ in range(launches):
            graphs.CUDAGraph().replay()
        sentinel.judge(forward, path, before)
    assert forward.snapshot().unmatched == {"graph": 0, "eager": 0}


def lie(sentinel: Sentinel, graphs: ModuleType, forward: Forward, path: str) -> None:
    """A pass that is counted on the wrong path."""
    before = sentinel.launches()
    if path == "eager":
        graphs.CUDAGraph().replay()
    sentinel.judge(forward, path, before)


@pytest.mark.parametrize(("path", "word"), [("graph", "SGLANG_ENABLE_CUDA_GRAPH_DEDUP"), ("eager", "vision encoder")])
def test_passes_on_the_wrong_path_are_counted_and_told_once(
    sentinel: Sentinel,
    graphs: ModuleType,
    forward: Forward,
    caplog: pytest.LogCaptureFixture,
    path: str,
    word: str,
) -> None:
    """A mismatch counts under the path that was claimed; after some, one warning tells what may be behind it."""
    sentinel.judges(forward)
    for _ in range(PATIENCE - 1):
        lie(sentinel, graphs, forward, path)
    assert (caplog.text, forward.snapshot().causes) == ("", {})
    for _ in range(PATIENCE):
        lie(sentinel, graphs, forward, path)
    other = {"graph": "eager", "eager": "graph"}[path]
    assert forward.snapshot().unmatched == {path: 2 * PATIENCE - 1, other: 0}
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert f"toy: {PATIENCE} passes were counted as" in record.message
    assert word in record.message


def test_launches_of_another_thread_confirm_nothing(sentinel: Sentinel, graphs: ModuleType, forward: Forward) -> None:
    """A graph call must have launched in its own thread."""
    before = sentinel.launches()
    thread = threading.Thread(target=graphs.CUDAGraph().replay)
    thread.start()
    thread.join()
    sentinel.judge(forward, "graph", before)
    assert forward.snapshot().unmatched == {"graph": 1}


def test_ignored_passes_are_not_judged(sentinel: Sentinel, graphs: ModuleType, forward: Forward) -> None:
    """What is counted nowhere is not judged either."""
    with ignore():
        lie(sentinel, graphs, forward, "graph")
    assert forward.snapshot().unmatched == {}


@pytest.mark.parametrize("backend", ["cpu", "", "xpu"])
def test_nothing_is_judged_where_a_graph_is_no_launch(
    sentinel: Sentinel, graphs: ModuleType, ledger: Ledger, backend: str
) -> None:
    """Where a graph is no launch of CUDA's (SGLang's runner for CPUs), there is no judgement, and no metric of it."""
    forward = observe("toy", [4], source="engine", backend=backend, ledger=ledger).forward
    assert not sentinel.judges(forward)
    for path in ("graph", "eager"):
        lie(sentinel, graphs, forward, path)
    assert forward.snapshot().unmatched == {}


def test_nothing_is_told_before_it_is_placed(ledger: Ledger, graphs: ModuleType, forward: Forward) -> None:
    """Nothing is known, and nothing is told."""
    sentinel = Sentinel(ledger)
    lie(sentinel, graphs, forward, "graph")
    assert (sentinel.launches(), sentinel.judges(forward)) == (0, False)
    assert (forward.snapshot().unmatched, ledger.snapshot().replays_seen) == ({}, None)


def test_a_torch_for_cpus_is_left_alone(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build of torch for CPUs launches nothing: its class is left alone, and 0 is not told as a count."""
    graphs = stand_in(monkeypatch, graphs_module(), cuda=None, hip=None)
    before = graphs.CUDAGraph.replay
    Sentinel(ledger).place("toy")
    assert (graphs.CUDAGraph.replay, ledger.snapshot().replays_seen) == (before, None)


def test_launches_on_rocm_are_counted(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """ROCm's graphs are of the same class."""
    graphs = stand_in(monkeypatch, graphs_module(), cuda=None, hip="7.1")
    sentinel = Sentinel(ledger)
    sentinel.place("toy")
    graphs.CUDAGraph().replay()
    assert sentinel.launches() == 1


def test_a_class_in_place_of_torchs_is_counted_from_then_on(
    sentinel: Sentinel, graphs: ModuleType, forward: Forward, ledger: Ledger
) -> None:
    """Another tool's class in place of torch's: the first graph call says that, nobody knows of it, the next count."""
    launched = []
    theirs = type("CUDAGraph", (), {"replay": lambda graph: launched.append(graph)})
    vars(sys.modules["torch.cuda"])["CUDAGraph"] = theirs

    def serve(graph: Any) -> int:
        before = sentinel.launches()
        graph.replay()
        sentinel.judge(forward, "graph", before)
        return sentinel.launches() - before

    assert [serve(theirs()) for _ in range(3)] == [0, 1, 1]
    assert serve(graphs.CUDAGraph()) == 1
    assert (forward.snapshot().unmatched, ledger.snapshot().replays_seen, len(launched)) == ({}, 3, 3)
    before = sentinel.launches()
    sentinel.judge(forward, "graph", before)
    assert forward.snapshot().unmatched == {"graph": 1}
    sentinel.remove("toy")
    assert vars(theirs)["replay"].__name__ == "<lambda>"


def test_a_method_in_place_of_torchs_counts_a_launch_once(
    sentinel: Sentinel, graphs: ModuleType, forward: Forward
) -> None:
    """A tool that launches by itself, or through the method that was there: a launch counts once, whoever is around."""
    theirs = graphs.CUDAGraph.replay
    through = [False]
    graphs.CUDAGraph.replay = lambda graph: theirs(graph) if through[0] else None
    counted = []
    for through[0] in (False, False, True):
        before = sentinel.launches()
        graphs.CUDAGraph().replay()
        sentinel.judge(forward, "graph", before)
        counted.append(sentinel.launches() - before)
    assert (counted, forward.snapshot().unmatched) == ([0, 1, 1], {})


def test_a_wrapper_that_says_what_it_wraps_hides_nothing(
    sentinel: Sentinel, graphs: ModuleType, forward: Forward
) -> None:
    """A wrapper that says what it wraps hides nothing: a pass without a launch is a mismatch, nothing is rebound."""
    theirs = graphs.CUDAGraph.replay
    graphs.CUDAGraph.replay = wrapper = functools.wraps(theirs)(lambda graph: theirs(graph))
    sentinel.judge(forward, "graph", sentinel.launches())
    assert (forward.snapshot().unmatched, graphs.CUDAGraph.replay) == ({"graph": 1}, wrapper)
    graphs.CUDAGraph().replay()
    assert sentinel.launches() == 1


def test_a_class_that_cannot_be_counted_is_left_alone(sentinel: Sentinel, graphs: ModuleType, forward: Forward) -> None:
    """Where another tool's ``replay`` takes more than its graph it is left alone, and its passes are not judged."""
    theirs = type("CUDAGraph", (), {"replay": lambda graph, stream=None: stream})
    vars(sys.modules["torch.cuda"])["CUDAGraph"] = theirs
    for _ in range(3):
        assert theirs().replay(stream=5) == 5
        sentinel.judge(forward, "graph", sentinel.launches())
    assert forward.snapshot().unmatched == {}


def test_a_subclass_counts_through_its_base(sentinel: Sentinel, graphs: ModuleType, forward: Forward) -> None:
    """An engine's own subclass is torch's class for this."""
    theirs = type("Own", (graphs.CUDAGraph,), {})
    vars(sys.modules["torch.cuda"])["CUDAGraph"] = theirs
    theirs().replay()
    sentinel.judge(forward, "graph", sentinel.launches())
    assert (sentinel.launches(), forward.snapshot().unmatched) == (1, {"graph": 1})


def test_a_failure_of_ours_is_counted_and_not_seen_by_the_engine(
    sentinel: Sentinel, forward: Forward, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A fault of ours in a judgement is counted, and the engine sees nothing."""
    monkeypatch.delenv("GRAPHPROBE_STRICT")
    monkeypatch.setattr(forward, "unmatch", lambda path: 1 / 0)
    sentinel.judge(forward, "graph", sentinel.launches())
    assert errors.internal_errors == {"sentinel.judge": 1}


def test_a_torch_that_cannot_be_hooked_is_imported_all_the_same(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A torch of another shape is counted as a failure of ours; the import of torch goes on, and there is no count."""
    monkeypatch.delenv("GRAPHPROBE_STRICT")
    graphs = stand_in(monkeypatch, graphs_module())
    del graphs.CUDAGraph
    Sentinel(ledger).place("toy")
    assert (errors.internal_errors, ledger.snapshot().replays_seen) == ({"sentinel.bind": 1}, None)


# ---- blindness ----


def launch(graphs: ModuleType, times: int) -> None:
    graph = graphs.CUDAGraph()
    for _ in range(times):
        graph.replay()


def test_an_engine_that_launches_and_is_never_counted_is_told_of(
    sentinel: Sentinel, graphs: ModuleType, ledger: Ledger, forward: Forward, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine whose hooks are in place, that launches, and of which nothing was counted: one warning."""
    ledger.hooks["toy", "step"] = True
    launch(graphs, SILENT - 1)
    assert caplog.text == ""
    launch(graphs, 2 * SILENT)
    (record,) = caplog.records
    assert "toy: instrumented, but never called: 1,024 graph launches were seen, and none was counted" in record.message
    assert "never called" in forward.snapshot().causes["unseen"]


def test_an_engine_with_one_counted_call_is_not_told_of(
    sentinel: Sentinel, graphs: ModuleType, ledger: Ledger, forward: Forward, caplog: pytest.LogCaptureFixture
) -> None:
    """A single counted call, graph or eager, and there is no such warning."""
    ledger.hooks["toy", "step"] = True
    forward.eager_cell(5, "warmup")[0] += 1  # type: ignore[arg-type]
    launch(graphs, 2 * SILENT)
    assert caplog.text == ""


def test_launches_in_a_process_without_the_engine_are_not_told_of(
    sentinel: Sentinel, graphs: ModuleType, ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    """Where no hook was bound the engine runs in another process: these launches are somebody else's."""
    ledger.hooks["toy", "step"] = False
    ledger.hooks["other", "step"] = True
    launch(graphs, 2 * SILENT)
    assert caplog.text == ""


def test_an_engine_that_has_no_forward_yet_is_told_of(
    sentinel: Sentinel, graphs: ModuleType, ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor need the engine have a forward yet; those of ``capture`` are not the engine's."""
    ledger.hooks["toy", "step"] = True
    ledger.forward("mine", Buckets([4])).graph_cell(4, 4)[0] += 9
    launch(graphs, SILENT)
    assert "toy: instrumented, but never called" in caplog.text


# ---- the real torch ----


def test_torch_is_waited_for_and_not_imported(tmp_path: Path) -> None:
    """Before torch is there nothing is imported for it; with its import launches count."""
    for name, source in {
        "__init__": "from torch import version\nfrom torch import cuda\n",
        "version": "cuda, hip = '13.0', None\n",
        "cuda/__init__": "from torch.cuda.graphs import CUDAGraph\n",
        "cuda/graphs": "class CUDAGraph:\n    def replay(self):\n        return None\n",
    }.items():
        file = tmp_path / "torch" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)
    program = """
        import sys
        from graphprobe.ledger import LEDGER
        from graphprobe.sentinel import SENTINEL
        SENTINEL.place("toy")
        SENTINEL.place("toy")
        assert "torch" not in sys.modules and LEDGER.replays_seen is None
        import torch
        torch.cuda.CUDAGraph().replay()
        print(SENTINEL.launches(), LEDGER.replays_seen)
        """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[1]}", "GRAPHPROBE_STRICT": "1"},
        check=False,
    )
    assert (ended.stdout, ended.stderr) == ("1 [1]\n", "")


def test_the_torch_that_is_installed_is_bound_and_given_back(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its class is bound where it is defined, keeps its signature, and is as before afterwards."""
    import torch

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    before = vars(torch.cuda.CUDAGraph)["replay"]
    sentinel = Sentinel(ledger)
    sentinel.place("toy")
    try:
        assert sentinel.bound
        ours = torch.cuda.CUDAGraph.replay
        assert sentinel._knows(ours)
        assert inspect.signature(ours) == inspect.signature(before)
    finally:
        sentinel.remove("toy")
    assert vars(torch.cuda.CUDAGraph)["replay"] is before


def source(version: str) -> ast.Module:
    try:
        text = Wheel("torch", version, cache_folder()).text("torch/cuda/graphs.py")
    except Unavailable as error:
        pytest.skip(str(error))
    assert text is not None
    return ast.parse(text)


@pytest.mark.parametrize("version", BELOW)
def test_torch_without_hooks_has_a_replay_of_its_graph_alone(version: str) -> None:
    """The class is defined in this module, its ``replay`` takes nothing but the graph, and there is no hook to use."""
    tree = source(version)
    (kind,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "CUDAGraph")
    (method,) = (node for node in kind.body if isinstance(node, ast.FunctionDef) and node.name == "replay")
    assert ast.unparse(method.args) == "self"
    assert not any(getattr(node, "name", "") == "register_graph_replay_end_hook" for node in tree.body)


def test_hooks_of_torch_count_once_and_are_taken_back(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own ``replay`` and hooks of 2.14, over a launch that is a list's append: counted once, and taken back."""
    tree = source(HOOKS)
    wanted = {"_register_global_hook", "_run_global_hooks", "register_graph_replay_end_hook"}
    parts = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in wanted]
    parts += [n for n in tree.body if isinstance(n, ast.AnnAssign) and "_global_replay_" in ast.unparse(n.target)]  # type: ignore[misc]
    (kind,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "CUDAGraph")
    kind.body = [node for node in kind.body if isinstance(node, ast.FunctionDef) and node.name == "replay"]
    future = ast.parse("from __future__ import annotations\nfrom collections import OrderedDict").body
    module = types.ModuleType("torch.cuda.graphs")
    vars(module)["_CUDAGraph"] = device = type("_CUDAGraph", (), {"replay": lambda graph: launched.append(graph)})
    launched: list[Any] = []
    for name in ("_replay_start_hooks", "_replay_end_hooks"):
        setattr(device, name, {})
    device._tracker, device._has_graph_exec = None, True  # type: ignore[attr-defined]
    device._retained = types.SimpleNamespace(sync_before_fire=False)  # type: ignore[attr-defined]
    exec(compile(ast.Module([*future, *parts, kind], []), "graphs.py", "exec"), vars(module))  # noqa: S102 - it is torch's
    stand_in(monkeypatch, module)
    sentinel = Sentinel(ledger)
    sentinel.place("toy")
    module.CUDAGraph().replay()
    assert (sentinel.launches(), len(launched), len(module._global_replay_end_hooks)) == (1, 1, 1)
    forward = observe("toy", source="engine", backend="cuda", ledger=ledger).forward
    sentinel.judge(forward, "graph", sentinel.launches())
    assert forward.snapshot().unmatched == {"graph": 1}
    sentinel.remove("toy")
    assert not module._global_replay_end_hooks

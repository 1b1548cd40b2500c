"""What the SGLang integration hooks and reads is there in each release that is supported, with the arguments it uses.

The sources of the released wheels tell, file by file from the package index: SGLang itself is not installed.
"""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

import graphprobe_sglang
import graphprobe_sglang_passes
import graphprobe_sglang_watch
from graphprobe_sglang import DECODE, HOOKS, INTEGRATION, PREFILL, RUNNER
from tests.integrations.conditions import conditions
from tests.integrations.releases import RELEASES, Release, arguments, calls, find_all, kept, there
from tests.integrations.sglang_facts import (
    BATCH,
    FUNCTIONS,
    KEYS,
    PREDICATES,
    READ,
    USED,
    expected,
    span_of,
    words,
)

ENGINE = "sglang"
SCHEDULER = "sglang.srt.managers.scheduler"
UNCOUNTED = {"IDLE", "PREBUILT"}
"""SGLang's modes in which no request is served by a pass."""

GONE = dict.fromkeys(("start_legacy", "draft_eagle_legacy", "draft_eagle_extend_legacy"), "0.5.14")
"""Hooks that have had no place since a release: others have taken over."""


def test_the_releases_are_those_that_the_integration_claims() -> None:
    """The last one is read here, and the first one with reasons."""
    assert INTEGRATION.tested[1] == RELEASES[ENGINE][-1]
    assert INTEGRATION.tested[0] in RELEASES[ENGINE]


def test_every_hook_has_its_place(release: Release) -> None:
    """Where a module is there, so is the class or function that is wrapped, of all that is needed."""
    find_all(release, [hook for hook in there(release, HOOKS) if hook.needed])


def test_nothing_is_gone_since_the_release_before(release: Release) -> None:
    """A hook that the release before has a place for has it here, too: a part that moves must not go unseen."""
    find_all(release, kept(release, HOOKS, GONE))


def test_every_hook_is_for_some_release(every_release: list[Release]) -> None:
    """None of them is about a place that no supported release has."""
    find = [(hook, [r for r in every_release if r.find(hook.module, hook.attribute)]) for hook in HOOKS]
    assert [] == [hook.name for hook, found in find if not found]


def test_handlers_find_the_arguments_that_they_use(release: Release) -> None:
    """As the first ones, under the names by which SGLang may hand them on."""
    found = {}
    for hook in there(release, HOOKS):
        function = release.find(hook.module, hook.attribute)
        if hook.name in USED and isinstance(function, ast.FunctionDef):
            first = USED[hook.name].split()
            found[hook.name] = (first, arguments(function)[: len(first)])
    assert {} == {name: pair for name, pair in found.items() if pair[0] != pair[1]}


def test_handlers_call_them_the_same() -> None:
    """What SGLang hands on by name reaches its own function: the wrapper's arguments are named alike."""
    wrong = {}
    for hook in HOOKS:
        module, _, name = hook.handler.partition(":")
        handler = getattr(__import__(module), name)
        taken = [
            p for p in inspect.signature(handler(lambda *_: None)).parameters.values() if p.kind is not p.VAR_KEYWORD
        ]
        first = [p.name for p in taken if p.kind is not p.VAR_POSITIONAL][1:]
        if hook.name in USED and first != USED[hook.name].split():
            wrong[hook.name] = first
    assert {} == wrong


@pytest.mark.parametrize("owner", READ, ids=lambda owner: owner[1])
def test_what_is_read_is_there(release: Release, owner: tuple[str, str, str]) -> None:
    """Each attribute of SGLang's objects that sizes, reasons and figures come from."""
    module, name, span = owner
    if span_of(release, span):
        missing = set(words(release, READ[owner])) - release.attributes(module, name)
        assert not missing, f"{release}: {name} in {module} has no {', '.join(sorted(missing))}"


@pytest.mark.parametrize("place", FUNCTIONS, ids=lambda place: place[1])
def test_what_is_called_takes_these_arguments(release: Release, place: tuple[str, str, str]) -> None:
    """SGLang's own functions that are asked again for a reason or a figure."""
    module, name, span = place
    if span_of(release, span):
        assert FUNCTIONS[place].split() == arguments(release.function(module, name))


@pytest.mark.parametrize("place", PREDICATES, ids=lambda place: place[1])
def test_reasons_follow_the_order_of_these_conditions(release: Release, place: tuple[str, str, str]) -> None:
    """A condition that is new, gone or elsewhere fails with its text: whether reasons follow is to be looked at."""
    module, name, span = place
    if not span_of(release, span):
        return
    found = conditions(release.function(module, name))
    wanted = expected(release, PREDICATES[place])
    new = [condition.text for condition in found if set(condition.reads) - KEYS not in wanted]
    assert not new, f"{release}: {name} asks something new:\n" + "\n".join(new)
    assert wanted == [set(condition.reads) - KEYS for condition in found]


def position(function: ast.FunctionDef, text: str) -> int:
    """Where a function calls something; it does so once."""
    (call,) = calls(function, text)
    return call.lineno


def test_a_pass_asks_decode_first_then_prefill(release: Release) -> None:
    """Sizes are padded in place between the two, and split prefill is never asked."""
    if not span_of(release, "14-"):
        return
    function = release.function(RUNNER, "ModelRunner._forward_raw")
    order = ["decode_cuda_graph_runner.can_run_graph", "decode_cuda_graph_runner.execute"]
    order += ["_prepare_eager_forward_batch", "forward_split_prefill"]
    order += ["prefill_cuda_graph_runner.can_run_graph", "prefill_cuda_graph_runner.execute", "eager_runner.execute"]
    lines = [position(function, f"self.{name}") for name in order]
    assert sorted(lines) == lines


def test_a_pass_tells_its_path(release: Release) -> None:
    """``forward`` hands on what ``_forward_raw`` has made, with the path in it."""
    function = release.function(RUNNER, "ModelRunner.forward")
    assert 1 == len(calls(function, "self._forward_raw"))
    assert ["output"] == [ast.unparse(node.value) for node in ast.walk(function) if isinstance(node, ast.Return)]
    made = calls(release.function(RUNNER, "ModelRunner._forward_raw"), "ModelRunnerOutput")
    assert {"can_run_graph"} == {k.value.id for call in made for k in call.keywords if k.arg == "can_run_graph"}


def test_each_mode_of_a_pass_is_known(release: Release) -> None:
    """A new one would be counted nowhere."""
    kind = release.find(BATCH, "ForwardMode")
    assert isinstance(kind, ast.ClassDef)
    modes = {node.targets[0].id for node in kind.body if isinstance(node, ast.Assign)}
    assert set() == modes - set(graphprobe_sglang_passes.KINDS) - UNCOUNTED


def test_decode_and_prefill_are_told_apart_by_their_sizes(release: Release) -> None:
    """Only the runner of prefill has no list of numbers of requests."""
    if span_of(release, "14-"):
        assert "capture_bs" not in release.attributes(PREFILL, "PrefillCudaGraphRunner")


def test_captures_go_through_the_hooks(release: Release) -> None:
    """A runner captures while it is made, and its backend captures each graph."""
    if span_of(release, "14-"):
        for module, name in ((DECODE, "DecodeCudaGraphRunner"), (PREFILL, "PrefillCudaGraphRunner")):
            assert calls(release.function(module, f"{name}.__init__"), "self.capture"), name
            tree = release.tree(module)
            assert tree and "self.backend.capture_one" in ast.unparse(tree), name


def test_kinds_of_graphs_are_known_by_their_classes(release: Release) -> None:
    """How much of a pass they cover is told by these names."""
    module = graphprobe_sglang.BACKEND if span_of(release, "14-") else graphprobe_sglang.EXECUTOR
    named = graphprobe_sglang_watch.MODES if span_of(release, "14-") else graphprobe_sglang_watch.LEGACY
    for name, mode in named.items():
        kind = "tc_piecewise" if mode == "piecewise" and span_of(release, "14-") else mode
        end = "cuda_graph_backend" if span_of(release, "14-") else "cuda_graph_runner"
        assert isinstance(release.find(f"{module}.{kind}_{end}", name), ast.ClassDef), name
    if span_of(release, "14-"):
        eager = f"{graphprobe_sglang.EXECUTOR}.runner.eager_runner"
        assert isinstance(release.find(eager, graphprobe_sglang_watch.EAGER), ast.ClassDef)


def test_the_rank_of_a_replica_is_told(release: Release) -> None:
    """By the model runner (which ``READ`` has), by its ``ps``, or by the context of the process."""
    if span_of(release, "16-20"):
        assert "dp_rank" in release.attributes("sglang.srt.distributed.parallel_state_wrapper", "ParallelState")


def test_plugins_are_loaded_before_anything_else(release: Release) -> None:
    """A scheduler's process loads those of our group first thing, calls them without arguments, and survives them."""
    function = release.function(SCHEDULER, "run_scheduler_process")
    first = next(node for node in function.body if not isinstance(getattr(node, "value", None), ast.Constant))
    assert "load_plugins()" == ast.unparse(first)
    load = release.function("sglang.srt.plugins", "load_plugins")
    tried = [node for node in ast.walk(load) if isinstance(node, ast.Try)]
    assert any(ast.unparse(node.body[0]) == "func()" for node in tried)
    tree = release.tree("sglang.srt.plugins")
    assert tree and "GENERAL_PLUGINS_GROUP = 'sglang.srt.plugins'" in ast.unparse(tree)


def test_nothing_is_listed_here_that_the_integration_does_not_read() -> None:
    """The lists follow the code."""
    folder = Path(graphprobe_sglang.__file__).parent
    text = "\n".join(path.read_text() for path in folder.glob("graphprobe_sglang*.py"))
    listed = {word.partition(":")[0] for names in READ.values() for word in names.split()}
    listed |= {name.rpartition(".")[2] for _, name, _ in FUNCTIONS}
    assert set() == {name for name in listed if not re.search(rf"\b{name}\b", text)}
    assert set(USED) <= {hook.name for hook in HOOKS}

"""Hooks into an engine: a toy one, of two modules, that is imported when a test needs it."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import graphprobe
from graphprobe import errors
from graphprobe import instrument as instrument_function
from graphprobe.errors import ConfigError, DidNotInstrument
from graphprobe.ledger import LEDGER

instrument = importlib.import_module("graphprobe.instrument")

FILES = {
    "toy/__init__.py": '__version__ = "2.5.0"\n',
    "toy/runner.py": '''
        class Base:
            def inherited(self, n):
                return n

        class Runner(Base):
            def step(self, n: int, *, twice: bool = False) -> int:
                """Run a step."""
                return 2 * n if twice else n

        def choose(n):
            return n + 1

        NUMBER = 3
        ''',
    "toy/late.py": "def finish(n):\n    return n\n",
    "toy_handlers.py": """
        SEEN = []

        def count(original):
            def counted(*args, **kwargs):
                SEEN.append(original.__name__)
                return original(*args, **kwargs)
            return counted

        def broken(original):
            raise RuntimeError("no handler today")
        """,
    "toy_integration.py": """
        from graphprobe.instrument import Hook, Integration, Patches

        HOOKS = (
            Hook("step", "toy.runner", "Runner.step", "toy_handlers:count"),
            Hook("inherited", "toy.runner", "Runner.inherited", "toy_handlers:count"),
            Hook("choose", "toy.runner", "choose", "toy_handlers:count"),
            Hook("finish", "toy.late", "finish", "toy_handlers:count"),
        )
        INTEGRATION = Integration("toy", Patches("toy", HOOKS), (2, 1), ("2.4", "2.5"), ("toy-cpu", "toy"))
        """,
}


def forget() -> None:
    for name in [name for name in sys.modules if name.startswith("toy")]:
        del sys.modules[name]


@pytest.fixture(autouse=True)
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the toy engine, which nobody has imported."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(instrument, "INTEGRATIONS", {"toy": "toy_integration", "absent_engine": "toy_absent"})
    monkeypatch.setattr(LEDGER, "hooks", {})
    yield tmp_path
    graphprobe.uninstrument("toy")
    forget()


@pytest.fixture
def patches() -> Iterator[Callable[..., Any]]:
    """Makes patches of the toy engine with one hook each; removed at the end."""
    made: list[Any] = []

    def make(attribute: str, handler: str = "count", module: str = "toy.runner", needed: bool = True) -> Any:
        hook = instrument.Hook("one", module, attribute, f"toy_handlers:{handler}", needed)
        made.append(instrument.Patches("toy", [hook]))
        return made[-1]

    yield make
    for found in made:
        found.remove()


def bound() -> bool | None:
    """The gauge of the one hook; None where there is none."""
    return LEDGER.hooks.get(("toy", "one"))


def runner() -> ModuleType:
    return importlib.import_module("toy.runner")


def contents(module: ModuleType) -> list[dict[str, Any]]:
    """Everything that lies in the module and in its classes, by name."""
    return [dict(vars(found)) for found in (module, module.Runner, module.Base)]


def seen() -> list[str]:
    found: list[str] = importlib.import_module("toy_handlers").SEEN
    return found


def settle(found: str) -> None:
    importlib.import_module("toy").__version__ = found  # type: ignore[attr-defined]


# What cannot be observed


@pytest.mark.parametrize("engine", ["torch", "", None, ["toy"]])
@pytest.mark.parametrize("asked", [graphprobe.instrument, graphprobe.uninstrument])
def test_an_engine_that_is_not_known_is_an_error_that_names_those_that_are(asked: Any, engine: Any) -> None:
    with pytest.raises(ConfigError, match="toy, absent_engine") as told:
        asked(engine)
    assert repr(engine) in str(told.value)


def test_an_engine_that_is_not_installed_is_told_with_what_is_supported(toy: Path) -> None:
    text = (toy / "toy_integration.py").read_text().replace('"toy"', '"absent_engine"').replace("toy-cpu", "toy_absent")
    (toy / "toy_absent.py").write_text(text)
    with pytest.raises(DidNotInstrument, match=r"absent_engine: not found, supported 2\.1") as told:
        graphprobe.instrument("absent_engine")
    assert (told.value.engine, told.value.found) == ("absent_engine", None)
    assert told.value.supported == "2.1 and newer (tested with 2.4 to 2.5)"
    assert sys.executable in told.value.hint


@pytest.mark.parametrize("version", ["2.0.9", "1.9", "0.99.1+cu130", "2.0.0rc1"])
def test_a_version_that_is_too_old_is_told_and_nothing_is_placed(version: str) -> None:
    settle(version)
    with pytest.raises(DidNotInstrument) as told:
        graphprobe.instrument("toy")
    assert (told.value.found, told.value.hint) == (version, "update toy")
    runner()
    assert LEDGER.hooks == {}


@pytest.mark.parametrize("version", ["2.1", "2.10.3", "11.0.0+cpu", "0.1.dev1+g1234abc", "1.9.0.dev7", "unknown", ""])
def test_newer_ones_and_builds_of_a_checkout_are_tried(version: str) -> None:
    settle(version)
    graphprobe.instrument("toy")
    runner()
    assert LEDGER.hooks["toy", "step"]


@pytest.mark.parametrize("distribution", ["toy", "toy_cpu"])
def test_the_version_is_found_before_the_engine_is_imported_under_any_of_its_names(
    toy: Path, distribution: str
) -> None:
    info = toy / f"{distribution}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    with pytest.raises(DidNotInstrument, match=r"found 1\.0"):
        graphprobe.instrument("toy")
    assert "toy" not in sys.modules


def test_what_an_engine_loads_by_itself_is_warned_of_and_not_raised(said: Callable[[], list[str]]) -> None:
    settle("1.0")
    importlib.import_module("toy_integration").INTEGRATION.automatic()
    supported = "2.1 and newer (tested with 2.4 to 2.5)"
    assert said() == [f"toy: found 1.0, supported {supported}. hint: update toy; it runs as without graphprobe"]


def test_nor_is_a_failure_of_our_own(monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]]) -> None:
    found = importlib.import_module("toy_integration").INTEGRATION
    monkeypatch.setitem(sys.modules, "wrapt", None)
    found.automatic()
    assert said() == ["toy is not observed, and runs as without graphprobe"]


# Where hooks are bound


def test_hooks_bind_when_their_module_is_imported_and_nothing_is_imported_for_them() -> None:
    graphprobe.instrument("toy")
    assert LEDGER.hooks == {}
    assert "toy.runner" not in sys.modules and "toy_handlers" not in sys.modules
    assert runner().choose(1) == 2
    assert seen() == ["choose"]
    assert LEDGER.hooks == {("toy", name): True for name in ("step", "inherited", "choose")}


def test_hooks_of_a_module_that_is_imported_already_bind_at_once() -> None:
    runner()
    graphprobe.instrument("toy")
    assert runner().Runner().step(3, twice=True) == 6
    assert seen() == ["step"]


def test_an_engine_that_is_instrumented_twice_is_counted_once() -> None:
    graphprobe.instrument("toy")
    runner()
    graphprobe.instrument("toy")
    runner().choose(1)
    importlib.import_module("toy.late").finish(1)
    assert seen() == ["choose", "finish"]


def test_a_name_that_other_modules_have_imported_is_patched_only_where_it_was_named() -> None:
    runner().elsewhere = runner().choose
    graphprobe.instrument("toy")
    runner().elsewhere(1)
    assert seen() == []


def test_the_patched_function_looks_like_the_original() -> None:
    original = runner().Runner.step
    graphprobe.instrument("toy")
    patched = runner().Runner.step
    assert patched is not original and inspect.isfunction(patched)
    assert (patched.__name__, patched.__qualname__, patched.__doc__) == ("step", "Runner.step", "Run a step.")
    assert patched.__module__ == "toy.runner"
    assert inspect.signature(patched) == inspect.signature(original)
    assert inspect.unwrap(patched) is original


def test_the_patched_function_can_be_sent_to_another_process() -> None:
    graphprobe.instrument("toy")
    assert pickle.loads(pickle.dumps(runner().choose)) is runner().choose
    bound_method = pickle.loads(pickle.dumps(runner().Runner().step))
    assert bound_method(4) == 4


def test_a_subclass_that_overrides_a_patched_method_is_left_alone() -> None:
    graphprobe.instrument("toy")
    own = type("Own", (runner().Runner,), {"step": lambda self, n: -n})
    assert own().step(1) == -1
    assert seen() == []


# What is missing or fails


@pytest.mark.parametrize("attribute", ["Runner.gone", "Gone.step", "gone", "NUMBER", "Runner.step.deeper.still"])
def test_a_missing_place_is_a_gauge_of_0_and_one_warning(
    patches: Callable[..., Any], said: Callable[[], list[str]], attribute: str
) -> None:
    before = contents(runner())
    patches(attribute).place()
    assert bound() is False
    assert said() == [
        f"toy: hook one is not in place, and what it is for is not counted: this toy has no {attribute} in toy.runner"
    ]
    assert contents(runner()) == before
    assert errors.internal_errors == {}


def test_everything_else_is_bound_where_one_place_is_missing(toy: Path) -> None:
    (toy / "toy" / "runner.py").write_text("class Runner:\n    def step(self, n):\n        return n\n")
    graphprobe.instrument("toy")
    runner()
    assert LEDGER.hooks == {("toy", "step"): True, ("toy", "inherited"): False, ("toy", "choose"): False}


def test_nothing_is_said_of_a_place_that_not_every_release_has(
    patches: Callable[..., Any], said: Callable[[], list[str]]
) -> None:
    found = patches("Runner.gone", needed=False)
    found.place()
    runner()
    assert (bound(), said()) == (None, [])


def test_such_a_place_is_visible_where_it_is_there(patches: Callable[..., Any]) -> None:
    found = patches("Runner.step", needed=False)
    found.place()
    runner()
    assert bound() is True


@pytest.mark.parametrize("handler", ["broken", "missing"])
def test_a_handler_that_cannot_be_made_does_not_break_the_import(
    patches: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, handler: str
) -> None:
    monkeypatch.delenv("GRAPHPROBE_STRICT")
    found = patches("choose", handler)
    found.place()
    assert runner().choose(1) == 2
    assert bound() is False
    assert errors.internal_errors == {"toy.hook.one": 1}
    assert not hasattr(runner().choose, "__wrapped__")


def test_after_too_many_failures_everything_rests_and_that_is_said_once(
    patches: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]]
) -> None:
    monkeypatch.delenv("GRAPHPROBE_STRICT")
    found = patches("choose")
    found.place()
    for _ in range(instrument.PATIENCE - 1):
        found.failed("step", ValueError("of ours"))
    assert found.active
    found.failed("step", ValueError("of ours"))
    assert not found.active
    found.failed("step", ValueError("of ours"))
    assert [text for text in said() if "nothing more" in text] == [
        f"toy: nothing more is counted here, after {instrument.PATIENCE} failures of graphprobe"
    ]
    assert errors.internal_errors == {"toy.step": instrument.PATIENCE + 1}
    runner()
    assert bound() is None


def test_what_is_placed_again_has_patience_again(patches: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Not without end the second time, either."""
    monkeypatch.delenv("GRAPHPROBE_STRICT")
    found = patches("choose")
    for _ in range(2):
        found.place()
        for _ in range(instrument.PATIENCE - 1):
            found.failed("step", ValueError("of ours"))
        assert found.active
        found.failed("step", ValueError("of ours"))
        assert not found.active


def test_a_failure_of_our_own_is_raised_in_our_own_tests(patches: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="of ours"):
        patches("choose").failed("step", ValueError("of ours"))


# Taken away again


def test_uninstrument_restores_exactly_what_was_there() -> None:
    module = runner()
    before = contents(module)
    graphprobe.instrument("toy")
    assert "inherited" in vars(module.Runner)
    graphprobe.uninstrument("toy")
    assert contents(module) == before
    assert LEDGER.hooks == {}


def test_uninstrument_is_harmless_where_nothing_was_placed_and_may_be_called_twice() -> None:
    graphprobe.uninstrument("toy")
    graphprobe.instrument("toy")
    runner()
    for _ in range(2):
        graphprobe.uninstrument("toy")
        assert runner().choose(1) == 2
    assert seen() == []


def test_a_module_that_is_imported_after_uninstrument_is_left_alone() -> None:
    graphprobe.instrument("toy")
    graphprobe.uninstrument("toy")
    assert not hasattr(runner().choose, "__wrapped__")


def test_uninstrument_takes_the_gauges_of_missing_places_with_it(patches: Callable[..., Any]) -> None:
    """There is nothing any more that could miss them."""
    found = patches("Runner.gone")
    found.place()
    runner()
    found.remove()
    assert LEDGER.hooks == {}


def test_an_engine_can_be_instrumented_again() -> None:
    graphprobe.instrument("toy")
    runner()
    graphprobe.uninstrument("toy")
    importlib.import_module("toy.late")
    graphprobe.instrument("toy")
    runner().choose(1)
    importlib.import_module("toy.late").finish(1)
    assert seen() == ["choose", "finish"]
    assert LEDGER.hooks["toy", "choose"] and LEDGER.hooks["toy", "finish"]


def test_what_another_tool_has_put_around_ours_stays() -> None:
    graphprobe.instrument("toy")
    module = runner()
    ours = module.choose

    @functools.wraps(ours)
    def theirs(n: int) -> Any:
        return 100 * ours(n)

    module.choose = theirs
    graphprobe.uninstrument("toy")
    assert module.choose is theirs
    assert module.choose(1) == 200
    assert LEDGER.hooks == {}
    graphprobe.instrument("toy")
    seen().clear()
    module.choose(1)
    assert seen() == ["choose"]
    assert LEDGER.hooks["toy", "choose"]


def test_what_another_tool_has_taken_away_with_its_own_is_placed_again() -> None:
    """It put back what was there before both."""
    module = runner()
    original = module.choose
    graphprobe.instrument("toy")
    module.choose = functools.wraps(module.choose)(lambda n: n)
    graphprobe.uninstrument("toy")
    module.choose = original
    graphprobe.instrument("toy")
    seen().clear()
    module.choose(1)
    assert seen() == ["choose"]


# The names of the package


def test_instrument_is_a_function_whatever_was_imported_before() -> None:
    assert graphprobe.instrument is instrument_function
    for first in ("graphprobe.instrument", "graphprobe.metrics", "graphprobe.export.exporter"):
        code = f"import {first}, graphprobe; print(graphprobe.instrument.__name__, graphprobe.uninstrument.__name__)"
        told = subprocess.run([sys.executable, "-c", code], check=True, text=True, capture_output=True).stdout
        assert told.split() == ["instrument", "uninstrument"]


def test_a_table_of_hooks_cannot_be_changed_by_accident() -> None:
    hook = instrument.Hook("one", "toy.runner", "choose", "toy_handlers:count")
    with pytest.raises(dataclasses.FrozenInstanceError):
        hook.name = "two"

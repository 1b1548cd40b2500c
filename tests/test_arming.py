"""Python processes below `graphprobe run`: whatever starts them, the engine that they import is observed."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import graphprobe_arming
from graphprobe.cli.run import FOLDER
from graphprobe.instrument import INTEGRATIONS
from tests.armed import ENGINE, ROOT, bare, below_run, python, write
from tests.integrations.conftest import FAKE

COUNTED = "{'nanovllm': 1}"

AS_A_SCRIPT = "if __name__ == '__main__':\n"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with the toy engine and its integration."""
    return write(tmp_path / "site", ENGINE)


def script(site: Path, body: str) -> str:
    """The output of a script whose main part is ``body``, run as below `graphprobe run`."""
    path = write(site, {"script.py": "import job\n" + AS_A_SCRIPT + textwrap.indent(textwrap.dedent(body), "    ")})
    done = subprocess.run(
        [sys.executable, str(path / "script.py")],
        env=below_run(site),
        text=True,
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.strip()


def test_the_engines_are_those_that_have_an_integration() -> None:
    """They stand twice, so that a process which runs no engine need not import the package."""
    assert set(INTEGRATIONS) == set(graphprobe_arming.ENGINES)


def test_the_process_itself_is_observed(site: Path) -> None:
    """As soon as the engine has been imported; not without `graphprobe run`, nor where GRAPHPROBE says no."""
    code = "import job; print(job.step()[1])"
    assert python(code, below_run(site)) == (f"{COUNTED}\n", "", 0)
    assert python(code, bare(site)) == ("{}\n", "", 0)
    assert python(code, below_run(site) | {"GRAPHPROBE": "0"}) == ("{}\n", "", 0)


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_a_process_of_multiprocessing_is_observed(site: Path, method: str) -> None:
    """However it is started; a fork has its own counts."""
    body = f"""
    import multiprocessing
    context = multiprocessing.get_context({method!r})
    if {method == "fork"}:
        job.step()
    with context.Pool(1) as pool:
        pid, counted = pool.apply(job.step)
    print(counted, pid != job.os.getpid())
    """
    assert f"{COUNTED} True" == script(site, body)


def test_a_pool_of_concurrent_futures_is_observed(site: Path) -> None:
    """Of spawned processes, too."""
    body = """
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        print(pool.submit(job.step).result()[1])
    """
    assert COUNTED == script(site, body)


@pytest.mark.parametrize("between", ["", "sh -c", "env -- sh -c"])
def test_a_subprocess_is_observed(site: Path, between: str) -> None:
    """Of the same Python, below a shell too."""
    body = f"""
    import shlex, subprocess, sys
    command = [sys.executable, "-m", "child"]
    between = {between!r}.split()
    print(subprocess.check_output([*between, shlex.join(command)] if between else command, text=True).strip())
    """
    write(site, {"child.py": "import job\nprint(job.step()[1])\n"})
    assert COUNTED == script(site, body)


def test_children_are_observed_of_a_launcher_that_makes_pythonpath_of_sys_path(site: Path) -> None:
    """Its children are armed all the same, since the folder stays in `sys.path`."""
    body = """
    import os, subprocess, sys
    changed = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    print(subprocess.check_output([sys.executable, "-c", "import job; print(job.step()[1])"], env=changed, text=True))
    """
    assert COUNTED == script(site, body)


@pytest.mark.parametrize("option", ["-I", "-E", "-S"])
def test_an_isolated_python_is_left_alone(site: Path, option: str) -> None:
    """It does not read PYTHONPATH, or imports no `sitecustomize`: the engine runs, and is not counted."""
    code = f"import sys; sys.path[:0] = {[str(site), str(ROOT), str(ROOT / 'integrations')]}; import job"
    command = [sys.executable, option, "-c", f"{code}; print(job.step()[1])"]
    assert "{}\n" == subprocess.check_output(command, env=below_run(site), text=True)


def test_two_engines_in_one_process_are_observed(site: Path) -> None:
    """Also one whose package has no `__init__.py`."""
    code = """
    import job, minisgl.engine
    minisgl.engine.Engine().forward_batch(9)
    job.step((1, 2))
    print(job.counted())
    """
    assert python(code, below_run(site)) == ("{'minisgl': 1, 'nanovllm': 2}\n", "", 0)


def test_a_broken_integration_leaves_its_engine_as_it_is(site: Path) -> None:
    """One message; the others are observed."""
    code = "import sglang, job; print(sglang.__version__, job.step()[1])"
    out, err, status = python(code, below_run(site))
    assert (f"0.5.17 {COUNTED}\n", 0) == (out, status)
    assert err.startswith("sglang is not observed, and runs as without graphprobe\n")
    assert err.count("\nRuntimeError: no integration today") == 1


def test_an_engine_that_cannot_be_imported_fails_as_it_does(site: Path) -> None:
    """With its own exception and nothing of ours; a second try that works is observed."""
    write(site, {"nanovllm/__init__.py": "import absent\n"})
    code = """
    import job, sys, types
    try:
        import nanovllm
    except ImportError as error:
        print(error, "nanovllm" in sys.modules)
    sys.modules["absent"] = types.ModuleType("absent")
    import nanovllm.engine.model_runner as module
    loader = sys.modules["nanovllm"].__loader__
    print(type(loader).__name__, "exec_module" in vars(loader))
    module.ModelRunner().run_model(1)
    print(job.counted())
    """
    expected = f"No module named 'absent' False\nSourceFileLoader False\n{COUNTED}\n"
    assert python(code, below_run(site)) == (expected, "", 0)


def test_asking_whether_an_engine_is_there_arms_nothing(site: Path) -> None:
    """Libraries ask that of engines that they do not run; nothing of graphprobe is imported for it."""
    code = """
    import importlib.util, sys
    print(importlib.util.find_spec("nanovllm").name, importlib.util.find_spec("vllm"))
    print([name for name in sys.modules if name.startswith("graphprobe") or name == "wrapt"])
    """
    assert python(code, below_run(site)) == ("nanovllm None\n['graphprobe_arming']\n", "", 0)


def test_a_process_without_an_engine_pays_for_little() -> None:
    """No more modules than ours, and no thread: hardly any of the standard library is loaded for it."""
    code = "import sys; print(sorted(name for name in sys.modules if name != '__main__'))"
    with_us, without = (set(eval(python(code, env)[0])) for env in (below_run(), bare()))  # noqa: S307
    assert {"graphprobe_arming"} == with_us - without - {"__future__"}


def test_an_engine_with_a_plugin_is_armed_once() -> None:
    """By its own mechanism and by ours: one step is one call."""
    code = """
    import os, vllm, graphprobe_vllm
    graphprobe_vllm.register()
    import tests.integrations.engine as e
    e.Engine("v1", mode="NONE").start().step(1)
    print(e.rows())
    """
    expected = "{('decode', 1, 'disabled'): 1}\n"
    environment = below_run(FAKE)
    del environment["GRAPHPROBE_PORT"]
    assert (expected, 0) == python(code, environment)[::2]
    assert (expected, 0) == python(code.replace("graphprobe_vllm.register()", ""), environment)[::2]


OTHER = """
import os, sys
print("other", sorted(set(sys.modules) & {"sitecustomize"}), sys.modules["sitecustomize"].__file__ == __file__)
WORD = "kept"
"""

REMOVES_ITSELF = """
import os, sys
here = os.path.dirname(__file__)
print("remover")
sys.path.remove(here)
mine = sys.modules.pop("sitecustomize")
try:
    import sitecustomize
except ImportError:
    sys.modules["sitecustomize"] = mine
"""


@pytest.mark.parametrize("ours", [0, 1, 2])
def test_another_sitecustomize_is_run_as_without_us(site: Path, tmp_path: Path, ours: int) -> None:
    """Once, under its name, wherever it stands among those that hand on, as ddtrace's does."""
    remover = write(tmp_path / "remover", {"sitecustomize.py": REMOVES_ITSELF})
    other = write(tmp_path / "other", {"sitecustomize.py": OTHER})
    code = "import sys; print(sys.modules['sitecustomize'].WORD, sys.path)"
    without = python(code, bare(remover, other, site))
    environment = below_run(remover, other, site)
    folders = environment["PYTHONPATH"].split(os.pathsep)
    # Behind one that hands nothing on ours is not reached, nor would any other be.
    folders.insert(min(ours, 1), folders.pop(0))
    environment["PYTHONPATH"] = os.pathsep.join(folders)
    out, err, status = python(code, environment)
    assert (without[0], "", 0) == (out.replace(f"'{FOLDER}', ", ""), err, status)
    assert python("import job; print(job.step()[1])", environment)[0].endswith(f"{COUNTED}\n")


def test_an_error_in_another_sitecustomize_is_shown_as_without_us(site: Path, tmp_path: Path) -> None:
    """Python goes on, and the engine is observed."""
    other = write(tmp_path / "other", {"sitecustomize.py": "import not_there\n"})
    code = "import job, sys; print(job.step()[1], 'sitecustomize' in sys.modules)"
    found = python(code, below_run(other, site))
    assert f"{COUNTED} False\n" == found[0]
    assert "not_there" in found[1]
    assert python(code, bare(other, site))[1:] == found[1:]


def test_without_another_there_is_none() -> None:
    """`sitecustomize` is a module that cannot be imported, as without us."""
    code = """
    import sys
    for _ in range(2):
        try:
            import sitecustomize
        except ImportError as error:
            print(error.name, "sitecustomize" in sys.modules, sum("Watcher" in repr(f) for f in sys.meta_path))
    """
    if python("import sitecustomize", bare())[2] == 0:
        pytest.skip("this Python has a sitecustomize of its own")
    assert python(code, below_run()) == ("sitecustomize False 1\n" * 2, "", 0)


def test_opentelemetry_arms_what_its_own_sitecustomize_hides() -> None:
    """It hands nothing on, and loads entry points: ours is inert where `graphprobe run` is not above."""
    text = (ROOT / "pyproject.toml").read_text()
    assert (
        '[project.entry-points.opentelemetry_pre_instrument]\ngraphprobe = "graphprobe_arming:start_below_run"' in text
    )
    code = "import graphprobe_arming as a, sys; a.start_below_run(); print(type(sys.meta_path[0]).__name__)"
    hidden = below_run()
    hidden["PYTHONPATH"] = bare()["PYTHONPATH"]
    assert "Watcher\n" == python(code, hidden)[0]
    assert "Watcher\n" != python(code, bare(GRAPHPROBE="1"))[0]


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python without graphprobe."""
    folder = tmp_path_factory.mktemp("stranger")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    return str(folder / "bin" / "python")


def test_a_python_without_graphprobe_runs_as_without_us(site: Path, stranger: str) -> None:
    """It says so where it is COMMAND itself; what COMMAND starts may be anything, and is silent."""
    environment = below_run(site)
    environment["PYTHONPATH"] = os.pathsep.join((FOLDER, str(site)))
    code = "import job, sys; print(job.step()[1], 'sitecustomize' in sys.modules, len(sys.meta_path))"
    assert python(code, environment | {"GRAPHPROBE_RUN": "1"}, program=stranger) == ("{} False 3\n", "", 0)
    # The process that becomes COMMAND knows its number; a shell tells it here.
    line = f'GRAPHPROBE_RUN=$$ exec "{stranger}" -c "{code}"'
    done = subprocess.run(["sh", "-c", line], env=environment, text=True, capture_output=True, check=True)
    assert "{} False 3\n" == done.stdout
    assert re.fullmatch(rf"graphprobe: not installed for {re.escape(stranger)}, .*\n", done.stderr)


def test_any_python_can_read_our_sitecustomize() -> None:
    """It has none of the syntax that came with Python 3."""
    tree = ast.parse((Path(FOLDER) / "sitecustomize.py").read_text(), feature_version=(3, 4))
    new = (ast.FunctionDef, ast.AnnAssign, ast.JoinedStr, ast.Starred, ast.keyword, ast.ImportFrom, ast.With)
    assert not [node for node in ast.walk(tree) if isinstance(node, new)]
    assert ["sitecustomize.py"] == [path.name for path in Path(FOLDER).iterdir() if path.name != "__pycache__"]

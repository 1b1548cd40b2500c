"""An engine as small as one can be, its integration, and Python processes as `graphprobe run` starts them."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

from graphprobe.cli.run import armed

ROOT = Path(__file__).parents[1]

ENGINE = {
    "nanovllm/__init__.py": """
        from nanovllm.engine.model_runner import ModelRunner
        """,
    "nanovllm/engine/model_runner.py": """
        class ModelRunner:
            def run_model(self, size):
                return size
        """,
    "graphprobe_nanovllm.py": """
        from graphprobe.instrument import Hook, Integration, Patches
        from graphprobe.observe import observe

        HOOK = Hook("step", "nanovllm.engine.model_runner", "ModelRunner.run_model", "graphprobe_nanovllm:step")
        PATCHES = Patches("nanovllm", [HOOK])
        INTEGRATION = Integration("nanovllm", PATCHES, (0, 1), ("0.1", "0.2"), ("nano-vllm",))

        def step(original):
            probe = observe("nanovllm", [1, 2, 4], source="engine")

            def run_model(runner, size):
                probe.graph_call(size, size)
                return original(runner, size)

            return run_model
        """,
    # An integration that is broken, and an engine without __init__.py, as the real one.
    "graphprobe_sglang.py": "raise RuntimeError('no integration today')\n",
    "sglang/__init__.py": "__version__ = '0.5.17'\n",
    "minisgl/engine.py": "class Engine:\n    def forward_batch(self, size):\n        return size\n",
    "graphprobe_minisglang.py": """
        from graphprobe.instrument import Hook, Integration, Patches
        from graphprobe.observe import observe

        HOOK = Hook("step", "minisgl.engine", "Engine.forward_batch", "graphprobe_minisglang:step")
        PATCHES = Patches("minisgl", [HOOK])
        INTEGRATION = Integration("minisgl", PATCHES, (0, 1), ("0.1", "0.2"), ("minisgl",))

        def step(original):
            probe = observe("minisgl", [1, 2, 4], source="engine")

            def forward_batch(engine, size):
                probe.eager_call(size, "batch_too_large")
                return original(engine, size)

            return forward_batch
        """,
    "job.py": """
        import os
        import sys


        def step(sizes=(2,)):
            '''Run the engine in this process; the process, and what was counted in it.'''
            import nanovllm

            runner = nanovllm.ModelRunner()
            assert [runner.run_model(size) for size in sizes] == list(sizes)
            return os.getpid(), counted()


        def counted():
            ledger = sys.modules.get("graphprobe.ledger")
            found = {} if ledger is None else ledger.LEDGER.snapshot().forwards
            return {name: forward.graph_calls + forward.eager_calls for name, forward in found.items()}
        """,
}


def write(folder: Path, files: Mapping[str, str]) -> Path:
    """Files of Python code below ``folder``."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text).lstrip())
    return folder


def bare(*folders: Path | str, **settings: str) -> dict[str, str]:
    """An environment without ours; modules of ``folders`` come first, then those of the repository."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith(("GRAPHPROBE", "PROMETHEUS"))}
    return kept | {"PYTHONPATH": os.pathsep.join(map(str, (*folders, ROOT, ROOT / "integrations")))} | settings


def python(code: str, environment: Mapping[str, str], *, program: str = sys.executable) -> tuple[str, str, int]:
    """What a Python process prints to stdout and to stderr, and its exit status."""
    command = [program, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, env=dict(environment), text=True, capture_output=True, timeout=120, check=False)
    return done.stdout, done.stderr, done.returncode


def below_run(*folders: Path | str, table: bool = False, **settings: str) -> dict[str, str]:
    """The environment of a process that `graphprobe run` has started."""
    return armed(bare(*folders, **settings), None, None, table)

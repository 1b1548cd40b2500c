"""Ray below `graphprobe run`: actors and tasks run in processes of its own, which have no plugin of an engine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.armed import ENGINE, bare, below_run, write
from tests.dashboards.stack import free_port, until

PYTHON = os.environ.get("GRAPHPROBE_RAY") or os.environ.get("GRAPHPROBE_ENGINES") or sys.executable
"""Has ray, and what graphprobe needs."""

if subprocess.run([PYTHON, "-c", "import ray, wrapt"], capture_output=True, check=False).returncode:
    pytest.skip("needs ray: a Python that has it in GRAPHPROBE_RAY", allow_module_level=True)

SETTINGS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}

DRIVER = """
import json, os, sys
import job, ray

@ray.remote
class Actor:
    def step(self):
        return job.step()

ray.init(include_dashboard=False, **json.loads(sys.argv[1])) if len(sys.argv) > 1 else ray.init(num_cpus=1)
actor = Actor.remote()
found = [ray.get(actor.step.remote())]
del actor
found.append(ray.get(ray.remote(job.step).remote()))
print(json.dumps([os.getpid(), *found]))
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with the toy engine, its integration, and a driver."""
    return write(tmp_path / "site", ENGINE | {"driver.py": DRIVER})


def counted(site: Path, environment: dict[str, str], **options: Any) -> list[dict[str, int]]:
    """What was counted in the process of an actor and in that of a task, of which none is the driver's."""
    command = [PYTHON, str(site / "driver.py"), *([json.dumps(options)] if options else [])]
    env = environment | SETTINGS
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    driver, *found = json.loads(done.stdout.splitlines()[-1])
    assert driver not in [pid for pid, _ in found]
    return [calls for _, calls in found]


@pytest.fixture
def cluster(site: Path) -> Iterator[str]:
    """The address of a cluster that was started before, without us."""
    port = free_port()
    command = [PYTHON, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={port}", "--num-cpus=1"]
    command += ["--node-ip-address=127.0.0.1", "--include-dashboard=false"]
    log = site / "cluster.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, env=bare(site) | SETTINGS, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        until(lambda: "Ray runtime started" in log.read_text(), 120, "the start of Ray")
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_actors_and_tasks_of_a_driver_are_observed(site: Path) -> None:
    """Ray starts with the driver, and its workers have the driver's environment."""
    assert [{"nanovllm": 1}] * 2 == counted(site, below_run(site))


def test_a_cluster_that_was_there_before_is_told_by_the_driver(site: Path, cluster: str) -> None:
    """It has an environment of its own: two variables go with the job."""
    env = below_run(site)
    assert [{}] * 2 == counted(site, env, address=cluster)
    told = {"env_vars": {name: env[name] for name in ("GRAPHPROBE", "PYTHONPATH")}}
    assert [{"nanovllm": 1}] * 2 == counted(site, env, address=cluster, runtime_env=told)

"""What goes wrong around a real engine: it serves, fails and ends as it does without us."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from graphprobe.tools.check import check
from tests.dashboards.stack import free_port, until
from tests.engines.reading import calls, series, settled, value
from tests.engines.serving import STARTED, Engine, Site, distribution, needed

needed()

LINE = "export PROMETHEUS_MULTIPROC_DIR=$(mktemp -d)"

RAISING = '''
def register():
    """The forward of a prompt ZZZ raises."""
    from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

    forward = Qwen3ForCausalLM.forward

    def raising(self, input_ids, *args, **kwargs):
        if input_ids is not None and input_ids.tolist() == [ord("Z")] * 3:
            raise RuntimeError("no forward for Z")
        return forward(self, input_ids, *args, **kwargs)

    Qwen3ForCausalLM.forward = raising
'''


def ours(engine: Engine) -> list[str]:
    """The warnings of its log that are ours; in a traceback of the engine our frames are on the way."""
    told = (line for line in engine.said.splitlines() if " File " not in line and "INFO" not in line)
    return [line for line in told if "graphprobe" in line or "vllm: " in line]


def ended(engine: Engine, fault: str) -> tuple[int, bool]:
    """How a server ends by itself: its exit status, and whether it says ``fault``.

    What else it says on its way out differs from run to run.
    """
    until(lambda: not engine.alive, STARTED, "the end of the server")
    return engine.process.returncode, fault in engine.said


def test_a_list_of_plugins_without_ours_leaves_us_out(site: Site, tmp_path: Path) -> None:
    env = {"GRAPHPROBE": "1", "VLLM_PLUGINS": "another", "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    with site.serving(**env) as engine:
        engine.complete("abc")
        page = engine.page()
        assert value(page, "vllm:iteration_tokens_total_count") == 8
        assert not series(page, "graphprobe_")
        assert not ours(engine)


def test_a_missing_directory_ends_the_server_as_it_does_without_us(both: Callable[..., list[Engine]]) -> None:
    missing = "/proc/missing"
    seen = [
        ended(engine, f"No such file or directory: '{missing}") for engine in both(PROMETHEUS_MULTIPROC_DIR=missing)
    ]
    assert seen == [(1, True)] * 2


def test_a_directory_that_we_cannot_use_is_said_once(site: Site, tmp_path: Path) -> None:
    """A folder lies where our lock would: vLLM's own series stay."""
    (tmp_path / "graphprobe.start").mkdir()
    with site.serving(GRAPHPROBE="1", PROMETHEUS_MULTIPROC_DIR=str(tmp_path)) as engine:
        for _ in range(3):
            engine.complete("abc")
        page = engine.page()
        assert value(page, "vllm:iteration_tokens_total_count") == 24
        (said,) = ours(engine)
        assert f"cannot write metrics to {tmp_path}" in said


def test_without_a_way_out_one_line_says_what_to_do(plain: Engine, site: Site) -> None:
    """And vLLM's page has all that it has otherwise."""
    with site.serving(GRAPHPROBE="1") as engine:
        for _ in range(3):
            engine.complete("abc")
        page = engine.page()
        (said,) = ours(engine)
        assert LINE in said
    names = {name for name, _ in series(plain.page(), "vllm:")}
    assert names <= {name for name, _ in series(page, "vllm:")}


def test_a_port_of_our_own_has_the_same_counts(site: Site) -> None:
    port = free_port()
    with site.serving(GRAPHPROBE="1", GRAPHPROBE_PORT=str(port)) as engine:
        engine.complete("abc", tokens=9)
        own = f"http://127.0.0.1:{port}"
        found = settled(own)
        assert calls(found, "forward") == {"vllm": value(engine.page(), "vllm:iteration_tokens_total_count")}
        assert not check(f"{own}/metrics").findings
        assert not ours(engine)


def test_a_port_that_is_taken_is_said_once(site: Site) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        told, said = site.offline(GRAPHPROBE="1", GRAPHPROBE_PORT=port)
    assert [counted for _, counted in told["turns"]] == [5, 10, 15]
    assert said.count("counted, but served nowhere") == 1
    assert port in said.split("counted, but served nowhere", 1)[1].splitlines()[0]


def test_by_hand_it_can_be_switched_on_and_off(site: Site) -> None:
    told, said = site.offline()
    assert [counted for _, counted in told["turns"]] == [5, 5, 10]
    assert len({str(answers) for answers, _ in told["turns"]}) == 1
    assert said.count(LINE) == 1


@pytest.mark.parametrize("automatic", [True, False])
def test_a_release_that_is_too_old_is_left_alone(site: Site, automatic: bool) -> None:
    told, said = site.offline("0.19.1", **({"GRAPHPROBE": "1"} if automatic else {}))
    assert [counted for _, counted in told["turns"]] == [0, 0, 0]
    complaint = said if automatic else told["refused"]
    assert complaint.count("vllm: found 0.19.1, supported 0.20 and newer") == 1


def test_a_forward_that_raises_ends_the_server_as_it_does_without_us(
    both: Callable[..., list[Engine]], tmp_path: Path
) -> None:
    plugin = distribution(tmp_path / "raising", "raising", plugin=RAISING)
    seen = []
    for engine in [engine.wait() for engine in both(plugin=plugin)]:
        seen.append((engine.status("abc"), engine.status("ZZZ"), ended(engine, "RuntimeError: no forward for Z")))
        assert not ours(engine)
    assert seen[0] == seen[1]
    assert seen[0][:2] == (200, 500)
    assert seen[0][2][1]


def test_a_killed_worker_ends_the_server_as_it_does_without_us(both: Callable[..., list[Engine]]) -> None:
    seen = []
    for engine in [engine.wait() for engine in both()]:
        engine.complete("abc")
        (worker,) = engine.workers()
        os.kill(worker, signal.SIGKILL)
        seen.append(ended(engine, "died unexpectedly"))
    assert seen[0] == seen[1]
    assert seen[0][1]

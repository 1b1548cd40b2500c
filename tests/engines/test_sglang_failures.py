"""What goes wrong around a real SGLang: it serves, fails and ends as it does without us."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

from graphprobe.tools.check import check
from tests.dashboards.stack import free_port, until
from tests.engines.reading import calls, series, settled, value
from tests.engines.serving import STARTED, Engine, distribution, needed
from tests.engines.sglang_serving import GROUP, PYTHON, Server, Servers

needed(PYTHON, "SGLang")

WAYS_OUT = ("--enable-metrics", "GRAPHPROBE_PORT")

PRETENDING = '''
def register():
    """SGLang says that it is an old release."""
    import sglang

    sglang.__version__ = "0.5.10"
'''

RAISING = '''
import sys

import wrapt


def register():
    """The forward of a prompt ZZZ raises."""
    wrapt.register_post_import_hook(change, "sglang.srt.models.qwen3")


def change(module):
    forward = module.Qwen3ForCausalLM.forward

    def raising(self, input_ids, *args, **kwargs):
        if input_ids is not None and input_ids.tolist() == [ord("Z")] * 3:
            raise RuntimeError("no forward for Z")
        return forward(self, input_ids, *args, **kwargs)

    module.Qwen3ForCausalLM.forward = raising
'''

Twice = Callable[..., Iterator[Server]]


def ours(engine: Engine) -> list[str]:
    """The warnings of its log that are ours; in a traceback of the engine our frames are on the way."""
    usual = (" File ", " observes SGLang ", " serves the metrics of ")
    told = (line for line in engine.said.splitlines() if not any(text in line for text in usual))
    return [line for line in told if "graphprobe" in line.lower() or "] sglang: " in line]


def uncovered(engine: Engine) -> list[str]:
    """That some batches have no graph, which is said with every start of these servers."""
    return [line for line in ours(engine) if "have no CUDA graph" in line]


def ended(engine: Engine, fault: str) -> tuple[int | None, bool]:
    """How a server ends by itself: its exit status, and whether it says ``fault``."""
    until(lambda: not engine.alive, STARTED, "the end of the server")
    return engine.process.returncode, fault in engine.said


def test_a_list_of_plugins_without_ours_leaves_us_out(sglang: Servers) -> None:
    with sglang.serving("--enable-metrics", GRAPHPROBE="1", SGLANG_PLUGINS="another") as server:
        server.complete("abc")
        page = server.page()
        assert value(page, "sglang:cuda_graph_passes_total") >= 8
        assert not series(page, "graphprobe_")
        assert not ours(server)


def test_a_release_that_is_too_old_is_left_alone(sglang: Servers, tmp_path: Path) -> None:
    """Each process that loads plugins says so."""
    plugin = distribution(tmp_path / "pretending", "pretending", plugin=PRETENDING, group=GROUP)
    with sglang.serving("--enable-metrics", plugin=plugin, GRAPHPROBE="1") as server:
        assert len(server.complete("abc")[0]) == 8
        page = server.page()
    assert value(page, "sglang:cuda_graph_passes_total") >= 8
    assert not series(page, "graphprobe_")
    said = ours(server)
    assert said
    assert all("sglang: found 0.5.10, supported 0.5.11 and newer" in line for line in said)


def test_without_a_way_out_one_line_says_what_to_do(sglang: Servers) -> None:
    with sglang.serving(GRAPHPROBE="1") as server:
        for _ in range(3):
            server.complete("abc")
        (said,) = (line for line in ours(server) if line not in uncovered(server))
        assert all(way in said for way in WAYS_OUT)
        assert len(uncovered(server)) == 1


def test_without_its_page_a_port_of_our_own_has_the_counts(sglang: Servers) -> None:
    """The engine, which is a pass ahead, may run one more than it needs."""
    port = free_port()
    with sglang.serving(GRAPHPROBE="1", GRAPHPROBE_PORT=str(port)) as server:
        server.complete("abc", tokens=9)
        own = f"http://127.0.0.1:{port}"
        found = settled(own, forward="sglang")
        assert calls(found, "forward", "sglang")["sglang"] in (8, 9)
        assert calls(found, "forward", "sglang.prefill") == {"sglang.prefill": 1}
        assert not check(f"{own}/metrics").findings
        assert ours(server) == uncovered(server)


def test_a_forward_that_raises_ends_the_server_as_it_does_without_us(twice: Twice, tmp_path: Path) -> None:
    plugin = distribution(tmp_path / "raising", "raising", plugin=RAISING, group=GROUP)
    seen = []
    for server in twice("--enable-metrics", plugin=plugin):
        answer, refused = server.status("abc"), server.status("ZZZ")
        seen.append((answer, refused, ended(server, "RuntimeError: no forward for Z")))
        assert ours(server) == uncovered(server)
    assert seen[0] == seen[1]
    assert seen[0][0] == 200
    assert seen[0][2][1]


def test_a_killed_scheduler_ends_the_server_as_it_does_without_us(twice: Twice) -> None:
    seen = []
    for server in twice("--enable-metrics"):
        server.complete("abc")
        (scheduler,) = server.workers()
        os.kill(scheduler, signal.SIGKILL)
        seen.append(ended(server, "sglang::scheduler"))
        assert ours(server) == uncovered(server)
    assert seen[0] == seen[1]

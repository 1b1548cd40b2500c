"""What `make test-releases` tells of the newest release on a package index, which is a small one here."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import zipfile
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from tests.integrations.releases import RELEASES
from tests.servers import Server

ROOT = Path(__file__).parents[2]
FAKE = ROOT / "tests/integrations/fake"
LAST = RELEASES["vllm"][-1]
PLACES = "test_every_hook_has_its_place or test_nothing_is_gone"


class Index:
    """A package index of one project's wheels, which are made of the fake engine."""

    def __init__(self, server: Server) -> None:
        self.url = server.url
        self._wheels: dict[str, bytes] = {}
        server.reply = self._reply

    def add(self, version: str, without: str = "") -> None:
        """A release of the fake vLLM, in which one name is no longer there."""
        made = io.BytesIO()
        with zipfile.ZipFile(made, "w") as wheel:
            for path in sorted(FAKE.glob("vllm/**/*.py")):
                text = path.read_text()
                wheel.writestr(str(path.relative_to(FAKE)), text.replace(f"def {without}(", f"def {without}_moved("))
        self._wheels[f"vllm-{version}-py3-none-any.whl"] = made.getvalue()

    def _reply(self, handler: BaseHTTPRequestHandler) -> None:
        name = handler.path.rpartition("/")[2]
        if not name:
            kind, body = "application/vnd.pypi.simple.v1+json", json.dumps(self._page()).encode()
        else:
            kind, body = "application/octet-stream", self._wheels[name]
        first, last = re.findall(r"\d+", handler.headers["Range"]) if name else (0, len(body) - 1)
        part = body[int(first) : int(last) + 1]
        handler.send_response(206 if name else 200)
        handler.send_header("Content-Type", kind)
        handler.send_header("Content-Range", f"bytes {first}-{last}/{len(body)}")
        handler.send_header("Content-Length", str(len(part)))
        handler.end_headers()
        handler.wfile.write(part)

    def _page(self) -> dict[str, object]:
        return {"files": [{"filename": name, "url": f"{self.url}/files/{name}"} for name in self._wheels]}


@pytest.fixture
def index(server: Server) -> Index:
    """It has the last two releases that are always tested, whole."""
    made = Index(server)
    for version in RELEASES["vllm"][-2:]:
        made.add(version)
    return made


def run(url: str, cache: Path) -> subprocess.CompletedProcess[str]:
    """The tests of `make test-releases` that are about the places of hooks, for vLLM."""
    test = "tests/integrations/test_vllm_contract.py"
    command = [sys.executable, "-m", "pytest", "-q", "-rfEs", "-p", "no:cacheprovider", test, "-k", PLACES]
    settings = {"GRAPHPROBE_RELEASES": "newest", "PIP_INDEX_URL": url, "XDG_CACHE_HOME": str(cache)}
    return subprocess.run(command, cwd=ROOT, env=os.environ | settings, capture_output=True, text=True, check=False)


def test_a_newest_release_that_is_known_is_said_to_be(index: Index, tmp_path: Path) -> None:
    """Candidates of a later one do not count."""
    index.add("99.0rc1", without="execute_model")
    done = run(index.url, tmp_path)
    assert 0 == done.returncode, done.stdout
    assert f"vllm {LAST} is the newest release, and one of those that are always tested" in done.stdout


def test_a_newer_release_with_every_place_passes(index: Index, tmp_path: Path) -> None:
    """It is told that it may be added to the list."""
    index.add("99.0")
    done = run(index.url, tmp_path)
    assert 0 == done.returncode, done.stdout
    assert f"vllm 99.0 is the newest release, newer than {LAST}" in done.stdout
    assert "add it to RELEASES in tests/integrations/releases.py" in done.stdout


def test_a_newer_release_without_a_place_fails_with_it(index: Index, tmp_path: Path) -> None:
    """The place is named, with its module and its hook."""
    index.add("99.0", without="_model_forward")
    done = run(index.url, tmp_path)
    assert 1 == done.returncode, done.stdout
    place = "GPUModelRunner._model_forward in vllm.v1.worker.gpu_model_runner (hook forward_v1)"
    assert f"vllm 99.0 does not have: {place}" in done.stdout


def test_a_newest_release_that_cannot_be_read_fails(tmp_path: Path) -> None:
    """Without an index nothing is known, which must not look like a release in which all is well."""
    done = run("http://127.0.0.1:9", tmp_path)
    assert 0 != done.returncode
    assert "the newest release of vllm is not known: the package index cannot be read" in done.stdout

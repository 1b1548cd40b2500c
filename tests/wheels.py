"""Single files of a released wheel, read off the package index by byte ranges: the wheel itself is not downloaded.

The index is pip's. What was read once is kept in the user's cache folder, since a released file never changes.
"""

from __future__ import annotations

import html
import io
import json
import os
import re
import subprocess
import sys
import urllib.request
import zipfile
from email.message import Message
from functools import lru_cache
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

from packaging.version import Version

JSON = "application/vnd.pypi.simple.v1+json"
SECONDS = 20.0
NAMES = "names.json"


class Unavailable(Exception):
    """No index, no such file there, or no byte ranges: why."""


def get(url: str, **headers: str) -> tuple[bytes, Message]:
    """Body and headers of what lies at ``url``; of a range, where one is asked for."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=SECONDS) as answer:
            if "Range" in headers and answer.status != 206:
                raise Unavailable("the package index answers no byte ranges")
            return answer.read(), answer.headers
    except (OSError, HTTPException, ValueError) as error:
        raise Unavailable(f"the package index cannot be read: {error}") from error


@lru_cache(maxsize=1)
def index() -> str:
    """The simple index that pip asks first."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    told = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    found = re.search(r"^(?::env:|global|install)\.index-url='(.+)'$", told, re.MULTILINE)
    named = os.environ.get("PIP_INDEX_URL") or (found[1] if found else "")
    return (named or _default()).rstrip("/")


def _default() -> str:
    # pip's own, which it has in no public place.
    from pip._internal.models.index import PyPI

    return PyPI.simple_url


def files(project: str) -> dict[str, str]:
    """Names and addresses of all files of a project."""
    found = _listed(project)
    if isinstance(found, Unavailable):
        # A new one each time: one that is raised again and again grows a trace of all of them.
        raise Unavailable(str(found))
    return found


@lru_cache(maxsize=8)
def _listed(project: str) -> dict[str, str] | Unavailable:
    # A network that answers nothing is waited for once.
    page = f"{index()}/{project}/"
    try:
        body, headers = get(page, Accept=f"{JSON}, text/html;q=0.5")
    except Unavailable as error:
        return error
    text = body.decode()
    if "json" in headers.get_content_type():
        return {file["filename"]: urljoin(page, file["url"]) for file in json.loads(text)["files"]}
    links = [urljoin(page, html.unescape(link)) for link in re.findall(r'<a\b[^>]*?href="([^"#]+)', text)]
    return {link.rpartition("/")[2]: link for link in links}


def versions(project: str) -> list[str]:
    """Its releases that have a wheel, oldest first; no candidates."""
    start = f"{project}-"
    found = {name[len(start) :].split("-")[0] for name in files(project) if name.startswith(start) and ".whl" in name}
    return sorted((version for version in found if not Version(version).is_prerelease), key=Version)


def newest(project: str) -> str:
    """Its newest release."""
    found = versions(project)
    if not found:
        raise Unavailable(f"the package index has no wheel of {project}")
    return found[-1]


class Remote(io.RawIOBase):
    """A file on a server that answers byte ranges."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._at = 0
        _, headers = get(url, Range="bytes=0-0")
        self._size = int(headers["Content-Range"].rpartition("/")[2])

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        end = min(self._at + len(buffer), self._size)
        if end <= self._at:
            return 0
        body, _ = get(self._url, Range=f"bytes={self._at}-{end - 1}")
        buffer[: len(body)] = body
        self._at += len(body)
        return len(body)


class Wheel:
    """The text files of one release; the first file that is not in the cache opens the wheel."""

    def __init__(self, project: str, version: str, cache: Path) -> None:
        self._project, self._version = project, version
        self._folder = cache / f"{project}-{version}"
        self._archive: zipfile.ZipFile | None = None

    def names(self) -> frozenset[str]:
        """The paths of all files in it."""
        kept = self._folder / NAMES
        if not kept.exists():
            _keep(kept, json.dumps(self._open().namelist()))
        return frozenset(json.loads(kept.read_text()))

    def text(self, name: str) -> str | None:
        """The text of a file; None where the wheel has none of this name."""
        if name not in self.names():
            return None
        kept = self._folder / name
        if not kept.exists():
            _keep(kept, self._open().read(name).decode())
        return kept.read_text()

    def _open(self) -> zipfile.ZipFile:
        if self._archive is None:
            self._archive = archive(self._project, self._version)
        return self._archive


def archive(project: str, version: str, ahead: int = 1 << 16) -> zipfile.ZipFile:
    """The wheel of a release, of which each read brings ``ahead`` bytes. Any platform has the same Python files."""
    start = f"{project}-{version}-"
    found = sorted(name for name in files(project) if name.startswith(start) and name.endswith(".whl"))
    if not found:
        raise Unavailable(f"the package index has no wheel of {project} {version}")
    return zipfile.ZipFile(io.BufferedReader(Remote(files(project)[found[-1]]), ahead))


def cache_folder() -> Path:
    """Where files of releases are kept between runs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "graphprobe-tests"


def _keep(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.write_text(text)
    part.replace(path)

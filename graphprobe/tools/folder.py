"""A folder that is written again and again, and whose files people edit in between: nobody's edit is lost.

The folder remembers a hash of each file as it was written. What has that hash is ours and is brought up to date; what
has another one was edited and is kept, and what is missing was removed and stays away.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from graphprobe.errors import ConfigError

MANIFEST = ".graphprobe.json"
"""Where the hashes are, in the folder itself."""

ABOUT = "SHA-256 of each file as graphprobe wrote it; one that has another hash was edited, and is kept."


@dataclass(slots=True)
class Outcome:
    """What was done with each file, by its path below the folder."""

    written: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    """Not as they were written, so they stay as they are."""
    offered: dict[str, str] = field(default_factory=dict)
    """Kept, while we would write something new: what that is lies beside them, in this file."""
    removed: list[str] = field(default_factory=list)
    """Written once and gone since, so they stay away."""
    saved: dict[str, str] = field(default_factory=dict)
    """Overwritten by force: what was there is in this file now."""


def write(folder: str, files: Mapping[str, str], *, force: bool = False) -> Outcome:
    """Bring the files of a folder up to date, but for those that were edited or removed since they were written.

    ``force`` writes these, too, and keeps what was edited as ``NAME.bak``. ConfigError where the folder cannot be read
    or written, or has no name that could be shown.
    """
    if not folder or not folder.isprintable():
        raise ConfigError(f"DIR must be a name in printable characters, got {folder!r}", "write . for this folder")
    manifest = Path(folder, MANIFEST)
    before = _remembered(manifest)
    found = {name: _found(Path(folder, name)) for name in files}
    # An empty folder is a new one, whatever it remembers.
    known = before if any(content is not None for content in found.values()) else {}
    after, outcome = dict(known), Outcome()
    try:
        for name, text in files.items():
            _bring(Path(folder, name), name, text, found[name], after, force, outcome)
    finally:
        if after != before:
            _put(manifest, json.dumps({"about": ABOUT, "files": after}, indent=1) + "\n")
    return outcome


def _bring(
    path: Path, name: str, text: str, found: bytes | None, known: dict[str, str], force: bool, outcome: Outcome
) -> None:
    """Bring one file up to date, and what is known of it."""
    new, last = _hash(text.encode()), known.get(name)
    edited = found is not None and _hash(found) not in (new, last)
    beside = path.with_name(f"{path.name}.new")
    if found is None and last is not None and not force:
        outcome.removed.append(name)
        return
    if edited and not force:
        outcome.kept.append(name)
        if new != last or _found(beside) == text.encode():
            outcome.offered[name] = f"{name}.new"
            if (other := _found(beside)) is not None and _hash(other) not in (new, last):
                outcome.saved[f"{name}.new"] = str(Path(name).with_name(_save(beside)))
            _put(beside, text)
    else:
        if edited:
            outcome.saved[name] = str(Path(name).with_name(_save(path)))
        if found != text.encode():
            _put(path, text)
            outcome.written.append(name)
        _drop(beside, last)
    known[name] = new


def _drop(beside: Path, last: str | None) -> None:
    """Remove what was offered and has been taken over."""
    with _explained("remove", beside):
        if last is not None and beside.is_file() and _hash(beside.read_bytes()) == last:
            beside.unlink()


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _remembered(manifest: Path) -> dict[str, str]:
    try:
        told = json.loads(_found(manifest) or b"{}")
        return {str(name): str(value) for name, value in told.get("files", {}).items()}
    except (ValueError, AttributeError, RecursionError):
        # Of a folder that cannot remember, everything that differs is kept.
        return {}


def _found(path: Path) -> bytes | None:
    with _explained("read", path):
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return None


def _save(path: Path) -> str:
    """Copy a file beside itself, over no other copy; the name."""
    content = path.read_bytes()
    for number in count():
        copy = path.with_name(f"{path.name}.bak{number or ''}")
        with _explained("write", copy):
            if not copy.exists():
                shutil.copy2(path, copy)
            if copy.read_bytes() == content:
                return copy.name
    raise AssertionError("numbers do not end")


def _put(path: Path, text: str) -> None:
    # Beside it first: a full disk leaves no half of a file, which the next run would take for a change.
    new = path.with_name(f".{path.name}.{os.getpid()}")
    with _explained("write", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            new.write_text(text, "utf-8")
            if path.exists():
                shutil.copymode(path, new)
            new.replace(path)
        finally:
            new.unlink(missing_ok=True)


@contextlib.contextmanager
def _explained(what: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        hint = "name a folder that you may write, on a disk with space"
        raise ConfigError(f"cannot {what} {path}: {error.strerror or error}", hint) from error

"""A figure of matplotlib (the extra ``graphprobe[plot]``), written into a file."""

from __future__ import annotations

import html
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from graphprobe.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = (".png", ".svg", ".html")

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{title}</title>
<style>body {{ margin: 2rem auto; max-width: 60rem }} svg {{ width: 100%; height: auto }}</style>
</head>
<body>
{svg}
</body>
</html>
"""


def kind_of(path: str | os.PathLike[str]) -> str:
    """The kind of picture that a file's name asks for; ConfigError for another one."""
    kind = Path(path).suffix.lower()
    if kind not in KINDS:
        raise ConfigError(f"cannot draw into {str(path)!r}", f"end it in one of: {', '.join(KINDS)}")
    return kind


def write(path: str | os.PathLike[str], figure: Callable[[], Figure], title: str) -> None:
    """Draw ``figure`` into ``path``, a .png, .svg or .html file that is overwritten; the same figure, the same bytes.

    ConfigError where the kind of file is another one, where it cannot be written, and where matplotlib is missing.
    """
    target, kind = Path(path), kind_of(path)
    content = _drawn(figure, "png" if kind == ".png" else "svg")
    if kind == ".html":
        svg = content.decode("utf-8")
        content = PAGE.format(title=html.escape(title), svg=svg[svg.index("<svg") :]).encode("utf-8")
    try:
        target.write_bytes(content)
    except OSError as error:
        raise ConfigError(f"cannot write {str(target)!r}: {error.strerror or error}") from error


def _drawn(figure: Callable[[], Figure], kind: str) -> bytes:
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("drawing needs matplotlib", "pip install 'graphprobe[plot]'") from error
    out = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "graphprobe"}):
        figure().savefig(out, format=kind, metadata={"Date": None} if kind == "svg" else None)
    return out.getvalue()

"""Lays the Python files of vLLM's wheels into a folder, as VERSION/vllm: ``python -m tests.engines.vllm_trees FOLDER``.

A wheel is 300 MB, its Python files are 20 of them: only those are read, off the package index by byte ranges.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.integrations.releases import RELEASES
from tests.wheels import archive


def lay(version: str, folder: Path, project: str = "vllm", ends: tuple[str, ...] = (".py",)) -> int:
    """The Python files of one release; how many there are. Nothing is done where they are there already."""
    done = folder / version / project
    if done.is_dir():
        return 0
    part = folder / f"{version}.part"
    # In the order in which they lie in the wheel, so that one read brings many.
    with archive(project, version, 1 << 20) as wheel:
        found = sorted((i for i in wheel.infolist() if i.filename.endswith(ends)), key=lambda i: i.header_offset)
        for one in found:
            wheel.extract(one, part)
    part.rename(folder / version)
    return len(found)


def main() -> None:
    """All releases that the integration is tested with."""
    if len(sys.argv) != 2:
        sys.exit("usage: python -m tests.engines.vllm_trees FOLDER")
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for version in RELEASES["vllm"]:
        print(f"vllm {version}: {lay(version, folder) or 'there already'}", flush=True)


if __name__ == "__main__":
    main()

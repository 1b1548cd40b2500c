"""Lays SGLang's releases into a folder, without what is compiled: ``python -m tests.engines.sglang_trees FOLDER``."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.engines.vllm_trees import lay

RELEASES = ("0.5.14", "0.5.17", "0.5.23")
"""Those that run beside the one that is installed: the oldest and the newest, and the last for torch 2.11."""

FILES = (".py", ".json", "METADATA")


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python -m tests.engines.sglang_trees FOLDER")
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for version in RELEASES:
        print(f"sglang {version}: {lay(version, folder, 'sglang', FILES) or 'there already'}", flush=True)


if __name__ == "__main__":
    main()

"""``python -m graphprobe.cli``: the command without its script."""

from __future__ import annotations

from graphprobe.cli import main

if __name__ == "__main__":
    main()

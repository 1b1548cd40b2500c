"""Writes the dashboards: ``python -m dashboards.generate``. Needs grafana-foundation-sdk and Python 3.11."""

from __future__ import annotations

from pathlib import Path

from dashboards.overview import overview
from dashboards.tuning import tuning

HERE = Path(__file__).parent
PAGES = {"overview.json": overview, "tuning.json": tuning}


def main() -> None:
    """Write each beside this file."""
    for name, page in PAGES.items():
        (HERE / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()

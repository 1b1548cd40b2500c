"""Draws the dashboards with Grafana's own components: ``python -m dashboards.preview.draw FOLDER``.

It writes docs/overview.png and docs/tuning.png. In FOLDER a copy of this one is built, with the packages that npm
installs.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from dashboards.preview import scene
from tests.dashboards.backfill import backfill
from tests.dashboards.pages import PAGES, variables
from tests.dashboards.served import Served, Values, answered, everything, options
from tests.dashboards.stack import ROOT, Prometheus, binary

WIDTH = 1600
GRID = {"columns": 24, "cell": 30, "gap": 8, "edge": 16, "head": 104}
"""Pixels, but for the columns: Grafana's grid, the edge of the page, and what is above the first row."""


def main() -> None:
    """Everything, in the order in which it is needed."""
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    try:
        chromium, shown = binary("chromium"), scenes()
    except pytest.skip.Exception as missing:
        raise SystemExit(str(missing)) from None
    folder = Path(sys.argv[1]).absolute()
    build(folder)
    (folder / "dist" / "build" / "data.json").write_text(json.dumps(shown))
    for name, page in PAGES.items():
        picture = ROOT / "docs" / f"{name}.png"
        command = ["node", "draw.mjs", chromium, str(picture), f"?page={name}", str(WIDTH), str(height(page))]
        if subprocess.run(command, cwd=folder).returncode:
            raise SystemExit(f"{picture.name} was not drawn")
        print(f"docs/{picture.name}: {picture.stat().st_size // 1000} kB")


def build(folder: Path) -> None:
    """The page, in ``folder``."""
    source, lock = Path(__file__).parent, "package-lock.json"
    others = shutil.ignore_patterns("node_modules", "dist", "*.py", "__pycache__")
    shutil.copytree(source, folder, dirs_exist_ok=True, ignore=others)
    installed = folder / "node_modules" / lock
    if not installed.is_file() or installed.read_bytes() != (source / lock).read_bytes():
        subprocess.run(["npm", "ci"], cwd=folder, check=True)
        shutil.copy(source / lock, installed)
    subprocess.run(["npm", "run", "--silent", "build"], cwd=folder, check=True)


def scenes() -> dict[str, Any]:
    """What each dashboard shows of the scene."""
    with tempfile.TemporaryDirectory() as folder:
        blocks = Path(folder)
        processes = backfill(binary("promtool"), blocks, scene.TIMES, scene.HISTORIES, scene.ALERTS)
        with Prometheus("{}", blocks) as prometheus:
            served = Served(prometheus, processes, scene.END, scene.SHOWN)
            return {name: shown(served, page, everything(scene.JOB)) for name, page in PAGES.items()}


def shown(served: Served, page: dict[str, Any], values: Values) -> dict[str, Any]:
    """What a dashboard shows: its queries with their answers, the variables, and when an alert fired."""
    panels = [panel for panel in page["panels"] if panel["type"] != "row"]
    (alerts,) = page["annotations"]["list"]
    times = [[when * 1000 for when, _ in found["values"]] for found in answered(served, alerts, values)]
    return {
        "dashboard": page,
        "grid": GRID,
        "answers": {p["id"]: {t["refId"]: answered(served, t, values) for t in p["targets"]} for p in panels},
        "from": (served.end - served.seconds) * 1000,
        "to": served.end * 1000,
        "range": f"Last {served.seconds // 3600} hours",
        "alerts": [{"from": when[0], "to": when[-1]} for when in times],
        "chosen": {"Data source": "Prometheus"} | chosen(served, page, values),
    }


def chosen(served: Served, page: dict[str, Any], values: Values) -> dict[str, str]:
    """The variables. One that offers a single value has that, the others all."""
    offered = {variable["label"]: options(served, variable, values) for variable in variables(page)}
    return {label: found[0] if len(found) == 1 else "All" for label, found in offered.items()}


def height(page: dict[str, Any]) -> int:
    """Pixels down to the lower end of a dashboard."""
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in page["panels"])
    return GRID["head"] + (GRID["cell"] + GRID["gap"]) * rows + GRID["gap"]


if __name__ == "__main__":
    main()

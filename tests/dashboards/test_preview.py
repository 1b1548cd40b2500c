"""The pictures of the dashboards, and what draws them."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path

import pytest

from dashboards.preview import draw, scene
from tests.dashboards.pages import PAGES

ROOT = Path(__file__).parents[2]
PREVIEW = ROOT / "dashboards" / "preview"


@pytest.mark.parametrize("name", PAGES)
def test_a_picture_has_the_size_of_its_dashboard(name: str) -> None:
    """Where panels were moved, `make picture` has been run; a page loads it in a moment."""
    picture = (ROOT / "docs" / f"{name}.png").read_bytes()
    assert b"\x89PNG\r\n\x1a\n" == picture[:8]
    assert (draw.WIDTH, draw.height(PAGES[name])) == struct.unpack(">II", picture[16:24])
    assert len(picture) < 600_000


def test_packages_are_pinned_without_addresses() -> None:
    """Exact versions, which are those of the lock file; nobody's registry is in it."""
    wanted = json.loads((PREVIEW / "package.json").read_text())["dependencies"]
    packages = json.loads((PREVIEW / "package-lock.json").read_text())["packages"]
    assert wanted == {name: packages[f"node_modules/{name}"]["version"] for name in wanted}
    assert not [name for name, package in packages.items() if "resolved" in package]


def test_every_kind_of_panel_can_be_drawn() -> None:
    """The page knows each type that the dashboards have."""
    kinds = re.search(r"KINDS = {(.*)}", (PREVIEW / "src" / "panels.jsx").read_text())
    types = {panel["type"] for page in PAGES.values() for panel in page["panels"]} - {"row"}
    assert kinds is not None
    assert types == set(re.findall(r"(\w+):", kinds[1]))


def test_alerts_of_the_scene_are_in_the_rules() -> None:
    """With their severity and the time that they wait."""
    yaml = pytest.importorskip("yaml")
    rules = yaml.safe_load((ROOT / "dashboards" / "rules.yaml").read_text())["groups"]
    known = {rule["alert"]: rule for group in rules for rule in group["rules"] if "alert" in rule}
    for alert in scene.ALERTS[scene.JOB]:
        rule = known[alert.name]
        assert (rule["labels"]["severity"], rule["for"]) == (alert.severity, f"{alert.waits}m")

"""``graphprobe dashboards DIR``: what it writes is valid, fits together, runs, and replaces nobody's work."""

from __future__ import annotations

import inspect
import json
import os
import re
import resource
import shlex
import subprocess
import sys
import urllib.request
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from graphprobe.cli import app
from graphprobe.errors import ConfigError
from graphprobe.export.exporter import start_exporter
from graphprobe.ledger import Ledger
from graphprobe.observe import observe
from graphprobe.tools.dashboards import TARGET, Installation, contents
from graphprobe.tools.folder import MANIFEST, write
from tests.dashboards.stack import OPENER, Alertmanager, Prometheus, binary, until

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "dashboards"
BOARDS = sorted(path.name for path in SOURCES.glob("*.json"))
OBJECTS = ("service", "servicemonitor", "prometheusrule", "configmap")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["dashboards", *arguments])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What the command writes without options."""
    done = run(str(tmp_path / "stack"))
    assert (done.exit_code, done.stderr) == (0, "")
    return tmp_path / "stack"


def below(folder: Path) -> dict[str, bytes]:
    """The files of a folder, but for what it remembers."""
    files = [path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def parsed(text: str) -> Any:
    return yaml.safe_load(text)


def kubernetes(folder: Path, name: str) -> Any:
    return parsed((folder / "kubernetes" / f"{name}.yaml").read_text())


# What is written


def test_everything_parses(folder: Path) -> None:
    """Each file is what its ending says, and no slot of a template is left open."""
    files = below(folder)
    kinds = {name: Path(name).suffix for name in files}
    assert set(kinds.values()) == {".yaml", ".yml", ".json", ".md"}
    for name, kind in kinds.items():
        text = files[name].decode()
        assert text.endswith("\n") and "\n\n\n" not in text
        assert (json.loads if kind == ".json" else parsed)(text) if kind != ".md" else text
    templates = {name for name in files if name != "prometheus/runbook.md" and not name.endswith(".json")}
    opened = {name for name in templates if "${" in files[name].decode().partition("\ndata:\n")[0]}
    assert opened == set()


def test_sources_are_handed_on_as_they_are(folder: Path) -> None:
    """Rules, runbook and dashboards are those of the repository, byte for byte."""
    for name, place in [("rules.yaml", "prometheus"), ("runbook.md", "prometheus")]:
        assert (folder / place / name).read_bytes() == (SOURCES / name).read_bytes()
    assert {"overview.json", "tuning.json"} <= set(BOARDS)
    assert sorted(path.name for path in (folder / "grafana" / "dashboards").iterdir()) == BOARDS
    for name in BOARDS:
        assert (folder / "grafana" / "dashboards" / name).read_bytes() == (SOURCES / name).read_bytes()


def test_promtool_accepts_the_configuration(folder: Path, promtool: str) -> None:
    """The configuration and the rules beside it are valid, found from any folder."""
    at = folder / "prometheus"
    config = subprocess.run([promtool, "check", "config", at / "prometheus.yml"], capture_output=True, text=True)
    assert config.returncode == 0, config.stderr
    assert "1 rule files found" in config.stdout
    rules = subprocess.run([promtool, "check", "rules", at / "rules.yaml"], capture_output=True, text=True)
    assert rules.returncode == 0, rules.stderr


def test_amtool_accepts_the_configuration(folder: Path) -> None:
    """Alertmanager's own check finds one receiver, the root route and the inhibit rules."""
    tool = binary("amtool")
    at = folder / "alertmanager" / "alertmanager.yml"
    done = subprocess.run([tool, "check-config", at], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "1 receivers" in done.stdout


def test_alerts_that_are_inhibited_exist(folder: Path) -> None:
    """Alertmanager names alerts and labels that the rules have."""
    config = parsed((folder / "alertmanager" / "alertmanager.yml").read_text())
    groups = parsed((folder / "prometheus" / "rules.yaml").read_text())["groups"]
    alerts = [rule for group in groups for rule in group["rules"] if "alert" in rule]
    for rule in config["inhibit_rules"]:
        for matchers in (rule["source_matchers"], rule["target_matchers"]):
            found = dict(re.fullmatch(r'(\w+) =~? "?([^"]+)"?', matcher).groups() for matcher in matchers)
            fitting = [a for a in alerts if re.fullmatch(found["alertname"], a["alert"])]
            assert [a for a in fitting if found.get("severity") in (None, a["labels"]["severity"])], matchers
        assert rule["equal"] == ["job", "instance", "rank", "forward"]


def test_compose_finds_its_files_and_listens_on_loopback_alone(folder: Path) -> None:
    """Each mount exists, each image has a version, and each service can reach the exporter and be reached from here."""
    compose = parsed((folder / "compose.yaml").read_text())
    assert set(compose["services"]) == {"prometheus", "alertmanager", "grafana"}
    for service in compose["services"].values():
        assert re.fullmatch(r"[a-z]+/[a-z]+:v?\d+\.\d+\.\d+", service["image"])
        assert service["network_mode"] == "host"
        mounts = [mount.split(":") for mount in service["volumes"]]
        assert all((folder / source).is_dir() for source, _, _ in mounts[:-1])
        assert [mode for _, _, mode in mounts[:-1]] == ["ro"] * (len(mounts) - 1)
        assert mounts[-1][0] in compose["volumes"]
    assert {listens(compose, name).partition(":")[0] for name in compose["services"]} == {"127.0.0.1"}
    assert "--cluster.listen-address=" in compose["services"]["alertmanager"]["command"]


def listens(compose: Any, name: str) -> str:
    """Where a service of the compose file can be reached."""
    service = compose["services"][name]
    if name == "grafana":
        return "{GF_SERVER_HTTP_ADDR}:{GF_SERVER_HTTP_PORT}".format(**service["environment"])
    prefix = "--web.listen-address="
    return next(word.removeprefix(prefix) for word in service["command"] if word.startswith(prefix))


def inside(compose: Any, name: str, path: str) -> str:
    """What ``path`` inside a container is on the host, relative to the compose file."""
    mounts = (mount.split(":")[:2] for mount in compose["services"][name]["volumes"])
    source, target = max((m for m in mounts if path.startswith(m[1])), key=lambda m: len(m[1]))
    return path.replace(target, source, 1)


def test_services_know_each_other(folder: Path) -> None:
    """Grafana asks this Prometheus and reads these dashboards, Prometheus sends to this Alertmanager."""
    compose = parsed((folder / "compose.yaml").read_text())
    prometheus = parsed((folder / "prometheus" / "prometheus.yml").read_text())
    provisioning = folder / "grafana" / "provisioning"
    (source,) = parsed((provisioning / "datasources" / "graphprobe.yaml").read_text())["datasources"]
    (provider,) = parsed((provisioning / "dashboards" / "graphprobe.yaml").read_text())["providers"]
    assert (source["type"], source["url"]) == ("prometheus", f"http://{listens(compose, 'prometheus')}")
    assert source["jsonData"]["timeInterval"] == prometheus["global"]["scrape_interval"]
    assert Path(inside(compose, "grafana", provider["options"]["path"])) == Path("grafana/dashboards")
    (manager,) = prometheus["alerting"]["alertmanagers"]
    assert manager == {"static_configs": [{"targets": [listens(compose, "alertmanager")]}]}
    for name in ("prometheus", "alertmanager"):
        (flag,) = (w for w in compose["services"][name]["command"] if w.startswith("--config.file="))
        assert (folder / inside(compose, name, flag.partition("=")[2])).is_file()
    for name in ("datasources", "dashboards"):
        found = inside(compose, "grafana", f"/etc/grafana/provisioning/{name}")
        assert Path(found) == Path("grafana/provisioning", name)


# Kubernetes


def test_prometheusrule_has_the_rules(folder: Path) -> None:
    """A PrometheusRule is the same rules under ``spec``, comments included."""
    found = kubernetes(folder, "prometheusrule")
    assert (found["apiVersion"], found["kind"]) == ("monitoring.coreos.com/v1", "PrometheusRule")
    assert found["spec"] == parsed((SOURCES / "rules.yaml").read_text())
    text = (folder / "kubernetes" / "prometheusrule.yaml").read_text()
    comments = re.findall(r"^ *#.*", (SOURCES / "rules.yaml").read_text(), re.M)
    missing = [c for c in comments if f"  {c}\n" not in text]
    assert [c for c in missing if "runbook.md lies beside this file" not in c] == []


def test_configmap_has_the_dashboards(folder: Path) -> None:
    """Each dashboard is an entry of its own, unchanged, and all fit into what ``kubectl apply`` can annotate."""
    found = kubernetes(folder, "configmap")
    assert (found["apiVersion"], found["kind"]) == ("v1", "ConfigMap")
    assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert found["data"] == {f"graphprobe-{name}": (SOURCES / name).read_text() for name in BOARDS}
    assert len(json.dumps(found)) < 262_144


def test_servicemonitor_finds_the_service(folder: Path) -> None:
    """The selector, the port and the job label of one are what the other has; the port is the exporter's."""
    service, monitor = kubernetes(folder, "service"), kubernetes(folder, "servicemonitor")
    assert (monitor["apiVersion"], monitor["kind"]) == ("monitoring.coreos.com/v1", "ServiceMonitor")
    assert (service["apiVersion"], service["kind"]) == ("v1", "Service")
    (condition,) = monitor["spec"]["selector"]["matchExpressions"]
    assert condition == {"key": "graphprobe-job", "operator": "Exists"}
    assert service["metadata"]["labels"][monitor["spec"]["jobLabel"]] == "graphprobe"
    (endpoint,) = monitor["spec"]["endpoints"]
    (port,) = service["spec"]["ports"]
    assert (endpoint["port"], endpoint["path"]) == (port["name"], "/metrics")
    assert port["port"] == port["targetPort"] == inspect.signature(start_exporter).parameters["port"].default
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"graphprobe-job": "graphprobe"}


def test_objects_have_names_and_no_namespace_unless_it_is_given(folder: Path) -> None:
    """Without one, ``kubectl -n`` decides."""
    names = {kubernetes(folder, name)["metadata"]["name"] for name in OBJECTS}
    assert names == {"graphprobe", "graphprobe-dashboards"}
    assert ["namespace" in kubernetes(folder, name)["metadata"] for name in OBJECTS] == [False] * 4


def test_namespace_and_labels_are_on_each_object(tmp_path: Path) -> None:
    """Beside the labels that the object has anyway."""
    options = ["--namespace", "serving", "--label", "release=prom", "--label", "example.org/team=", "--job", "llama.8b"]
    assert run(str(tmp_path), *options).exit_code == 0
    own = {
        "service": {"graphprobe-job": "llama.8b"},
        "servicemonitor": {},
        "prometheusrule": {},
        "configmap": {"grafana_dashboard": "1"},
    }
    for name in OBJECTS:
        metadata = kubernetes(tmp_path, name)["metadata"]
        given_labels = {"app.kubernetes.io/name": "graphprobe", "release": "prom", "example.org/team": ""}
        assert metadata["namespace"] == "serving"
        assert metadata["labels"] == given_labels | own[name]
    assert kubernetes(tmp_path, "service")["spec"]["selector"] == {"graphprobe-job": "llama.8b"}


# Options


def scrape_config(text: str) -> tuple[str, list[str]]:
    (config,) = parsed(text)["scrape_configs"]
    (static,) = config["static_configs"]
    return config["job_name"], static["targets"]


def test_the_exporter_of_this_machine_is_scraped(folder: Path) -> None:
    """By default where ``start_exporter`` listens by default."""
    of = inspect.signature(start_exporter).parameters
    expected = f"{of['addr'].default}:{of['port'].default}"
    assert scrape_config((folder / "prometheus" / "prometheus.yml").read_text()) == ("graphprobe", [expected])


def test_targets_and_job(tmp_path: Path, promtool: str) -> None:
    """Each target once, in the given order, in a form that Prometheus takes."""
    given_targets = ["gpu-1:9464", "10.0.0.7:9465", "[::1]:9464", "gpu-1:9464", "under_score.local:1"]
    options = [word for target in given_targets for word in ("--target", target)]
    assert run(str(tmp_path), "--job", "1", *options).exit_code == 0
    config = tmp_path / "prometheus" / "prometheus.yml"
    assert scrape_config(config.read_text()) == ("1", [*given_targets[:3], given_targets[4]])
    assert subprocess.run([promtool, "check", "config", config], capture_output=True).returncode == 0


@pytest.mark.parametrize(
    ("url", "page"),
    [
        ("https://wiki.example/ops/", "https://wiki.example/ops/runbook.md"),
        ("https://wiki.example/x/runbook.md?plain=1", "https://wiki.example/x/runbook.md?plain=1"),
        ("http://[::1]:80/p", "http://[::1]:80/p"),
    ],
)
def test_runbook_url(tmp_path: Path, url: str, page: str) -> None:
    """Every alert links to its section at that address, in both files, and nothing else of the rules changes."""
    assert run(str(tmp_path), "--runbook-url", url).exit_code == 0
    before = parsed((SOURCES / "rules.yaml").read_text())
    written = (tmp_path / "prometheus" / "rules.yaml").read_text()
    alerts = [rule for group in before["groups"] for rule in group["rules"] if "alert" in rule]
    for rule in alerts:
        rule["annotations"]["runbook_url"] = f"{page}#{rule['alert'].lower()}"
    assert parsed(written) == kubernetes(tmp_path, "prometheusrule")["spec"] == before
    assert len(alerts) == written.count(f"runbook_url: {page}#") > 5
    assert "relative" not in written


@cache
def page_of(url: str) -> Any:
    return parsed(f"url: {url}#x")["url"]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(
    job=st.text(max_size=8) | st.sampled_from(["null", "true", "1e3", "0x1f", "~", "2024-01-01", "${job}", "a: b"]),
    label=st.text(max_size=8) | st.sampled_from(["a=null", "a=1", "a/b=no", "a=b=c", "=", "a=${x}", "a=b\n"]),
    url=st.text(max_size=8).map("http://{}".format)
    | st.sampled_from(["http://x: y", "http://x #", "https://x/$1?a={{"]),
)
def test_what_is_accepted_is_read_as_it_was_written(job: str, label: str, url: str) -> None:
    """Whatever text a value is, it is refused, or comes out of the YAML as the same text."""
    values = {"job": job, "labels": (label,), "runbook_url": url, "namespace": job, "targets": (url,)}
    for name, value in values.items():
        try:
            made = Installation(**{name: value})  # type: ignore[arg-type]
        except ConfigError:
            continue
        files = contents(made)
        service = parsed(files["kubernetes/service.yaml"])
        assert service["spec"]["selector"]["graphprobe-job"] == made.job
        assert scrape_config(files["prometheus/prometheus.yml"]) == (made.job, list(made.targets))
        assert service["metadata"].get("namespace") == made.namespace
        assert all(service["metadata"]["labels"][k] == v for k, _, v in (text.partition("=") for text in made.labels))
        if made.runbook_url:
            assert page_of(made.runbook_url) == f"{made.runbook_url}#x"


# A folder that has files already


def test_twice_is_quiet(folder: Path) -> None:
    """The second run writes nothing and says so."""
    times = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    done = run(str(folder))
    assert (done.exit_code, done.stdout.splitlines()[0]) == (0, f"{folder} is up to date")
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == times


def edit(path: Path, text: str = "mine\n") -> str:
    path.write_text(text)
    return text


def lines(done: Result) -> list[str]:
    """What was done, one line for each file."""
    assert done.exit_code == 0, done.stderr
    return str(done.stdout).partition("\nnext, one of:\n")[0].strip().split("\n")


def test_other_options_bring_what_is_unedited_up_to_date(folder: Path) -> None:
    """Files that nobody touched follow the options, and the run that says them again is quiet."""
    options = ["--target", "a:1", "--target", "b:2", "--namespace", "engines", "--runbook-url", "https://x/"]
    done = run(str(folder), *options)
    written = ["prometheus/prometheus.yml", *(f"kubernetes/{name}.yaml" for name in OBJECTS), "prometheus/rules.yaml"]
    assert lines(done) == [f"wrote {folder}/{name}" for name in written]
    assert scrape_config((folder / "prometheus" / "prometheus.yml").read_text()) == ("graphprobe", ["a:1", "b:2"])
    assert lines(run(str(folder), *options)) == [f"{folder} is up to date"]
    assert run(str(folder)).exit_code == 0
    assert below(folder) == {name: text.encode() for name, text in contents(Installation()).items()}


def test_an_edited_file_is_kept_and_the_others_are_written(folder: Path) -> None:
    """The receivers that an operator named outlive a new target; nothing is new there, so nothing lies beside."""
    mine = edit(folder / "alertmanager" / "alertmanager.yml")
    done = run(str(folder), "--target", "a:1")
    kept = f"kept {folder}/alertmanager/alertmanager.yml, which is not as graphprobe wrote it"
    force = "--force writes these, too, and saves what was edited as NAME.bak"
    assert lines(done) == [f"wrote {folder}/prometheus/prometheus.yml", kept, force]
    assert (folder / "alertmanager" / "alertmanager.yml").read_text() == mine
    assert scrape_config((folder / "prometheus" / "prometheus.yml").read_text()) == ("graphprobe", ["a:1"])
    assert [path.name for path in (folder / "alertmanager").iterdir()] == ["alertmanager.yml"]
    assert lines(run(str(folder), "--target", "a:1")) == [f"{folder} is up to date", kept, force]
    assert "alerts reach nobody" not in done.stdout


def test_what_is_new_in_an_edited_file_lies_beside_it(folder: Path) -> None:
    """It is named until it is taken over or thrown away; taken over, the file is ours again."""
    config = folder / "prometheus" / "prometheus.yml"
    beside = folder / "prometheus" / "prometheus.yml.new"
    mine = edit(config, config.read_text() + "# mine\n")
    expected = [
        f"kept {config}, which is not as graphprobe wrote it; what graphprobe would write now is in {beside}",
        "--force writes these, too, and saves what was edited as NAME.bak",
    ]
    for _ in range(2):
        assert lines(run(str(folder), "--target", "a:1")) == expected
        assert config.read_text() == mine
        assert beside.read_text() == contents(Installation(("a:1",)))["prometheus/prometheus.yml"]
    beside.unlink()
    assert lines(run(str(folder), "--target", "a:1"))[1] == f"kept {config}, which is not as graphprobe wrote it"
    assert not beside.exists()
    assert lines(run(str(folder), "--target", "b:2"))[0].endswith(f"is in {beside}")
    config.write_bytes(beside.read_bytes())
    assert lines(run(str(folder), "--target", "c:3")) == [f"wrote {config}"]
    assert not beside.exists()


def test_a_file_of_that_name_that_is_not_ours_is_saved(folder: Path) -> None:
    """What lies where the new one would be is nobody's loss either."""
    edit(folder / "compose.yaml")
    edit(folder / "prometheus" / "prometheus.yml")
    edit(folder / "prometheus" / "prometheus.yml.new", "of others\n")
    assert f"saved {folder}/prometheus/prometheus.yml.new.bak" in run(str(folder), "--job", "other").stdout
    assert (folder / "prometheus" / "prometheus.yml.new.bak").read_text() == "of others\n"


def test_a_removed_file_stays_away(folder: Path) -> None:
    """Who has no use for the Service need not remove it after each run; an emptied folder is a new one."""
    for name in ("service", "servicemonitor"):
        (folder / "kubernetes" / f"{name}.yaml").unlink()
    expected = [
        f"left out {folder}/kubernetes/{name}.yaml, which was removed" for name in ("service", "servicemonitor")
    ]
    assert lines(run(str(folder), "--namespace", "engines"))[2:4] == expected
    assert not (folder / "kubernetes" / "service.yaml").exists()
    edit(folder / "kubernetes" / "service.yaml")
    assert f"kept {folder}/kubernetes/service.yaml" in run(str(folder)).stdout
    assert f"wrote {folder}/kubernetes/servicemonitor.yaml" in run(str(folder), "--force").stdout
    for name in below(folder):
        (folder / name).unlink()
    assert len(lines(run(str(folder)))) == len(contents(Installation()))


def test_files_that_were_there_before_are_kept(tmp_path: Path) -> None:
    """In a folder that graphprobe never wrote to, a file of that name is somebody's; so it is without the memory."""
    mine = edit(tmp_path / "compose.yaml")
    done = run(str(tmp_path))
    assert f"kept {tmp_path}/compose.yaml, which is not as graphprobe wrote it; what graphprobe" in done.stdout
    assert ((tmp_path / "compose.yaml").read_text(), len(below(tmp_path))) == (mine, len(contents(Installation())) + 1)
    for text in ("", "{", "[]", '{"files": 1}', '{"files": {"compose.yaml": 1}}', "[" * 100_000, "\xff"):
        edit(tmp_path / MANIFEST, text)
        mine = edit(tmp_path / "prometheus" / "prometheus.yml", f"{text[:9]} mine\n")
        assert f"kept {tmp_path}/prometheus/prometheus.yml" in run(str(tmp_path), "--job", "other").stdout
        assert (tmp_path / "prometheus" / "prometheus.yml").read_text() == mine


def test_force_writes_everything_and_saves_what_was_edited(folder: Path) -> None:
    """Copies have their modes and replace no other copy; files of others stay."""
    original = below(folder)
    compose = folder / "compose.yaml"
    for number, suffix in enumerate(("bak", "bak1", "bak2")):
        edit(compose, f"mine {number}\n")
        compose.chmod(0o600)
        (folder / "prometheus" / "runbook.md").unlink()
        edit(folder / "prometheus" / "my_rules.yaml", "groups: []\n")
        written = [f"wrote {compose}", f"wrote {folder}/prometheus/runbook.md"]
        assert lines(run(str(folder), "--force")) == [
            *written,
            f"saved {compose}.{suffix}, which is compose.yaml as it was",
        ]
        assert (folder / f"compose.yaml.{suffix}").stat().st_mode & 0o777 == 0o600
    copies = {f"compose.yaml.{s}": f"mine {n}\n".encode() for n, s in enumerate(("bak", "bak1", "bak2"))}
    assert below(folder) == original | copies | {"prometheus/my_rules.yaml": b"groups: []\n"}
    edit(compose, "mine 1\n")
    assert f"saved {compose}.bak1, " in run(str(folder), "--force").stdout
    assert lines(run(str(folder), "--force")) == [f"{folder} is up to date"]
    assert below(folder) == original | copies | {"prometheus/my_rules.yaml": b"groups: []\n"}


def test_an_update_keeps_the_mode_of_a_file(folder: Path) -> None:
    """Who made it readable for the user of a container finds it so."""
    config = folder / "prometheus" / "prometheus.yml"
    config.chmod(0o640)
    assert f"wrote {config}" in run(str(folder), "--job", "other").stdout
    assert config.stat().st_mode & 0o777 == 0o640


# What goes wrong


@pytest.mark.parametrize(
    "options",
    [
        *(["--target", target] for target in ("", "x", "x:", ":1", "x:0", "x:65536", "x:1/m", "http://x:1", "a b:1")),
        *(["--target", target] for target in ('x":1', "x:1\n", "x:1,y:2", "::1:9464", "[x]:1", "x:\u0661")),
        *(["--job", job] for job in ("", "-", "a b", "a\n", 'a"', "ä", 64 * "a", "${job}")),
        *(["--namespace", name] for name in ("", "A", "a.b", "-a", 64 * "a")),
        *(["--label", label] for label in ("", "a", "=b", "a=b c", "a=b=c", "A/b=c", "a=${x}", "a=-")),
        *(["--label", label] for label in ("graphprobe-job=x", "grafana_dashboard=0")),
        *(
            ["--runbook-url", url]
            for url in ("", "wiki", "ftp://x", "https://", "https://x#y", "https://x y", "file:///x")
        ),
    ],
    ids=" ".join,
)
def test_bad_options(tmp_path: Path, options: list[str]) -> None:
    """A value that fits nowhere is named in one line, exit code 2, and nothing is written."""
    done = run(str(tmp_path / "stack"), *options)
    assert (done.exit_code, done.stdout) == (2, "")
    assert re.fullmatch(r"graphprobe: .+\n", done.stderr)
    assert options[0].removeprefix("--") in done.stderr
    assert not (tmp_path / "stack").exists()


def test_bad_folders(tmp_path: Path) -> None:
    """A folder that is a file, lies below one, cannot be made or is nothing at all: one line and exit code 2."""
    (tmp_path / "file").write_text("")
    (tmp_path / "half" / "compose.yaml").mkdir(parents=True)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    names = ["file", "file/x", "half", "loop", 300 * "x", "bad\udcff"]
    for folder in ["", "/sys/graphprobe", *(str(tmp_path / name) for name in names)]:
        done = run(folder)
        assert (done.exit_code, done.stdout) == (2, ""), folder
        assert re.fullmatch(r"graphprobe: .+\n", done.stderr)
    assert [str(path) for path in below(tmp_path)] == ["file"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_folder_of_somebody_else(tmp_path: Path) -> None:
    """A folder that may not be written to is named, with the system's reason."""
    tmp_path.chmod(0o500)
    done = run(str(tmp_path))
    assert (done.exit_code, done.stdout) == (2, "")
    assert "Permission denied" in done.stderr


def test_no_space(tmp_path: Path) -> None:
    """Where a file does not fit it is not there at all, so that the next run completes the folder."""
    files = contents(Installation())
    kept = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4_000, kept[1]))
    try:
        with pytest.raises(ConfigError, match=r"cannot write .*/kubernetes/prometheusrule.yaml: File too large\. hint"):
            write(str(tmp_path), files)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, kept)
    first = list(files)[: list(files).index("kubernetes/prometheusrule.yaml")]
    assert below(tmp_path) == {name: files[name].encode() for name in first}
    assert f"wrote {tmp_path}/compose.yaml" not in (done := run(str(tmp_path), "--job", "other")).stdout
    assert f"wrote {tmp_path}/prometheus/prometheus.yml" in done.stdout
    assert "kept" not in done.stdout
    assert run(str(tmp_path)).exit_code == 0
    assert below(tmp_path) == {name: text.encode() for name, text in files.items()}


# The real thing


def test_next_commands_name_what_was_written(tmp_path: Path) -> None:
    """A folder with a space and a quote in its name is quoted as a shell wants it."""
    folder = tmp_path / "it's here"
    done = run(f"{folder}/")
    found = re.findall(r"^  (?!-)(.*)|(?<=reach nobody until )(.*)(?= names)", done.stdout, re.M)
    words = [word.partition("=")[2] or word for line in found for word in shlex.split("".join(line), comments=True)]
    words = [word for word in words if str(folder) in word]
    assert words == [
        str(folder / name)
        for name in ("compose.yaml", "kubernetes", "prometheus/prometheus.yml", "alertmanager/alertmanager.yml")
    ]
    assert all(Path(word).exists() for word in words)


def test_next_steps_say_what_kubernetes_needs(tmp_path: Path) -> None:
    """What else fails without an error; and of the options only those that were not given."""
    bare = run(str(tmp_path), "--job", "llama").stdout
    for step in (
        "  - label the pods graphprobe-job=llama, in the pod template",
        'graphprobe.start_exporter(addr="0.0.0.0")',
        "  - --namespace NAME, where the engines run",
        "  - --label release=NAME, ",
        "an engine whose own /metrics is scraped already needs neither service.yaml nor servicemonitor.yaml",
        "--runbook-url URL, where it is served",
    ):
        assert step in bare
    given_options = ["--namespace", "engines", "--label", "release=x", "--runbook-url", "https://x/"]
    told = run(str(tmp_path), "--job", "llama", *given_options).stdout
    assert not re.findall("--namespace|--label|--runbook-url", told)
    assert "label the pods graphprobe-job=llama" in told
    pods = kubernetes(tmp_path, "service")["spec"]["selector"]
    assert pods == {"graphprobe-job": "llama"}


def test_prometheus_scrapes_the_exporter(tmp_path: Path, ledger: Ledger) -> None:
    """With the folder as it is written, but for the intervals: the target is up, the rules are loaded and evaluated."""
    probe = observe("decode", [1, 2], ledger=ledger)
    with start_exporter(0, ledger=ledger) as exporter:
        assert run(str(tmp_path), "--target", f"127.0.0.1:{exporter.port}", "--job", "llama").exit_code == 0
        at = tmp_path / "prometheus"
        config = (at / "prometheus.yml").read_text().replace("15s", "1s")
        with Prometheus(config, at) as server:
            hit_rate = 'job_instance_rank_forward:graphprobe_hit_rate:ratio_rate5m{job="llama",forward="decode"}'

            def served() -> list[dict[str, Any]]:
                probe.graph_call(1, 1)
                return server.query(hit_rate)

            assert until(served, what="a hit rate")[0]["value"][1] == "1"
            (target,) = server.get("/api/v1/targets")["activeTargets"]
            assert (target["health"], target["labels"]["job"]) == ("up", "llama")
            groups = server.get("/api/v1/rules")["groups"]
            rules = [rule for group in groups for rule in group["rules"]]
            assert len(rules) == sum(len(g["rules"]) for g in parsed((SOURCES / "rules.yaml").read_text())["groups"])
            assert {rule["health"] for rule in rules} == {"ok"}


def test_one_cause_is_one_message(folder: Path, tmp_path: Path) -> None:
    """Alertmanager holds back a low hit rate where no graph is used at all, and not that of another rank."""
    config = (folder / "alertmanager" / "alertmanager.yml").read_text()
    same = {"job": "j", "instance": "i", "rank": "0", "forward": "decode"}
    alerts = [
        {"alertname": "GraphprobeGraphNeverUsed", "severity": "critical", **same},
        {"alertname": "GraphprobeHitRateLow", "severity": "warning", **same},
        {"alertname": "GraphprobeHitRateLow", "severity": "warning", **same, "rank": "1"},
        {"alertname": "GraphprobeHitRateBudgetBurn", "severity": "critical", **same, "rank": "2"},
        {"alertname": "GraphprobeHitRateBudgetBurn", "severity": "warning", **same, "rank": "2"},
        {"alertname": "GraphprobeMetricsAbsent", "severity": "info", **same, "rank": "2"},
    ]
    with Alertmanager(config, tmp_path / "data") as server:
        body = json.dumps([{"labels": labels} for labels in alerts]).encode()
        headers = {"Content-Type": "application/json"}
        OPENER.open(urllib.request.Request(f"{server.url}/api/v2/alerts", body, headers), timeout=10).close()

        def held_back() -> set[tuple[str, str, str]]:
            found = server.get("/api/v2/alerts")
            assert len(found) == len(alerts)
            labels = [alert["labels"] for alert in found if alert["status"]["inhibitedBy"]]
            return {(each["alertname"], each["severity"], each["rank"]) for each in labels}

        expected = {("GraphprobeHitRateLow", "warning", "0"), ("GraphprobeHitRateBudgetBurn", "warning", "2")}
        until(lambda: held_back() == expected, what="the two that follow from others are held back")


def test_an_installed_wheel_writes_the_same(tmp_path: Path) -> None:
    """The wheel carries what the command needs and nothing else of dashboards/; the checkout is not looked at."""
    pytest.importorskip("hatchling")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "dist")]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    code = (
        "import sys, graphprobe.cli\n"
        f"assert graphprobe.__file__.startswith({str(site)!r}), graphprobe.__file__\n"
        f"sys.path = [path for path in sys.path if path != {str(ROOT)!r}]\n"
        "graphprobe.cli.main()"
    )
    arguments = ["dashboards", "written", "--target", TARGET]
    environment = {**os.environ, "PYTHONPATH": str(site)}
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert below(tmp_path / "written") == {name: text.encode() for name, text in contents(Installation()).items()}
    assert (tmp_path / "written" / MANIFEST).is_file()
    carried = [path for path in (site / "graphprobe" / "_dashboards").rglob("*") if path.is_file()]
    assert len(carried) == len(below(tmp_path / "written"))


def test_the_readme_shows_a_command_that_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line of the README, typed in an empty folder, writes what its next line starts."""
    line, following = re.findall(
        r"^graphprobe dashboards (.*)\n(docker compose .*)$", (ROOT / "README.md").read_text(), re.M
    )[0]
    monkeypatch.chdir(tmp_path)
    done = run(*shlex.split(line, comments=True))
    assert done.exit_code == 0, done.stderr
    assert Path(shlex.split(following)[3]).is_file()

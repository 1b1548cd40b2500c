"""What an operator deploys, written into a folder: dashboards, rules, and what runs them with compose or Kubernetes.

The sources are the files of ``dashboards/``, which a wheel carries inside the package and a checkout has beside it.
"""

from __future__ import annotations

import json
import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from string import Template

from graphprobe.errors import ConfigError, GraphprobeError
from graphprobe.tools import sources
from graphprobe.tools.folder import Outcome

TEMPLATES = (
    "compose.yaml",
    "prometheus/prometheus.yml",
    "alertmanager/alertmanager.yml",
    "grafana/provisioning/datasources/graphprobe.yaml",
    "grafana/provisioning/dashboards/graphprobe.yaml",
    "kubernetes/service.yaml",
    "kubernetes/servicemonitor.yaml",
    "kubernetes/prometheusrule.yaml",
    "kubernetes/configmap.yaml",
)
"""Written to the same place, with their ``${...}`` filled in; every other source is written as it is."""

TARGET = sources.DEFAULT.removeprefix("http://")
"""The exporter of this machine, as Prometheus writes addresses."""

OWN_LABELS = ("graphprobe-job", "grafana_dashboard")

_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
_TARGET = re.compile(r"(?:[A-Za-z0-9][A-Za-z0-9._-]*|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})")
_NAMESPACE = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
_LABEL = re.compile(rf"(?:[a-z0-9][a-z0-9.-]*/)?{_NAME}=(?:{_NAME})?")
_URL = re.compile(r"https?://[A-Za-z0-9\[][A-Za-z0-9._~:/?\[\]@!$&()*+,;=%-]*")
_RELATIVE = re.compile(r"^#\n# runbook_url is relative: .*\n", re.M)


@dataclass(frozen=True, slots=True)
class Installation:
    """What differs between two installations.

    ``targets``: HOST:PORT of each exporter. ``job``: the label under which they are scraped. ``namespace`` and
    ``labels`` (KEY=VALUE) are for the objects of Kubernetes. ``runbook_url``: where runbook.md is served, or, with a
    slash at the end, its folder. ConfigError for a value that would not be read as it is meant.
    """

    targets: tuple[str, ...] = (TARGET,)
    job: str = "graphprobe"
    namespace: str | None = None
    labels: tuple[str, ...] = ()
    runbook_url: str | None = None

    def __post_init__(self) -> None:
        for target in self.targets:
            found = _TARGET.fullmatch(target)
            if found is None or not 0 < int(found[1]) < 65536:
                raise ConfigError(f"target must be HOST:PORT, got {target!r}", f"write {TARGET}, without http://")
        if not re.fullmatch(_NAME, self.job):
            raise ConfigError(f"job must be up to 63 letters, digits, or -._ between them, got {self.job!r}")
        if self.namespace is not None and not _NAMESPACE.fullmatch(self.namespace):
            raise ConfigError(f"namespace must be up to 63 of a-z, 0-9 and - between them, got {self.namespace!r}")
        if self.runbook_url is not None and not _URL.fullmatch(self.runbook_url):
            raise ConfigError(f"runbook-url must be an http(s) URL without #, got {self.runbook_url!r}")
        for label in self.labels:
            if not _LABEL.fullmatch(label):
                raise ConfigError(f"label must be KEY=VALUE as Kubernetes allows, got {label!r}", "write release=NAME")
            if label.partition("=")[0] in OWN_LABELS:
                raise ConfigError(f"label {label!r} is one that graphprobe sets itself", "leave it out")

    def metadata(self) -> str:
        """What follows the name in the metadata of an object; it ends with the labels, so that more may follow."""
        labels = {"app.kubernetes.io/name": "graphprobe"} | dict(text.split("=", 1) for text in self.labels)
        scope = [f"namespace: {json.dumps(self.namespace)}"] if self.namespace else []
        return "\n  ".join([*scope, "labels:", *(f"  {key}: {json.dumps(value)}" for key, value in labels.items())])

    def linked(self, rules: str) -> str:
        """The rules with a link in each alert that works from anywhere, where it is known."""
        if self.runbook_url is None:
            return rules
        page = f"{self.runbook_url}runbook.md" if self.runbook_url.endswith("/") else self.runbook_url
        return _RELATIVE.sub("", rules).replace("runbook_url: runbook.md#", f"runbook_url: {page}#")


def contents(installation: Installation) -> dict[str, str]:
    """Every file by its path below the folder."""
    source = _source()
    rules = installation.linked(_text(source, "rules.yaml"))
    boards = {path.name: _text(source, path.name) for path in sorted(source.glob("*.json"))}
    values = {
        "job": installation.job,
        "targets": json.dumps(list(dict.fromkeys(installation.targets))),
        "metadata": installation.metadata(),
        "rules": textwrap.indent(_RELATIVE.sub("", rules), "  ").rstrip("\n"),
        "dashboards": "\n".join(_entry(name, board) for name, board in boards.items()),
    }
    found = {name: Template(_text(source, name)).substitute(values) for name in TEMPLATES}
    found |= {"prometheus/rules.yaml": rules, "prometheus/runbook.md": _text(source, "runbook.md")}
    return found | {f"grafana/dashboards/{name}": board for name, board in boards.items()}


def _entry(name: str, board: str) -> str:
    # The sidecar puts the entries of all ConfigMaps into one folder, where others have an overview.json, too.
    return f"  graphprobe-{name}: |\n{textwrap.indent(board, '    ')}".rstrip("\n")


def _text(source: Path, name: str) -> str:
    return (source / name).read_text("utf-8")


def _source() -> Path:
    package = Path(__file__).parents[1]
    for folder in (package / "_dashboards", package.parent / "dashboards"):
        if (folder / "rules.yaml").is_file():
            return folder
    raise GraphprobeError("the files of dashboards/ are missing from this installation. hint: install graphprobe again")


def summary(folder: str, outcome: Outcome, installation: Installation) -> str:
    """What was done, what was left alone, and what to type next."""

    def path(name: str) -> str:
        return shlex.quote(str(Path(folder, name)))

    steps = [
        *_done(folder, outcome),
        "",
        "next, one of:",
        f"  docker compose -f {path('compose.yaml')} up -d    # Grafana on http://127.0.0.1:3000",
        f"  kubectl apply -f {path('kubernetes')}",
        f"  prometheus --config.file={path('prometheus/prometheus.yml')} --web.listen-address=127.0.0.1:9090",
        "on Kubernetes, too, or nothing is scraped and no alert is loaded, without an error:",
        *(f"  - {step}" for step in _on_kubernetes(installation)),
    ]
    if installation.runbook_url is None:
        steps.append(
            "the runbook links of alerts are relative, dead in a message: --runbook-url URL, where it is served"
        )
    if "alertmanager/alertmanager.yml" not in outcome.kept:
        steps.append(f"alerts reach nobody until {path('alertmanager/alertmanager.yml')} names an address")
    return "\n".join(steps)


def _done(folder: str, outcome: Outcome) -> Iterator[str]:
    for name in outcome.written:
        yield f"wrote {Path(folder, name)}"
    if not outcome.written and not outcome.offered:
        yield f"{Path(folder)} is up to date"
    for name in outcome.kept:
        beside = outcome.offered.get(name)
        news = f"; what graphprobe would write now is in {Path(folder, beside)}" if beside else ""
        yield f"kept {Path(folder, name)}, which is not as graphprobe wrote it{news}"
    for name in outcome.removed:
        yield f"left out {Path(folder, name)}, which was removed"
    for name, copy in outcome.saved.items():
        yield f"saved {Path(folder, copy)}, which is {name} as it was"
    if outcome.kept or outcome.removed:
        yield "--force writes these, too, and saves what was edited as NAME.bak"


def _on_kubernetes(installation: Installation) -> Iterator[str]:
    yield f"label the pods graphprobe-job={installation.job}, in the pod template of their Deployment"
    yield 'let their exporter listen on the address of the pod: graphprobe.start_exporter(addr="0.0.0.0")'
    if installation.namespace is None:
        yield "--namespace NAME, where the engines run; without it the objects go where kubectl's context is"
    if not installation.labels:
        yield "--label release=NAME, where the operator selects by it: kube-prometheus-stack does, by its Helm release"
    own = "an engine whose own /metrics is scraped already"
    yield f"{own} needs neither service.yaml nor servicemonitor.yaml: remove them"

"""One Prometheus with every history, for all tests that look at what the dashboards show."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.dashboards.backfill import backfill
from tests.dashboards.histories import ALERTS, HISTORIES, times
from tests.dashboards.served import Served
from tests.dashboards.stack import Prometheus, binary


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    data, end = tmp_path_factory.mktemp("histories"), int(time.time()) // 60 * 60 - 120
    processes = backfill(binary("promtool"), data, times(end), HISTORIES, ALERTS)
    with Prometheus("{}", data) as prometheus:
        yield Served(prometheus, processes, end)

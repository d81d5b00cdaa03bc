"""Fixtures of a collector of spans, and of an ingress that sends its spans there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from starlette.testclient import TestClient

from engine.outputs import RequestTiming
from tests.deployments.collector import Collector, collecting
from tests.deployments.conftest import OpenClient
from tests.deployments.fakes import FakeEngines, output

FIRST, LAST = RequestTiming(0.002, 0.003), RequestTiming(0.002, 0.003, 0.004)


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")  # milliseconds
    with collecting() as receiver:
        yield receiver


@pytest.fixture
def traced(open_client: OpenClient, collector: Collector, engines: FakeEngines) -> TestClient:
    engines.scripts = [[output([70], timing=FIRST), output([71, 72], "stop", cached=0, timing=LAST)]]
    return open_client(tracing={"otlp_endpoint": collector.url})

"""Fixtures of the deployment's tests: fakes of what Serve would give."""

from __future__ import annotations

import logging
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.engine.tiny_tokenizers import save_tokenizer
from tests.waiting import HANG_S

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own modules warn while they are imported
    import ray.serve  # noqa: F401

    from deployments.config import AppConfig
    from deployments.ingress import Ingress
    from deployments.routing.cluster_view import cluster_view
    from tests.deployments.fakes import FakeEngines, output
    from tests.deployments.transport.request_channel.peers import Peers


@pytest.fixture(scope="session")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(path)
    (path / "config.json").write_text('{"model_type": "llama"}')
    return path


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> FakeEngines:
    """The engines of every ingress that the test makes."""
    fakes = FakeEngines([[output([70]), output([71, 72], "stop", cached=4)]])
    monkeypatch.setattr("deployments.ingress.Dispatcher", lambda *_, **__: fakes)
    return fakes


OpenClient = Callable[..., TestClient]


@pytest.fixture
def started_ingresses() -> list[Ingress]:
    """The ingresses that ``open_client`` has started."""
    return []


@pytest.fixture
def ingress(client: TestClient, started_ingresses: list[Ingress]) -> Ingress:
    """The ingress of ``client``."""
    return started_ingresses[0]


@pytest.fixture
def open_client(
    tokenizer_path: Path, engines: FakeEngines, started_ingresses: list[Ingress], monkeypatch: pytest.MonkeyPatch
) -> Iterator[OpenClient]:
    """Return a function that starts an ingress over the fake engines, with arguments of the application."""
    monkeypatch.setattr("deployments.ingress.RayExporter.start", lambda self: None)
    cluster_view.cache_clear()
    with ExitStack() as stack:

        def make(**args: Any) -> TestClient:
            config = AppConfig.parse({"model": str(tokenizer_path), "model_name": "tiny"} | args)
            ingress: Any = Ingress(engines, config)  # type: ignore[arg-type]
            started_ingresses.append(ingress)
            return stack.enter_context(TestClient(ingress.__serve_build_asgi_app__()))

        yield make


@pytest.fixture
def client(open_client: OpenClient) -> TestClient:
    return open_client(limits={"max_body_bytes": 2**15})


@pytest.fixture
async def peers(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Peers]:
    """Replicas with shadow engines, and started_ingresses, on the channel's sockets."""
    monkeypatch.setattr("deployments.transport.request_channel.replica_connection.PROBE_TIMEOUT_S", HANG_S)
    started = Peers()
    yield started
    await started.close()


@pytest.fixture
def serve_log() -> Iterator[list[logging.LogRecord]]:
    """The records of Serve's log while the test runs."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("ray.serve")
    level, handlers = logger.level, logger.handlers
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)
    yield records
    logger.handlers = handlers
    logger.setLevel(level)

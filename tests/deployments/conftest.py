"""Fixtures of the deployment's tests: fakes of what Serve would give."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.engine.checkpoints import save_tokenizer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own modules warn while they are imported
    import ray.serve  # noqa: F401

    from deployments.cluster_view import cluster_view
    from deployments.config import AppConfig
    from deployments.ingress import Ingress
    from tests.deployments.fakes import FakeEngines, output


@pytest.fixture(scope="session")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(path)
    (path / "config.json").write_text('{"model_type": "llama"}')
    return path


@pytest.fixture
def engines() -> FakeEngines:
    return FakeEngines([[output([70]), output([71, 72], "stop", cached=4)]])


@pytest.fixture
def client(tokenizer_path: Path, engines: FakeEngines, monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    monkeypatch.setattr("deployments.ingress.RayExporter.start", lambda self: None)
    cluster_view.cache_clear()
    config = AppConfig.parse({"model": str(tokenizer_path), "model_name": "tiny", "limits": {"max_body_bytes": 2**15}})
    ingress: Any = Ingress(engines, config)  # type: ignore[arg-type]
    with TestClient(ingress.__serve_build_asgi_app__()) as made:
        yield made

"""Ingresses over real pooling engines with tiny random models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from deployments.config import AppConfig
from deployments.ingress import Ingress
from deployments.routing.cluster_view import cluster_view
from engine.pooling.engine import PoolingEngine
from tests.deployments.conftest import OpenClient
from tests.deployments.real_engines import RealEngines
from tests.engine.pooling.checkpoints import save_causal_model, save_classifier, save_model, save_sentence_files
from tests.engine.pooling.test_scores import add_words

OpenPooled = Callable[..., TestClient]


@pytest.fixture(scope="session")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder with the files of sentence-transformers: mean, normalised, a prompt for queries."""
    path = save_model(tmp_path_factory.mktemp("embedder"), "bert")
    save_sentence_files(path, "mean_tokens", max_tokens=64, prompts={"query": "what is ", "document": ""})
    return path


@pytest.fixture(scope="session")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cross-encoder."""
    return save_classifier(tmp_path_factory.mktemp("reranker"), "bert")


@pytest.fixture(scope="session")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier with three labels."""
    return save_classifier(tmp_path_factory.mktemp("classifier"), "roberta", num_labels=3)


@pytest.fixture(scope="session")
def yes_no(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model that answers yes or no."""
    path = save_causal_model(tmp_path_factory.mktemp("yes_no"), "qwen3", max_position_embeddings=1024)
    add_words(path, ["yes", "no"])
    return path


@pytest.fixture
def open_pooled(monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenPooled]:
    """Return a function that starts an ingress over an engine with a checkpoint."""
    monkeypatch.setattr("deployments.ingress.RayExporter.start", lambda self: None)
    cluster_view.cache_clear()
    with ExitStack() as stack:

        def start(path: Path, task: str, **args: Any) -> TestClient:
            options = {"model": str(path), "model_name": "tiny", "task": task, "engine": {"device": "cpu"}}
            config = AppConfig.parse(options | args)
            config.require_model()
            assert config.pooling_config is not None
            engines = RealEngines(PoolingEngine.from_config(config.engine_config, config.pooling_config))
            monkeypatch.setattr("deployments.ingress.Dispatcher", lambda *_, **__: engines)
            ingress: Any = Ingress(engines, config)  # type: ignore[arg-type]
            return stack.enter_context(TestClient(ingress.__serve_build_asgi_app__()))

        yield start


@pytest.fixture
def plain_client(open_client: OpenClient) -> TestClient:
    """A client of a server that generates text."""
    return open_client()

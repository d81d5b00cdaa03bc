"""/load counts unfinished requests, and /server_info shows neither keys nor paths nor addresses."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from starlette.testclient import TestClient

from deployments.api.utilities.openapi import LoadResponse, ServerInfoResponse
from deployments.ingress import Ingress
from engine.config import EngineConfig
from tests.deployments.conftest import OpenClient
from tests.deployments.fakes import FakeDispatch, FakeEngines

KEY = "a-key-of-at-least-16-characters"


def test_the_load_is_that_of_all_ingresses(
    client: TestClient, engines: FakeEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def everywhere(handle: Any, method: str) -> dict[str, Any]:
        assert method == "num_unfinished"
        return {"first": 3, "second": 4}

    monkeypatch.setattr("deployments.serve.replicas.all_ingresses", lambda: None)
    monkeypatch.setattr("deployments.serve.replicas.broadcast", everywhere)
    answer = client.get("/load")
    assert LoadResponse.model_validate(answer.json(), strict=True).server_load == 7


def test_an_ingress_counts_requests_from_their_arrival_to_their_end(
    client: TestClient, ingress: Ingress, engines: FakeEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.ingress._name", lambda: "this")
    during: list[int] = []
    taken = FakeDispatch.take

    def take(self: FakeDispatch) -> Any:
        during.append(len(ingress._unfinished))
        return taken(self)

    monkeypatch.setattr(FakeDispatch, "take", take)
    for body in ({"prompt": "a"}, {"prompt": "a", "stream": True}):
        assert client.post("/v1/completions", json=body).status_code == 200
    assert client.post("/v1/completions", json={"prompt": ""}).status_code == 400
    assert set(during) == {1}
    assert not ingress._unfinished
    assert client.get("/version").status_code == 200  # it is no request for tokens


def test_the_configuration_has_no_secret(open_client: OpenClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGODA_API_KEYS", KEY)
    tracing = {"otlp_endpoint": "http://user:password@collector:4318"}
    client = open_client(tracing=tracing, engine={"max_num_seqs": 7})
    assert client.get("/server_info").status_code == 401
    answer = client.get("/server_info", headers={"Authorization": f"Bearer {KEY}"})
    info = ServerInfoResponse.model_validate(answer.json(), strict=True)
    assert info.model == info.config["model_name"] == "tiny"
    assert info.config["limits"]["max_n"] == 16
    assert info.config["tracing"]["otlp_endpoint"] == "<address>"
    assert info.engine["block_size"] == 4
    for secret in (KEY, "password", "collector", "/"):
        assert secret not in answer.text


def test_the_configuration_shows_defaults_and_null(open_client: OpenClient) -> None:
    config = open_client(engine={"max_num_seqs": 7}).get("/server_info").json()["config"]
    own = {field.name for field in dataclasses.fields(EngineConfig)} - {"model"}
    assert config["engine"].keys() == own
    assert config["engine"]["max_num_seqs"] == 7
    assert config["engine"]["gpu_memory_utilization"] == EngineConfig.gpu_memory_utilization
    assert config["engine"]["quantization"] is None
    assert config["tracing"]["otlp_endpoint"] is None

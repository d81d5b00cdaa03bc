"""The OpenAPI document describes every endpoint, and what it describes is what is answered."""

from __future__ import annotations

import re
from typing import Any

import jsonschema
import pytest
from starlette.testclient import TestClient

from deployments.ingress import Ingress
from deployments.proxy.paths import OPERATIONS
from tests.deployments.conftest import OpenClient

OPEN_PATHS = {"/health", "/ping", "/version"}
KEY = "a-key-of-at-least-16-characters"


@pytest.fixture
def document(client: TestClient) -> dict[str, Any]:
    description: dict[str, Any] = client.get("/openapi.json").json()
    return description


def _references(value: Any) -> set[str]:
    if isinstance(value, dict):
        inner = {reference for item in value.values() for reference in _references(item)}
        return inner | ({value["$ref"]} if "$ref" in value else set())
    return {reference for item in value for reference in _references(item)} if isinstance(value, list) else set()


def test_it_has_every_route_and_no_other(document: dict[str, Any], ingress: Ingress) -> None:
    described = {(path, method.upper()) for path, operations in document["paths"].items() for method in operations}
    served = {(re.sub(r":\w+\}", "}", route.path), route.method) for route in ingress.endpoints.routes}
    assert described == served
    assert document["openapi"].startswith("3.1")


def test_what_can_be_streamed_is_known_to_generate(ingress: Ingress) -> None:
    """The proxy and the request log know such an endpoint by its path, which is a line of OPERATIONS.

    A GET only repeats the stream of a response that is computed in the background.
    """
    streamed = [route for route in ingress.endpoints.routes if route.description.stream is not None]
    posts = [route for route in streamed if route.method == "POST"]
    pooled = {route.path for route in ingress.endpoints.routes if route.description.tag == "embeddings and scores"}
    generating = {path: name for path, name in OPERATIONS.items() if path not in pooled}
    assert {route.path: route.operation for route in posts} == generating
    assert [route.path for route in streamed if route not in posts] == ["/v1/responses/{response_id}"]
    assert {route.path for route in ingress.endpoints.routes if route.operation} == OPERATIONS.keys()


def test_every_reference_leads_to_a_schema(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    assert _references(document) <= {f"#/components/schemas/{name}" for name in schemas}
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)


def test_operations_are_told_apart(document: dict[str, Any]) -> None:
    operations = [operation for path in document["paths"].values() for operation in path.values()]
    ids = [operation["operationId"] for operation in operations]
    assert len(set(ids)) == len(ids)
    assert all(operation["summary"].endswith(".") for operation in operations)
    assert {"400", "404", "408", "413", "501", "503"} <= set(
        document["paths"]["/v1/chat/completions"]["post"]["responses"]
    )


def test_fields_of_requests_are_those_that_are_parsed(document: dict[str, Any]) -> None:
    chat = document["components"]["schemas"]["ChatRequest"]["properties"]
    assert {"messages", "tools", "truncate_prompt_tokens", "use_beam_search", "temperature"} <= set(chat)
    assert document["components"]["schemas"]["ChatRequest"]["required"] == ["messages"]


def test_responses_say_what_comes(document: dict[str, Any]) -> None:
    def success(method: str, path: str) -> Any:
        return document["paths"][path][method]["responses"]["200"]

    assert success("get", "/v1/models")["description"] == "The response."
    streamed = "The response; with stream: true, server-sent events whose data is JSON."
    assert success("post", "/v1/messages")["description"] == streamed
    chat = success("post", "/v1/chat/completions")
    assert chat["description"] == f"{streamed} The last event is data: [DONE]."
    event = chat["content"]["text/event-stream"]["schema"]
    for data, is_event in (("[DONE]", True), ("{}", True), (7, False)):
        assert jsonschema.Draft202012Validator(event).is_valid({"data": data}) == is_event
    assert {"const": "[DONE]"} in event["properties"]["data"]["anyOf"]


def test_keys_are_described_once_they_are_set(open_client: OpenClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGODA_API_KEYS", KEY)
    client = open_client()
    assert client.get("/openapi.json").status_code == 401
    document = client.get("/openapi.json", headers={"Authorization": f"Bearer {KEY}"}).json()
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert ("security" in operation) == (path not in OPEN_PATHS), path
            assert ("401" in operation["responses"]) == (path not in OPEN_PATHS), path

"""Requests that schemathesis generates from the OpenAPI document, valid and invalid ones, to every endpoint.

The engines are fakes that answer every request. A response must have a status, a content type and a body that the
document declares, invalid bodies must be rejected, and no status is 5xx but 501, of a field that is not offered, and
503, of what has no engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, seed, settings
from starlette.testclient import TestClient

from deployments.ingress import Ingress
from tests.deployments.answering_engines import AnsweringEngines

schemathesis = pytest.importorskip("schemathesis")

ALLOWED_SERVER_ERRORS = (501, 503)
WITHOUT_SERVE = {"/web/{name}", "/metrics", "/load", "/live"}  # need a file that exists, or Serve


def _operations(client: TestClient) -> list[Any]:
    schema = schemathesis.openapi.from_dict(client.get("/openapi.json").json())
    operations = [result.ok() for result in schema.get_all_operations()]
    return [operation for operation in operations if operation.path not in WITHOUT_SERVE]


def _send(client: TestClient, case: Any) -> Any:
    options: dict[str, Any] = {"params": dict(case.query or {})}
    if isinstance(case.body, dict | list | str | int | float | bool) or case.body is None:
        options["json"] = case.body
    return client.request(case.method, case.formatted_path, **options)


def _check(client: TestClient, operation: Any, mode: str, max_examples: int, statuses: Counter[int]) -> None:
    """Send ``max_examples`` requests to one endpoint, and check the responses."""
    from schemathesis.checks import CHECKS

    names = ["status_code_conformance", "content_type_conformance", "response_schema_conformance"]
    checks = [CHECKS.get_one(name) for name in names]
    rejects = CHECKS.get_one("negative_data_rejection")

    @seed(17)
    @settings(max_examples=max_examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(operation.as_strategy(generation_mode=getattr(schemathesis.GenerationMode, mode)))
    def run(case: Any) -> None:
        response = _send(client, case)
        statuses[response.status_code] += 1
        assert response.status_code < 500 or response.status_code in ALLOWED_SERVER_ERRORS, response.text
        accepted_wrongly = [rejects] if mode == "NEGATIVE" and response.status_code < 400 else []
        case.validate_response(response, checks=checks + accepted_wrongly)

    run()


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> AnsweringEngines:
    """Engines that answer every valid request."""
    engines = AnsweringEngines()
    monkeypatch.setattr("deployments.ingress.Dispatcher", lambda *_, **__: engines)
    return engines


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # schemathesis' own
@pytest.mark.parametrize("mode", ["POSITIVE", "NEGATIVE"])
@pytest.mark.parametrize("task", ["embed", "score"])
def test_generated_requests_of_other_tasks(task: str, mode: str, open_pooled: Callable[[str], TestClient]) -> None:
    from schemathesis.checks import load_all_checks

    load_all_checks()
    client = open_pooled(task)
    statuses: Counter[int] = Counter()
    paths = {"embed": ("/v1/embeddings", "/pooling"), "score": ("/v1/score", "/v1/rerank", "/classify")}[task]
    for operation in _operations(client):
        if operation.path in paths:
            _check(client, operation, mode, 15, statuses)
    assert statuses[400]
    # Hardly any generated name is that of a prompt, or length one to which vectors are cut.
    assert statuses[200] or mode == "NEGATIVE" or task == "embed"


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore")  # schemathesis' own
@pytest.mark.parametrize("mode", ["POSITIVE", "NEGATIVE"])
@pytest.mark.parametrize(
    "max_examples", [4, pytest.param(200, marks=pytest.mark.exhaustive("minutes of generated requests"))]
)
def test_generated_requests(client: TestClient, ingress: Ingress, mode: str, max_examples: int) -> None:
    from schemathesis.checks import load_all_checks

    load_all_checks()
    failures: list[str] = []
    statuses: Counter[int] = Counter()
    for operation in _operations(client):
        if mode == "NEGATIVE" and not len(operation.body or ()):
            continue  # nothing can be wrong
        try:
            _check(client, operation, mode, max_examples, statuses)
        except (Exception, BaseExceptionGroup) as error:  # of any operation, so that a run shows all of them
            failures.append(f"{operation.method} {operation.path}: {error}")
    print(mode, statuses)
    assert not failures, "\n\n".join(failures)
    assert statuses[400]
    assert statuses[200] or mode == "NEGATIVE"
    assert not ingress._unfinished

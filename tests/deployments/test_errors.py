"""Exceptions as HTTP error responses."""

from __future__ import annotations

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from deployments.errors import ApiError, as_api_error, is_replica_loss, unwrap
from engine.errors import OverloadedError, PromptTooLongError, RequestError


def test_errors_become_answers() -> None:
    wrapped = RayTaskError(
        "generate", "traceback", PromptTooLongError("is too long for '/models/secret/x'", param="prompt")
    )
    answer = as_api_error(wrapped)
    assert (answer.status, answer.body["error"]["param"]) == (400, "prompt")
    assert "/models" not in answer.message
    assert as_api_error(ActorDiedError()).status == 503
    busy = as_api_error(OverloadedError("must wait", param="structured_outputs", remedy="try again later"))
    assert (busy.status, busy.param, busy.code) == (503, "structured_outputs", "overloaded")
    assert int(busy.headers["Retry-After"]) > 0
    assert as_api_error(ActorDiedError()).headers == {"Retry-After": "1"}
    assert as_api_error(RuntimeError("secret")).message == "internal error; the server's log says more"
    assert len(ApiError(400, "x" * 9999).message) <= 400
    assert not is_replica_loss(wrapped)
    assert isinstance(unwrap(wrapped), PromptTooLongError)


@pytest.mark.parametrize(
    ("message", "sent"),
    [
        ("use /v1/completions", "use /v1/completions"),
        ("send it to /v1/chat/completions, not /v1/messages/count_tokens", None),
        ("no tokenizer in /home/me/models/a-b: add it", "no tokenizer in <path>: add it"),
        ("'/opt/v1/model' is not a directory", "'<path>' is not a directory"),
        ("the schema has no '#/definitions/address/street'", None),
    ],
)
def test_paths_of_files_are_hidden_and_paths_of_the_api_are_not(message: str, sent: str | None) -> None:
    assert as_api_error(RequestError(message)).message == (sent or message)


def test_a_value_of_the_client_is_shown_as_it_is() -> None:
    error = RequestError(
        "cannot be read by /opt/pagoda/engine", param="stop", value="/the/end/", remedy="ask /etc/pagoda/x"
    )
    assert as_api_error(error).message == "stop='/the/end/' cannot be read by <path>; ask <path>"
    assert str(error).endswith("/etc/pagoda/x")

"""What the launcher reads in Serve's details: whether an application has failed, and why."""

from __future__ import annotations

from typing import Any

import pytest

from deployments.launcher.dashboard import deployment_failure

CONSTRUCTOR = """The deployment failed to start 1 times in a row. This may be due to a problem with its constructor.
Error:
\x1b[36mray::ServeReplica:pagoda:engine.initialize_and_get_metadata()\x1b[39m (pid=7, ip=127.0.0.1)
  File "replica.py", line 9, in __init__
    raise ConfigError("num_blocks=1 is too few")
engine.errors.ConfigError: num_blocks=1 is too few; give at least 2
The above exception was the direct cause of the following exception: the replica has ended.
"""


def _details(status: str, message: str = "", **deployments: str) -> dict[str, Any]:
    parts = {name: {"message": text} for name, text in deployments.items()}
    return {"applications": {"pagoda": {"status": status, "message": message, "deployments": parts}}}


@pytest.mark.parametrize("status", ["DEPLOYING", "DEPLOY_FAILED"])
def test_the_error_of_an_engine_is_one_line(status: str) -> None:
    """Serve tries again after a mistake in the config, which no attempt mends: the launcher does not wait for that."""
    reason = "engine.errors.ConfigError: num_blocks=1 is too few; give at least 2"
    for details in (_details(status, CONSTRUCTOR), _details(status, engine=CONSTRUCTOR, ingress="")):
        assert deployment_failure(details) == f"application 'pagoda' failed: {reason}"


def test_a_failure_without_a_reason() -> None:
    assert deployment_failure(_details("DEPLOY_FAILED")) == "application 'pagoda' failed: no reason given"


@pytest.mark.parametrize(
    "details", [{}, _details("RUNNING"), _details("DEPLOYING", engine="RuntimeError: the node left")]
)
def test_no_failure(details: dict[str, Any]) -> None:
    assert deployment_failure(details) is None

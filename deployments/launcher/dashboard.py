"""Ray's dashboard API: Serve's applications, why one failed, how to delete them; the use of the cluster's resources."""

from __future__ import annotations

import http.client
import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deployments.launcher.direct import direct_urlopen
from deployments.launcher.home import RAY_TOKEN
from deployments.launcher.waiting import Usage

__all__ = ["cluster_usage", "delete_applications", "deployment_failure", "serve_details"]


def serve_details(dashboard: str) -> dict[str, Any]:
    """Return what `serve status` shows, in Ray's own schema; empty if the dashboard does not answer."""
    return _get(_serve_api(dashboard))


def cluster_usage(dashboard: str) -> dict[str, Usage]:
    """Return the use of each resource of the cluster; empty if the dashboard does not answer."""
    status = _get(_request(f"{dashboard}/api/cluster_status")).get("data", {}).get("clusterStatus", {})
    usage = status.get("loadMetricsReport", {}).get("usage", {})
    return {name: Usage(float(used), float(total)) for name, (used, total) in usage.items()}


def delete_applications(dashboard: str) -> bool:
    """Make Serve drain and delete every application; return False if the dashboard does not answer."""
    request = _serve_api(dashboard)
    request.method, request.data = "PUT", b'{"applications": []}'
    request.add_header("Content-Type", "application/json")
    try:
        with direct_urlopen(request, timeout=60):
            return True
    except (OSError, http.client.HTTPException):
        return False


def deployment_failure(details: Mapping[str, Any]) -> str | None:
    """Return in one line why an application of ``details`` failed to deploy; None if none failed."""
    for name, application in details.get("applications", {}).items():
        messages = [str(application.get("message", ""))]
        messages += [str(part.get("message", "")) for part in application.get("deployments", {}).values()]
        text = "\n".join(messages)
        if application.get("status") == "DEPLOY_FAILED" or "ConfigError" in text or "ModelLoadError" in text:
            return f"application '{name}' failed: {_error_line(text)}"
    return None


def _serve_api(dashboard: str) -> urllib.request.Request:
    return _request(f"{dashboard}/api/serve/applications/")


def _get(request: urllib.request.Request) -> dict[str, Any]:
    """Return the JSON object of an answer; empty if there is none."""
    try:
        with direct_urlopen(request, timeout=5) as answer:
            content: dict[str, Any] = json.load(answer)
            return content
    except (OSError, ValueError, http.client.HTTPException):
        return {}


def _request(url: str) -> urllib.request.Request:
    request = urllib.request.Request(url)
    if token := _ray_token():
        request.add_header("Authorization", f"Bearer {token}")
    return request


def _ray_token() -> str:
    """Return the token that Ray's dashboard requires, from where Ray itself reads it; empty if there is none."""
    if token := os.environ.get("RAY_AUTH_TOKEN"):
        return token
    try:
        path = os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / RAY_TOKEN
        return Path(path).read_text(encoding="utf-8").strip()
    except (OSError, RuntimeError):  # there is no such file, or the user has no home directory
        return ""


def _error_line(message: str) -> str:
    """Return the line of a traceback that names the error."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(\w+\.)*\w*(Error|Exception)\b.*:", line)]
    return (errors or lines or ["no reason given"])[-1]

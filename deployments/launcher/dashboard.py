"""Ray's dashboard API for Serve: the state of the applications, why one failed, and how to delete them."""

from __future__ import annotations

import http.client
import json
import os
import re
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

__all__ = ["delete_applications", "deployment_failure", "serve_details"]


def serve_details(dashboard: str) -> dict[str, Any]:
    """Return what `serve status` shows, in Ray's own schema; empty if the dashboard does not answer."""
    try:
        with urllib.request.urlopen(_serve_api(dashboard), timeout=5) as answer:
            details: dict[str, Any] = json.load(answer)
            return details
    except (OSError, ValueError, http.client.HTTPException):
        return {}


def delete_applications(dashboard: str) -> bool:
    """Make Serve drain and delete every application; return False if the dashboard does not answer."""
    request = _serve_api(dashboard)
    request.method, request.data = "PUT", b'{"applications": []}'
    request.add_header("Content-Type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=60):
            return True
    except (OSError, http.client.HTTPException):
        return False


def deployment_failure(dashboard: str) -> str | None:
    """Return in one line why an application failed to deploy; None if none failed."""
    for name, application in serve_details(dashboard).get("applications", {}).items():
        messages = [str(application.get("message", ""))]
        messages += [str(part.get("message", "")) for part in application.get("deployments", {}).values()]
        text = "\n".join(messages)
        if application.get("status") == "DEPLOY_FAILED" or "ConfigError" in text or "ModelLoadError" in text:
            return f"application '{name}' failed: {_error_line(text)}"
    return None


def _serve_api(dashboard: str) -> urllib.request.Request:
    request = urllib.request.Request(f"{dashboard}/api/serve/applications/")
    if token := _ray_token():
        request.add_header("Authorization", f"Bearer {token}")
    return request


def _ray_token() -> str:
    """Return the token that Ray's dashboard requires, from where Ray itself reads it; empty if there is none."""
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH", Path.home() / ".ray" / "auth_token"))
    return os.environ.get("RAY_AUTH_TOKEN") or (path.read_text().strip() if path.is_file() else "")


def _error_line(message: str) -> str:
    """Return the line of a traceback that names the error."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(\w+\.)*\w*(Error|Exception)\b.*:", line)]
    return (errors or lines or ["no reason given"])[-1]

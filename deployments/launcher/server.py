"""Server: `serve run` as a child process, together with the Ray cluster that it starts."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, Any

from deployments.launcher.dashboard import cluster_usage, delete_applications, deployment_failure, serve_details
from deployments.launcher.direct import direct_urlopen
from deployments.launcher.environment import environment
from deployments.launcher.files import FOLDER, temporary_directory
from deployments.launcher.log_follower import LogFollower
from deployments.launcher.preflight import Endpoint
from deployments.launcher.processes import argument_of, descendants, end, is_alive, replica_processes
from deployments.launcher.progress import StartProgress
from deployments.launcher.waiting import WaitingReplicas, unplaced_replicas
from engine.errors import PagodaError

__all__ = ["LaunchError", "Server"]

POLL_S = 0.25
FAILURE_POLL_S = 2.0
WAITING_POLL_S = 5.0  # less often: the server has requests to answer
STOP_GRACE_S = 30.0
MAX_UNANSWERED = 12  # consecutive requests that the dashboard may leave unanswered before it counts as gone
# Where `serve run` runs: Ray lets its processes import from this directory first, so a user's may shadow our packages.
_PACKAGES = Path(__file__).resolve().parents[2]
DEFAULT_DASHBOARD = "http://127.0.0.1:8265"


class LaunchError(PagodaError):
    """The server did not start; the message gives the reason in one line."""


class Server:
    """`serve run` as a child process.

    Args:
        config: the Serve config file.
        endpoint: where it will listen, and the limits for its clients.
        stop_at_once: once set, neither ``drain`` nor ``stop`` waits any longer.

    Raises:
        LaunchError: there is no directory for the server's files, or this user cannot run ``serve``.
    """

    def __init__(self, config: Path, endpoint: Endpoint, stop_at_once: threading.Event) -> None:
        try:
            self._files = temporary_directory()
        except OSError as error:
            raise LaunchError(
                f"{FOLDER} cannot hold the server's files ({error.strerror}); make it a directory that user "
                f"{os.geteuid()} can write"
            ) from None
        try:
            self._process = _serve_run(config, environment(endpoint.limits, Path(self._files.name), endpoint.host))
        except LaunchError:
            self._files.cleanup()
            raise
        self._config = config
        self._waiting = WaitingReplicas()
        self._stop_at_once = stop_at_once
        self._dashboard = DEFAULT_DASHBOARD
        self._is_ready = False
        self._ends_at_once = False  # not while a replica waits or starts: Serve would let it start before it ends
        self._is_stopping = False
        self._follower: LogFollower | None = None
        assert self._process.stdout is not None
        threading.Thread(target=self._print_output, args=(self._process.stdout,), daemon=True).start()

    def wait_until_ready(self, endpoint: Endpoint, progress: StartProgress | None = None) -> None:
        """Return when the server answers requests.

        Args:
            endpoint: where it will.
            progress: takes what Serve and the replicas' logs say meanwhile.

        Raises:
            LaunchError: `serve run` has ended or the application cannot be deployed.
        """
        progress, next_check = progress or StartProgress(), 0.0
        logs: LogFollower | None = None
        while not _is_healthy(endpoint):
            if self._process.poll() is not None:
                raise LaunchError(f"serve run ended with exit code {self._process.returncode}; its output is above")
            if time.monotonic() >= next_check:
                next_check = time.monotonic() + FAILURE_POLL_S
                progress.see_details(self._check_deployments())
                if logs is None and progress.needs_logs:
                    logs = self._log_follower(progress.see_line)
            if logs is not None:
                logs.show_new_lines()
            time.sleep(POLL_S)
        self._is_ready = True
        self._ends_at_once = True

    @property
    def is_ready(self) -> bool:
        """Whether the server has answered requests."""
        return self._is_ready

    def _check_deployments(self) -> dict[str, Any]:
        """Return Serve's details, and print which replicas the cluster has no room for.

        Raises:
            LaunchError: an application failed to deploy.
        """
        details = serve_details(self._dashboard)
        if reason := deployment_failure(details):
            raise LaunchError(reason)
        self._report_waiting(details)
        return details

    def _report_waiting(self, details: dict[str, Any]) -> None:
        if self._waiting.update(details) and (usage := cluster_usage(self._dashboard)):
            for line in self._waiting.report(details, usage, self._config.name):
                print(f"pagoda: {line}", flush=True)

    def follow_logs(self) -> None:
        """Print from now on what the replicas write to their logs, for instance requests and throughput."""
        self._follower = self._log_follower(partial(print, flush=True))
        if self._follower is not None:
            self._follower.start()

    def _log_follower(self, show: Callable[[str], None]) -> LogFollower | None:
        """Return a follower of the replicas' logs from now on; None before Ray has started."""
        session = argument_of(descendants(), "--session-dir=")
        return LogFollower(Path(session) / "logs" / "serve", show) if session else None

    def wait(self) -> int:
        """Wait until `serve run` ends; return its exit code."""
        while not self._waiting.are_placed:  # the server is ready, but some of its replicas may wait for room
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self._process.wait(WAITING_POLL_S)
            self._report_waiting(serve_details(self._dashboard))
        return self._process.wait()

    def drain(self) -> None:
        """Accept no more requests and wait for the running ones, as long as the deployment's grace period allows.

        Deleting the applications lets streams finish. Serve's own shutdown does not: it ends HAProxy first.
        """
        self._ends_at_once = not unplaced_replicas(serve_details(self._dashboard))
        # Replicas that wait for room have no streams, and start when others end. Serve lists no replicas while it
        # deletes an application. So the server has drained when those that run now have ended.
        replicas = [] if self._ends_at_once else replica_processes()
        if not delete_applications(self._dashboard):
            return
        num_unanswered = 0
        while self._process.poll() is None and num_unanswered < MAX_UNANSWERED:
            details = serve_details(self._dashboard)
            num_unanswered = 0 if details else num_unanswered + 1  # no answer does not mean that nothing runs
            is_deleted = bool(details) and not details.get("applications")
            have_ended = bool(replicas) and not any(map(is_alive, replicas))
            if is_deleted or have_ended or self._stop_at_once.wait(POLL_S):
                return

    def stop(self) -> None:
        """End `serve run` and its cluster: by an interrupt if Serve can end at once; then end what is left of them."""
        self._is_stopping = True
        deadline = time.monotonic() + STOP_GRACE_S
        if self._ends_at_once and self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            while self._process.poll() is None and time.monotonic() < deadline and not self._stop_at_once.is_set():
                time.sleep(0.05)
        for _ in range(3):  # a process that is forked meanwhile is found in the next round
            if left := descendants():
                end(left, grace_s=0.0 if self._stop_at_once.is_set() else 5.0 if self._ends_at_once else 1.0)
        if self._follower is not None:
            self._follower.stop()
        self._files.cleanup()

    def _print_output(self, output: IO[str]) -> None:
        """Print the child's output, and read from it the address of the dashboard."""
        for line in output:
            if match := re.search(r"dashboard at .*?(https?://[\d.]+:\d+)", line):
                self._dashboard = match[1]
            # Ray logs calls that the stop itself has ended, as do processes that are not asked first.
            if not self._is_stopping or (self._ends_at_once and "graceful_shutdown" not in line):
                print(line, end="", flush=True)
            if "Submitted deploy config successfully" in line:
                print("pagoda: the replicas start, and load the model ...", flush=True)


def _serve_run(config: Path, variables: dict[str, str]) -> subprocess.Popen[str]:
    """Start `serve run`, of the environment of this Python."""
    serve = shutil.which("serve", path=str(Path(sys.executable).parent)) or "serve"
    try:
        return subprocess.Popen(
            [serve, "run", "--address", "local", str(config.resolve())],
            cwd=_PACKAGES,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",  # as its environment says, whatever this process's locale is
            errors="replace",
            start_new_session=True,  # the terminal's Ctrl-C reaches this process only, which passes it on
        )
    except OSError as error:
        raise LaunchError(
            f"{serve} cannot be run ({error.strerror}); let user {os.geteuid()} read and execute it and its Python"
        ) from None


def _is_healthy(endpoint: Endpoint) -> bool:
    try:
        with direct_urlopen(f"{endpoint.url}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except (OSError, http.client.HTTPException):
        return False

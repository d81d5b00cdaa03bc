"""`python -m deployments.drain`: drains this Ray node before Kubernetes ends its pod (the preStop hook of k8s/).

Kubernetes ends a pod with a signal at which Ray ends every stream. This program first announces to Ray that the node
will go. Serve then starts the node's replicas elsewhere, ends them here after their streams have ended, and takes the
node's proxy out of service. The program waits for that. If no other node has room, the replicas here take no more
requests once only ``limits.graceful_shutdown_s`` are left. If the whole cluster ends, the dashboard stops answering and
there is nothing to wait for.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from typing import Any

from deployments.launcher.dashboard import serve_details
from deployments.launcher.direct import host_in_url
from engine.errors import ConfigError, PagodaError

__all__ = ["drain", "main", "nodes_in_use"]

POLL_S = 1.0
UNANSWERED_S = 30.0  # without an answer from the head for so long, the whole cluster counts as ended
ANNOUNCE_TIMEOUT_S = 30.0
DASHBOARD_PORT = 8265
REASON = "DRAIN_NODE_REASON_PREEMPTION"  # Ray rejects the other reason, idleness, while the node works


def main(arguments: list[str] | None = None) -> int:
    """Drain this node and wait for it; return the exit code."""
    parser = argparse.ArgumentParser(prog="pagoda-drain", description="Move this node's replicas elsewhere, and wait.")
    parser.add_argument("--seconds", type=int, default=660, help="until the node ends in any case")
    parser.add_argument("--dashboard", help=f"Ray's, by default http://$FQ_RAY_IP:{DASHBOARD_PORT}")
    options = parser.parse_args(arguments)
    try:
        dashboard = options.dashboard or f"http://{host_in_url(_variable('FQ_RAY_IP'))}:{DASHBOARD_PORT}"
        drain(dashboard, _variable("RAY_ADDRESS"), _variable("POD_IP"), options.seconds)
    except PagodaError as error:
        print(f"pagoda: {error}", file=sys.stderr)
        return 1
    return 0


def drain(dashboard: str, address: str, own_ip: str, seconds: int) -> None:
    """Return when Serve has left this node, after ``seconds``, or when the dashboard no longer answers.

    An announcement that fails, for instance while the head restarts, is repeated: when this program ends the pod ends,
    and every stream with it.
    """
    answered = time.monotonic()
    deadline = answered + seconds
    announced: set[str] = set()
    while (now := time.monotonic()) < deadline and now - answered < UNANSWERED_S:
        if details := serve_details(dashboard):
            answered = time.monotonic()
            nodes = nodes_in_use(details, own_ip)
            if not nodes:
                return
            announced |= {node for node in nodes - announced if _announce(node, address, round(deadline - answered))}
        time.sleep(POLL_S)


def nodes_in_use(details: dict[str, Any], own_ip: str) -> set[str]:
    """Return the ids of the Ray nodes at an address on which Serve still has a replica or a proxy."""
    used = list((details.get("proxies") or {}).values())
    for application in (details.get("applications") or {}).values():
        for deployment in application.get("deployments", {}).values():
            used += deployment.get("replicas", [])
    return {str(node["node_id"]) for node in used if node.get("node_ip") == own_ip and node.get("node_id")}


def _announce(node: str, address: str, seconds: int) -> bool:
    """Announce to Ray that ``node`` ends in ``seconds``; return whether Ray has accepted that."""
    options = {
        "--address": address,
        "--node-id": node,
        "--reason": REASON,
        "--reason-message": "Kubernetes ends the pod",
        "--deadline-remaining-seconds": str(seconds),
    }
    command = ["ray", "drain-node", *(part for option in options.items() for part in option)]
    try:
        result = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", check=False, timeout=ANNOUNCE_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        problem = f"no answer within {ANNOUNCE_TIMEOUT_S:g} s"
    else:
        problem = result.stderr.strip()[-300:] or "no reason given" if result.returncode else ""
    if problem:
        print(f"pagoda: Ray does not drain node {node}: {problem}", file=sys.stderr)
    return not problem


def _variable(name: str) -> str:
    if value := os.environ.get(name):
        return value
    raise ConfigError(f"{name} is not set; KubeRay and the RayService's manifest set it in a worker pod")


if __name__ == "__main__":
    sys.exit(main())

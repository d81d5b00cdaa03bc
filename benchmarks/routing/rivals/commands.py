"""The command lines of the routers that are servers. Options that the configurations do not set keep their defaults."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.routing.rivals.router_server import free_port

__all__ = ["smg", "vllm_router"]

LOCAL = "127.0.0.1"


def vllm_router(
    options: dict[str, Any], port: int, urls: Sequence[str], event_endpoints: Sequence[str], block_size: int
) -> list[str]:
    """Return vllm-router's command line. With events, its log says which batches it has applied."""
    command = [*_program(options, "vllm-router"), "--host", LOCAL, "--port", str(port), "--policy", options["policy"]]
    command += ["--worker-urls", *urls, "--worker-startup-check-interval", "1"]
    command += ["--prometheus-host", LOCAL, "--prometheus-port", str(free_port())]
    command += ["--log-level", "debug" if event_endpoints else "warning", *options.get("arguments", ())]
    for url, endpoint in zip(urls, event_endpoints, strict=False):
        command += ["--kv-event-source", f"{url}={endpoint}"]
    if event_endpoints:
        command += ["--kv-event-block-size", str(block_size), "--kv-event-model", "m"]
    return command


def smg(options: dict[str, Any], port: int, urls: Sequence[str]) -> list[str]:
    """Return SMG's command line."""
    command = [*_program(options, "smg"), "launch", "--host", LOCAL, "--port", str(port)]
    command += ["--policy", options["policy"], "--worker-urls", *urls, "--log-level", "warn"]
    command += ["--prometheus-host", LOCAL, "--prometheus-port", str(free_port())]
    return [*command, *options.get("arguments", ())]


def _program(options: dict[str, Any], name: str) -> list[str]:
    """Return the router of this environment, or the program that the options name instead."""
    return list(options.get("program") or [str(Path(sys.prefix) / "bin" / name)])

"""`python -m deployments.launch [serve_config.yaml]`: runs the server on this machine; `make serve` calls it.

It checks the config, runs `serve run` as a child process with Ray's fast settings, prints when the server is ready or
why it failed, and ends every process on a stop signal. `serve run` and `serve deploy` work without it.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

from deployments.api.api_keys import ApiKeys
from deployments.launcher.home import provide_home
from deployments.launcher.preflight import Endpoint, check_config, require_free_port
from deployments.launcher.processes import adopt_orphans
from deployments.launcher.progress import StartProgress
from deployments.launcher.server import LaunchError, Server
from deployments.launcher.stop_signals import StopRequested, install_stop_handlers
from engine.errors import PagodaError

__all__ = ["main", "run"]

# A request for a server of each task, without the model.
_EXAMPLES: dict[str, tuple[str, dict[str, Any]]] = {
    "generate": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "Hello! Who are you?"}], "stream": True},
    ),
    "embed": ("/v1/embeddings", {"input": ["Hello!", "What is a KV cache?"]}),
    "score": ("/v1/rerank", {"query": "What is a KV cache?", "documents": ["It keeps keys and values.", "Hello!"]}),
}


def main(arguments: list[str] | None = None) -> int:
    """Run the server until it is stopped; return the exit code."""
    parser = argparse.ArgumentParser(prog="pagoda", description="Run Pagoda on this machine.")
    parser.add_argument("config", nargs="?", default="serve_config.yaml", type=Path)
    return run(parser.parse_args(arguments).config)


def run(config: Path, progress: StartProgress | None = None) -> int:
    """Run the server of a config file until it is stopped; return the exit code.

    Args:
        config: a Serve config file.
        progress: is told how far the start is.
    """
    _print_any_character()
    try:
        provide_home()
        endpoint = check_config(config)
        require_free_port(endpoint)
        ApiKeys.from_environment()
    except PagodaError as error:
        print(f"pagoda: {error}", file=sys.stderr)
        return 1
    stop_at_once = install_stop_handlers()
    adopt_orphans()
    return _serve(config, endpoint, stop_at_once, progress or StartProgress())


def _print_any_character() -> None:
    """Escape characters that the locale's encoding lacks, as on stderr: names of models and log lines may have any."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _serve(config: Path, endpoint: Endpoint, stop_at_once: threading.Event, progress: StartProgress) -> int:
    print(f"pagoda: starting {endpoint.model} on {endpoint.url} ...", flush=True)
    started = time.monotonic()
    server: Server | None = None
    try:
        with progress:
            server = Server(config, endpoint, stop_at_once)
            server.wait_until_ready(endpoint, progress)
        print(_banner(endpoint, time.monotonic() - started), flush=True)
        server.follow_logs()
        code = server.wait()
        print(f"pagoda: serve run ended by itself with exit code {code}", file=sys.stderr)
        return code or 1
    except LaunchError as error:
        print(f"pagoda: {error}", file=sys.stderr)
        return 1
    except StopRequested:
        if server is not None and server.is_ready:
            print("pagoda: stopping after the running streams (signal again to stop at once) ...", flush=True)
            server.drain()
        return 0
    finally:
        if server is not None:
            server.stop()
            print("pagoda: stopped", flush=True)


def _banner(endpoint: Endpoint, seconds: float) -> str:
    page = f"Open {endpoint.url}/ in a browser, or try:" if endpoint.has_page else "Try:"
    key = " -H 'Authorization: Bearer KEY'" if ApiKeys.from_environment() else ""
    path, body = _EXAMPLES[endpoint.task]
    body = {"model": endpoint.model} | body
    return (
        f"\npagoda: ready after {seconds:.0f} s: {endpoint.model} on {endpoint.url}/v1 (Ctrl-C stops it).\n"
        f"{page}\n\n"
        f"  curl -N {endpoint.url}{path}{key} -H 'Content-Type: application/json' \\\n"
        f"    -d '{json.dumps(body)}'\n\n"
        "`make status`, in another terminal, shows the replicas.\n"
    )


if __name__ == "__main__":
    sys.exit(main())

"""A port for probes alone, so that clients cannot take the connections of what decides whether this server gets any.

On Kubernetes a kubelet, or a load balancer, connects from an address that only the cluster's network knows, so that no
limit can make an exception for it. Clients do not reach this port.
Knows HAProxy's configuration as Ray writes it. Imports the standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from deployments.proxy.answers import NOT_FOUND, returned
from deployments.proxy.paths import HEALTH_PATHS

__all__ = ["PORT_VARIABLE", "probe_port", "with_probe_frontend"]

PORT_VARIABLE = "PAGODA_PROBE_PORT"
HEALTHZ = "/-/healthz"  # which Ray's own rules answer
MAX_CONNECTIONS = 64
TIMEOUT = "5s"


def probe_port(environ: Mapping[str, str]) -> int | None:
    """Return the port in the environment; None if there is to be none.

    Raises:
        ValueError: one line that names the variable and its value.
    """
    text = environ.get(PORT_VARIABLE)
    if text is None:
        return None
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise ValueError(f"{PORT_VARIABLE}='{text}' is not a port; give a number from 1 to 65535")
    return int(text)


def with_probe_frontend(text: str, port: int) -> str:
    """Return the configuration with a frontend at ``port`` that answers probes as Ray's does, and nothing else."""
    (main,) = re.findall(r"^frontend http_frontend\n(?: .*\n|\n)+", text, flags=re.MULTILINE)
    (host,) = re.findall(r"^ +bind (\S*):\d+\n", main, flags=re.MULTILINE)
    (healthz,) = re.findall(r"^ +acl healthcheck [^$]*?(?=^ +# Routes endpoint$)", main, flags=re.MULTILINE)
    choice = re.findall(r"^ +(acl is_.*|use_backend .*|default_backend .*)\n", main, flags=re.MULTILINE)
    lines = [
        f"bind {host}:{port}",
        f"maxconn {MAX_CONNECTIONS}",
        *(f"timeout {name} {TIMEOUT}" for name in ("client", "http-request", "http-keep-alive")),
        f"{returned(NOT_FOUND)} unless {{ path {HEALTHZ} }} or {{ path -m end {' '.join(HEALTH_PATHS)} }}",
    ]
    return f"{text}frontend probes\n{_lines(lines)}{healthz}{_lines(choice)}"


def _lines(lines: list[str]) -> str:
    return "".join(f"    {line}\n" for line in lines)

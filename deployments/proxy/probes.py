"""Backends for health probes, so that a probe does not wait for a connection to the ingress behind a burst of requests.

Knows HAProxy's configuration as Ray writes it. Imports the standard library only.
"""

from __future__ import annotations

import re

__all__ = ["HEALTH_PATHS", "with_probe_backends"]

HEALTH_PATHS = ("/health", "/ping")
SUFFIX = "-probes"
IDLE_TIME = "1h"  # more than any probe's period; the ingress closes idle connections too


def with_probe_backends(text: str, no_ingress: str) -> str:
    """Return the configuration with a second backend for each application that has ingresses.

    It has the same servers and a pool of connections of its own, which HAProxy keeps open between two probes. The
    state of a server is that of the first backend's.

    Args:
        text: the configuration, in which ``use_backend NAME if is_NAME`` selects an application.
        no_ingress: what these backends answer if the ingress does not, as a line of the configuration.
    """
    made = []
    for section in re.split(r"^(?=\S)", text, flags=re.MULTILINE):
        name = re.match(r"backend (\S+)\n", section)
        servers = re.findall(r"^ +server (\S+) (\S+) check(?!.*backup$)", section, flags=re.MULTILINE)
        rule = name and re.search(rf"^ +use_backend {re.escape(name[1])} if is_\S+$", text, flags=re.MULTILINE)
        if name is None or not servers or rule is None:
            continue
        probes = name[1] + SUFFIX
        condition = f"{{ path -m end {' '.join(HEALTH_PATHS)} }} {{ nbsrv({probes}) ge 1 }}"
        chosen = rule[0].replace(f"use_backend {name[1]} ", f"use_backend {probes} ")
        text = text.replace(rule[0], f"{chosen} {condition}\n{rule[0]}")
        made.append(_backend(name[1], servers, no_ingress))
    return text + "".join(made)


def _backend(name: str, servers: list[tuple[str, str]], no_ingress: str) -> str:
    lines = [
        "http-reuse always",
        "retry-on conn-failure empty-response",  # the ingress may just close an idle connection
        no_ingress,
        f"default-server pool-purge-delay {IDLE_TIME}",
        *(f"server {server} {address} track {name}/{server}" for server, address in servers),
    ]
    return f"backend {name}{SUFFIX}\n" + "".join(f"    {line}\n" for line in lines)

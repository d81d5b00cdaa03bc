"""More backends for an application than the one that Ray writes, with the same ingresses: for probes and whole answers.

A health probe does not wait for a connection to the ingress behind a burst of requests.

Some clients close their side of the connection once they have sent their request, others close it because they have
gone away, and HAProxy cannot tell which until it writes: a client that has gone answers with a reset. So a stream goes
on after such a close, and ends at the first tokens, or comments (deployments/api/sse.py), that no one takes. A whole
answer is not written before its end; its request is aborted, so that no engine computes what no one reads.

Knows HAProxy's configuration as Ray writes it. Imports the standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from deployments.proxy.paths import HEALTH_PATHS, OPERATIONS

__all__ = ["wait_for_stream_rules", "with_more_backends"]

_IS_FOR_TOKENS = f"{{ method POST }} {{ path -m end {' '.join(OPERATIONS)} }}"
PROBES, WHOLE = "-probes", "-whole"
# In a JSON string the quotes would have backslashes. A field of an inner object is taken for the body's, too.
ASKS_FOR_A_STREAM = r"""req.body -m reg '[{,\s]"stream"\s*:\s*true'"""
MAX_WAIT = "500ms"  # for the body, which clients send right after the head
IDLE_TIME = "1h"  # more than any probe's period; the ingress closes idle connections too


def wait_for_stream_rules() -> list[str]:
    """Return the rules of a frontend that wait until a request of up to 31 KiB has come whole, but not for long.

    Of a longer or later one it is not known whether it asks for a stream, unless its beginning does. A client that
    expects to be told to send the body is not waited for.
    """
    expects_body = f"{_IS_FOR_TOKENS} !{{ req.hdr(expect) -m found }}"
    return [
        f"tcp-request inspect-delay {MAX_WAIT}",
        f"tcp-request content accept if {expects_body} {{ {ASKS_FOR_A_STREAM} }}",
    ]


def with_more_backends(text: str, no_ingress: str) -> str:
    """Return the configuration with backends for probes and for whole answers of each application with ingresses.

    They have the same servers and pools of connections of their own; HAProxy keeps that of the probes open between two
    of them. The state of a server is that of Ray's backend's.

    Args:
        text: the configuration, in which ``use_backend NAME if is_NAME`` selects an application.
        no_ingress: what the backends answer if the ingress does not, as a line of the configuration.
    """
    backends = []
    for section in re.split(r"^(?=\S)", text, flags=re.MULTILINE):
        name = re.match(r"backend (\S+)\n", section)
        servers = re.findall(r"^ +server (\S+) (\S+) check(?!.*backup$)", section, flags=re.MULTILINE)
        rule = name and re.search(rf"^ +use_backend {re.escape(name[1])} if is_\S+$", text, flags=re.MULTILINE)
        if name is None or not servers or rule is None:
            continue
        text = text.replace(rule[0], _rules(name[1], rule[0]))
        tracking = [f"server {server} {address} track {name[1]}/{server}" for server, address in servers]
        probes = [
            "retry-on conn-failure empty-response",  # the ingress may just close an idle connection
            f"default-server pool-purge-delay {IDLE_TIME}",
        ]
        backends.append(_backend(name[1] + PROBES, [no_ingress, *probes, *tracking]))
        backends.append(_backend(name[1] + WHOLE, [no_ingress, "option abortonclose", *tracking]))
    return text + "".join(backends)


def _rules(name: str, rule: str) -> str:
    """Return the rule that selects a backend after those that select the others for some requests."""
    probes, whole = (rule.replace(f"use_backend {name} ", f"use_backend {name}{kind} ") for kind in (PROBES, WHOLE))
    return (
        f"{probes} {{ path -m end {' '.join(HEALTH_PATHS)} }} {{ nbsrv({name}{PROBES}) ge 1 }}\n"
        f"{whole} {_IS_FOR_TOKENS} !{{ {ASKS_FOR_A_STREAM} }} {{ nbsrv({name}{WHOLE}) ge 1 }}\n"
        f"{rule}"
    )


def _backend(name: str, lines: Sequence[str]) -> str:
    return f"backend {name}\n" + "".join(f"    {line}\n" for line in ["http-reuse always", *lines])

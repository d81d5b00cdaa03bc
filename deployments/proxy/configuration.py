"""`python configuration.py FILE`: makes HAProxy's configuration, as Ray Serve writes it, safe for open networks.

haproxy.sh runs this before each start and reload of HAProxy, for which Ray writes a new file.
"""

from __future__ import annotations

import os
import re
import resource
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # it is run by its path

from deployments.proxy.answers import NOT_FOUND, NOT_READY, error_files, http_error, returned, with_json_errors
from deployments.proxy.backends import with_more_backends
from deployments.proxy.client_rules import LOOPBACK, client_rules
from deployments.proxy.limits import ProxyLimits
from deployments.proxy.listeners import IPV6_VARIABLE, with_listening_servers
from deployments.proxy.paths import HEALTH_PATHS
from deployments.proxy.probe_frontend import probe_port, with_probe_frontend

__all__ = ["UnknownConfigurationError", "hardened", "main", "within_file_limit"]

RESERVED_CONNECTIONS = 256  # for this machine's own probes, and for HAProxy's pages
FILES_OF_ITS_OWN = 256
# An ingress that is busy answers HAProxy's checks late, each within 5 s or not at all; one that has died refuses them.
CHECKS_UNTIL_DOWN = 6
# A longer head, or one of more headers, gets a short text in HTML from HAProxy's parser; see client_rules.py. As much
# memory can a client without a key take for each of its connections.
BUFFER_BYTES = 2**15
MANY_HEADERS = "tune.http.maxhdr 4096"
MARK = "# Changed by Pagoda, see deployments/proxy/configuration.py\n"


class UnknownConfigurationError(Exception):
    """The file is not what this version of Ray Serve writes."""


def hardened(
    text: str, limits: ProxyLimits, directory: Path, port_of_probes: int | None = None, *, listens_on_ipv6: bool = False
) -> str:
    """Return the configuration with limits, JSON errors, and pages and sockets for this machine and user only.

    Args:
        text: the configuration as Ray writes it.
        limits: for clients.
        directory: of the files with HAProxy's own answers.
        port_of_probes: at which nothing but probes is answered, or None.
        listens_on_ipv6: whether the host is ``::``, all addresses; Ray writes the same as for 0.0.0.0, those of IPv4.

    Raises:
        UnknownConfigurationError: a line that must be changed is not there.
    """
    own = f"bind {LOOPBACK}:"
    text = _replaced(text, r"^( +)maxconn \d+$", rf"\g<1>maxconn {limits.max_connections + RESERVED_CONNECTIONS}")
    text = _replaced(text, r"^( +)tune\.bufsize \d+$", rf"\g<1>tune.bufsize {BUFFER_BYTES}\n{_lines([MANY_HEADERS])}")
    text = _replaced(text, r"^( +stats socket \S+ )mode 666 ", r"\g<1>mode 600 ")
    text = _replaced(text, r"^ +log 127\.0\.0\.1:514 .*\n", "", at_least=0)  # each request's path, for any syslog there
    # Only whole answers are aborted (backends.py); the frontend's rules for errors would fail after such a close.
    text = _replaced(text, r"^ +option abortonclose\n", "")
    text = _replaced(text, r"^( +)errorfile \d+ .*\n", "", at_least=0)
    text = _replaced(text, r"^ +timeout (client|http-keep-alive) .*\n", "", at_least=2)
    text = _replaced(text, r"^defaults\n", "defaults\n" + _lines(_defaults(limits, directory)))
    text = _replaced(text, r"^(frontend prometheus\n +)bind :", rf"\g<1>{own}")
    text = _replaced(text, r"^(listen stats\n +)bind \*:", rf"\g<1>{own}")
    rules = _lines(client_rules(limits)).replace("\\", r"\\")  # which has a meaning in a replacement
    text = _replaced(text, r"^(frontend http_frontend\n +bind .*\n)", rf"\g<1>{rules}")
    text = with_listening_servers(text, listens_on_ipv6=listens_on_ipv6)
    text = _replaced(text, r"^( +default-server .*\bfall) \d+", rf"\g<1> {CHECKS_UNTIL_DOWN}", at_least=0)
    text = _replaced(text, r"^( +)http-request return status 404 .*$", rf"\g<1>{returned(NOT_FOUND)}")
    text = with_json_errors(text)
    text = with_more_backends(text, http_error(NOT_READY))
    text = "".join(map(_with_health, re.split(r"^(?=\S)", text, flags=re.MULTILINE)))
    return text if port_of_probes is None else with_probe_frontend(text, port_of_probes)


def _with_health(section: str) -> str:
    """Return a section with an answer to health checks if it is a backend.

    It is used while no ingress is up. Serve's own proxy, which is the backup, lets requests wait: the only ingress may
    just be replaced by a new version of it.
    """
    backend = re.match(r"backend (\S+)\n", section)
    servers = re.findall(r"^ +server (\S+) .*?(backup)?$", section, flags=re.MULTILINE)
    if backend is None or not any(backup for _, backup in servers):
        return section
    ingresses = [name for name, backup in servers if not backup]
    condition = f"{{ path -m end {' '.join(HEALTH_PATHS)} }}{' !an_ingress_is_up' if ingresses else ''}"
    is_up = [f"acl an_ingress_is_up srv_is_up({backend[1]}/{name})" for name in ingresses]
    return section + _lines([*is_up, f"{returned(NOT_READY)} if {condition}"])


def _defaults(limits: ProxyLimits, directory: Path) -> list[str]:
    errors = [f"errorfile {name.removesuffix('.http')} {directory / name}" for name in error_files()]
    timeouts = {
        "http-request": limits.header_timeout_s,
        "http-keep-alive": limits.keep_alive_timeout_s,
        "client": limits.send_timeout_s,
    }
    return [*(f"timeout {name} {round(1000 * seconds)}ms" for name, seconds in timeouts.items()), *errors]


def within_file_limit(limits: ProxyLimits, max_files: int) -> ProxyLimits:
    """Return the limits for a process of at most ``max_files`` files. HAProxy does not start with too many connections.

    It counts two files and half a pipe for a connection, and some for itself.
    """
    possible = 2 * (max_files - FILES_OF_ITS_OWN) // 5 - RESERVED_CONNECTIONS
    return replace(limits, max_connections=max(1, min(limits.max_connections, possible)))


def _lines(lines: Sequence[str]) -> str:
    return "".join(f"    {line}\n" for line in lines)


def _replaced(text: str, pattern: str, replacement: str, *, at_least: int = 1) -> str:
    result, count = re.subn(pattern, replacement, text, flags=re.MULTILINE)
    if count < at_least:
        raise UnknownConfigurationError(f"no line is like '{pattern}'; is this Ray Serve 2.60?")
    return result


def main(arguments: list[str]) -> int:
    """Change the file in its place, since Ray finds its HAProxy by the file's name; returns the exit code."""
    path = Path(arguments[0])
    try:
        text = path.read_text(encoding="utf-8")
        if not text.startswith(MARK):
            limits = ProxyLimits.from_environment(os.environ)
            _, max_files = resource.getrlimit(resource.RLIMIT_NOFILE)  # HAProxy raises its own to this
            if max_files != resource.RLIM_INFINITY:
                limits = within_file_limit(limits, max_files)
            changed = hardened(
                text, limits, path.parent, probe_port(os.environ), listens_on_ipv6=IPV6_VARIABLE in os.environ
            )
            for name, answer in error_files().items():
                path.with_name(name).write_bytes(answer.encode())
            path.write_text(MARK + changed, encoding="utf-8")
    except (UnknownConfigurationError, ValueError, OSError) as error:
        print(f"pagoda: {path} cannot be made safe: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

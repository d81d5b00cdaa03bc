"""Where HAProxy listens for clients, and where the ingresses after it listen: at `http_options.host`, all of them.

Ray connects HAProxy to the ingresses of its machine at the loopback address, whatever host they listen at.
Knows HAProxy's configuration as Ray writes it. Imports the standard library only.
"""

from __future__ import annotations

import re
from ipaddress import IPv6Address

__all__ = ["IPV6_VARIABLE", "is_all_of_ipv6", "with_listening_servers"]

IPV6_VARIABLE = "PAGODA_LISTEN_ON_IPV6"
AT_LOOPBACK = ("*", "", "localhost")  # hosts at which Ray's own addresses of servers are right


def is_all_of_ipv6(host: str) -> bool:
    """Whether a host is ``::``, in any of the ways to write it."""
    try:
        return IPv6Address(host).is_unspecified
    except ValueError:
        return False


def with_listening_servers(text: str, *, listens_on_ipv6: bool) -> str:
    """Return the configuration with servers at the host where they listen.

    Args:
        text: the configuration, in which http_frontend has one `bind`.
        listens_on_ipv6: whether that host is ``::``; then HAProxy listens on all addresses of IPv6, too.
    """
    bind = re.search(r"^frontend http_frontend\n +bind (\S*):(\d+)\n", text, flags=re.MULTILINE)
    assert bind is not None  # the caller knows the configuration
    host = "::1" if listens_on_ipv6 else bind[1]
    if listens_on_ipv6:  # apart from IPv4, whose clients would all count as those of one network of IPv6
        binds = f"    bind *:{bind[2]}\n    bind :::{bind[2]} v6only\n"
        text = text.replace(bind[0], f"frontend http_frontend\n{binds}")
    if host in AT_LOOPBACK:
        return text
    address = f"[{host}]" if ":" in host else host
    servers = r"^( +server \S+ )(?:127\.0\.0\.1|::1):(?=\d+ )"
    return re.sub(servers, lambda server: f"{server[1]}{address}:", text, flags=re.MULTILINE)

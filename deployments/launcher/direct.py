"""Requests to processes of our own: ``urllib.request.urlopen`` that never asks a proxy, and hosts in their URLs.

The variables http_proxy, https_proxy and all_proxy name one that reaches the internet, and not this machine or pod.
"""

from __future__ import annotations

import urllib.request

__all__ = ["direct_urlopen", "host_in_url"]

direct_urlopen = urllib.request.build_opener(urllib.request.ProxyHandler({})).open


def host_in_url(host: str) -> str:
    """Return a host as a URL writes it: an address of IPv6 in brackets."""
    return f"[{host}]" if ":" in host else host

"""direct_urlopen: ``urllib.request.urlopen`` that never asks a proxy, for processes of our own.

The variables http_proxy, https_proxy and all_proxy name one that reaches the internet, and not this machine or pod.
"""

from __future__ import annotations

import urllib.request

__all__ = ["direct_urlopen"]

direct_urlopen = urllib.request.build_opener(urllib.request.ProxyHandler({})).open

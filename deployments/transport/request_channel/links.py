"""Links: the links of one ingress to all replicas of a deployment.

``set_replicas`` says which replicas there are. A replica that is no longer listed takes no new requests; its link stays
until its streams have ended, because a replica that shuts down finishes them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

import zmq

from deployments.transport.request_channel.address import ReplicaAddress
from deployments.transport.request_channel.dispatch import Dispatch
from deployments.transport.request_channel.link import Link
from deployments.transport.request_channel.sockets import Socket
from engine.errors import ConfigError

__all__ = ["Links"]

logger = logging.getLogger("ray.serve")

MAX_SOCKETS = 16_384  # four for each replica


class Links:
    """The links of one ingress. Make it on the event loop that is to use it.

    Args:
        on_change: called when a link may take requests that it did not take before.
        on_returned: as in Link.
        on_left: called with a replica, which has not been lost, when it is no longer listed, and its metadata.
        on_joined: called with a replica when it takes requests for the first time.
        tick_s: how often connections are kept alive and outputs acknowledged.

    Attributes:
        names: of the listed replicas, whether they take requests or not; the same tuple until they change.
    """

    def __init__(
        self,
        *,
        on_change: Callable[[], None],
        on_returned: Callable[[Dispatch, Exception], None],
        on_left: Callable[[str, Mapping[str, Any]], None] = lambda name, metadata: None,
        on_joined: Callable[[str], None] = lambda name: None,
        tick_s: float = 0.5,
    ) -> None:
        self._on_change = on_change
        self._on_returned = on_returned
        self._on_left, self._on_joined = on_left, on_joined
        self._metadata: Mapping[str, Mapping[str, Any]] = {}
        self._joined: set[str] = set()  # that have taken requests
        self._tick_s = tick_s
        self._listed: dict[str, Link] = {}
        self.names: tuple[str, ...] = ()
        self._retired: list[Link] = []  # not listed, with streams
        self._rejected: set[str] = set()
        self._context: zmq.Context[Socket] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(tick_s, self._tick)
        self._is_closed = False

    def set_replicas(self, metadata: Mapping[str, Mapping[str, Any]]) -> None:
        """Replace the set of replicas: name -> the metadata that the replica reported. Any thread may call it."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._update, dict(metadata))

    def __getitem__(self, replica: str) -> Link:
        return self._listed[replica]

    def __len__(self) -> int:
        return len(self._listed)

    @property
    def ready(self) -> list[str]:
        """The names of the replicas that take requests."""
        return [name for name, link in self._listed.items() if link.takes_requests]

    def is_lost(self, replica: str) -> bool:
        """Whether a listed replica does not listen any more: Serve has not noticed yet."""
        link = self._listed.get(replica)
        return link is not None and link.is_lost

    def cancel(self, dispatch: Dispatch) -> None:
        """Forget a dispatch; if it is unfinished, its replica aborts the request."""
        for link in (self._listed.get(dispatch.replica), *self._retired):
            if link is not None:
                link.cancel(dispatch)

    def close(self) -> None:
        """Close all links; unfinished streams fail."""
        self._is_closed = True
        self._timer.cancel()
        for link in [*self._listed.values(), *self._retired]:
            link.close()
        self._context.term()

    def _update(self, metadata: Mapping[str, Mapping[str, Any]]) -> None:
        if self._is_closed:
            return
        addresses = {name: ReplicaAddress.from_metadata(described) for name, described in metadata.items()}
        for name, link in list(self._listed.items()):
            if addresses.get(name) != link.address:
                self._retired.append(self._listed.pop(name))
        for name, address in addresses.items():
            if address is not None and name not in self._listed and name not in self._rejected:
                self._add(name, address)
        self.names = tuple(self._listed)
        left = [name for name in self._joined if name not in self._listed]
        was, self._metadata = self._metadata, metadata
        self._joined.difference_update(left)
        for name in left:
            if not any(link.replica == name and link.is_lost for link in self._retired):
                self._on_left(name, was[name])
        self._on_change()

    def _add(self, name: str, address: ReplicaAddress) -> None:
        for link in self._retired:
            if link.replica == name and link.address == address:  # it is listed again
                self._retired.remove(link)
                self._listed[name] = link
                return
        try:
            self._listed[name] = Link(
                name, address, self._context, on_change=self._on_change, on_returned=self._on_returned
            )
        except ConfigError:
            self._rejected.add(name)  # logged once, since the list is repeated
            logger.exception("replica %s cannot be reached at %s", name, address.requests)

    def _tick(self) -> None:
        self._timer = self._loop.call_later(self._tick_s, self._tick)
        for link in [link for link in self._retired if link.is_idle]:
            self._retired.remove(link)
            link.close()
        for link in [*self._listed.values(), *self._retired]:
            link.tick()
        for name in self.ready:
            if name not in self._joined:
                self._joined.add(name)
                self._on_joined(name)

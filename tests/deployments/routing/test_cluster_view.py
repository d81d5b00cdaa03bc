"""The view of the replicas while requests start and end."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from deployments.routing.cluster_view import ClusterView


def test_a_request_that_ends_during_its_dispatch_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The router may run in a thread of its own."""
    view = ClusterView()
    view.set_replicas({"r1": {}})
    dispatched = view.routing.dispatched
    ending = threading.Thread(target=view.end, args=("id",))

    def end_meanwhile(*args: Any, **kwargs: Any) -> None:
        ending.start()
        ending.join(0.1)
        dispatched(*args, **kwargs)

    monkeypatch.setattr(view.routing, "dispatched", end_meanwhile)
    view.begin("id")
    view.dispatch("id", "r1", [7], 3)
    ending.join()
    assert view.queued() == (0, 0)


def test_a_draining_replica_is_observed_until_our_requests_there_end() -> None:
    view = ClusterView()
    view.set_replicas({"r1": {}, "r2": {}})
    for name in ("a", "b"):
        view.begin(name)
        view.dispatch(name, "r1", [1], 20)
    view.set_replicas({"r2": {}})
    assert view.replicas == {"r2"}
    assert view.routing.replicas == {"r1", "r2"}
    view.end("a")
    assert view.routing.replicas == {"r1", "r2"}
    view.end("b")
    assert view.routing.replicas == {"r2"}
    view.set_replicas({})
    assert view.routing.replicas == frozenset()

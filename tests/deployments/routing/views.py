"""Views of a cluster for tests of routing, without Ray and with a clock that the test moves."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from deployments.routing.cluster_view import ClusterView
from deployments.routing.options import RoutingOptions
from deployments.routing.policy import Decision
from deployments.transport.request_channel.dispatch import Dispatch
from engine.observability.load import EngineLoad
from tests.deployments.routing.dispatches import dispatch_of, send

IDLE = EngineLoad(0, 0, 0, 1_000, 1_000, 1_000.0, 0)
BLOCK_SIZE = 16
DEFAULTS = RoutingOptions()


class View(ClusterView):
    """A view whose clock the test moves."""

    def __init__(self, options: RoutingOptions = DEFAULTS) -> None:
        super().__init__(options, clock=lambda: self.now)
        self.now = 0.0
        self.index, self.table = self.routing.index, self.routing.table

    @property
    def options(self) -> RoutingOptions:
        return self.table.options


def make_view(names: str = "abcd", *, reports: bool = True, now: float = 0.0) -> View:
    """Return a view of replicas that are idle, empty and connected."""
    view = View()
    view.set_replicas({name: {} for name in names})
    for name in names:
        view.routing.replaced(name, [])
        if reports:
            view.routing.report(name, IDLE, now=now)
    return view


def queue(view: View, name: str, tokens: int, *, now: float = 0.0, waiting: int = 1) -> None:
    view.routing.report(name, replace(IDLE, num_waiting=waiting, queued_prefill_tokens=tokens), now=now)


def choose(
    view: View, names: str, hashes: Sequence[int], num_tokens: int, *, now: float = 0.0, avoid: Sequence[str] = ()
) -> Decision:
    view.now = now
    decision = view.choose(dispatch_of(hashes, num_tokens, avoid=avoid), list(names))
    assert decision is not None
    return decision


def ranked(
    view: View, names: str, hashes: Sequence[int], num_tokens: int, *, now: float = 0.0, avoid: Sequence[str] = ()
) -> str:
    """Return the replicas in the order in which they are chosen if each chosen one drops out."""
    order = ""
    while left := names.translate(dict.fromkeys(map(ord, order))):
        order += choose(view, left, hashes, num_tokens, now=now, avoid=avoid).replica
    return order


def first(view: View, hashes: Sequence[int], names: str = "abcd", *, now: float = 0.0) -> str:
    return choose(view, names, hashes, len(hashes) * BLOCK_SIZE, now=now).replica


def dispatched(view: View, name: str, hashes: Sequence[int], num_tokens: int, *, now: float) -> Dispatch:
    view.now = now
    return send(view, name, hashes, num_tokens)


def queued(view: View, now: float) -> tuple[int, int]:
    view.now = now
    return view.queued()


def prompt(number: int, length: int = 8, shared: int = 0) -> list[int]:
    """Return hashes of which the first ``shared`` are common to all prompts."""
    return [*range(shared), *range(1_000 * (number + 1), 1_000 * (number + 1) + length - shared)]


# --- cached prefixes ------------------------------------------------------------------------------------------

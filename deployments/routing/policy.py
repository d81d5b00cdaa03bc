"""RoutingPolicy: chooses one of the candidate replicas for a prompt.

1. Each candidate has a cost in seconds (cost.py). The cheapest is chosen.
2. Replicas whose load reports have expired come after all others, and replicas to avoid come last.
3. The replicas that hold as much of the prompt as the cheapest and cost hardly more (``_TIED``) are tied.
   Rendezvous hashing on the block after the longest cached prefix picks one of them: every ingress picks the same one
   without communicating, so a burst of one new prompt lands on one replica. After consistent hashing with bounded
   loads (Mirrokni et al., 2018).
4. Prompts without a full block have no hashes: equally cheap replicas take turns.

It reads costs and numbers of cached blocks; its only state is a round-robin counter. It knows neither Ray nor sockets
nor clocks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deployments.routing.cost import Fetch, Prices, PromptBlocks, PromptCost, ReplicaCosts, prompt_cost, prompt_costs
from deployments.routing.fetches import Sources, best_fetch, saved_per_block
from deployments.routing.held_blocks import HeldBlocks
from deployments.routing.replica_table import ReplicaTable

__all__ = ["Decision", "RoutingPolicy"]

_FREE = PromptCost(0.0, 0.0, 0.0, 0.0, 0.0)
_TIED = 1.002  # times the lowest cost
_MAX_FETCHING = 8  # replicas whose fetches are compared: there may be a thousand idle ones

_Floats = npt.NDArray[np.float64]
_Tiers = npt.NDArray[np.int8]


@dataclass(frozen=True, slots=True)
class Decision:
    """The replica for one request, and the cache hits that the choice was based on."""

    replica: str
    outcome: str  # hit | cold | balanced | fallback | retry
    num_cached_blocks: int  # leading blocks of the prompt that the replica is predicted to have cached
    max_cached_blocks: int  # the most that any replica is predicted to have cached
    cost: PromptCost = _FREE
    next_cost_s: float | None = None  # the whole cost of the next best replica; None: there is no other
    fetch: Fetch | None = None  # what the replica fetches before it computes the rest

    @property
    def num_held_blocks(self) -> int:
        """Leading blocks of the prompt that the replica need not compute."""
        return self.num_cached_blocks if self.fetch is None else self.fetch.num_blocks


class RoutingPolicy:
    """Chooses the candidate of the lowest cost; ties go by rendezvous hashing."""

    def __init__(self, table: ReplicaTable) -> None:
        self._table = table
        self._turn = 0

    def choose(
        self,
        candidates: Sequence[str],
        prompt: PromptBlocks,
        num_cached_blocks: HeldBlocks | Mapping[str, int],
        avoid: Collection[str],
        max_tokens: int | None = None,
        sources: Sources | None = None,
    ) -> Decision:
        """Choose one of ``candidates``, at least one and all in the table.

        Args:
            candidates: names of replicas.
            prompt: the prompt to send.
            num_cached_blocks: how many leading blocks of the prompt each replica has cached; absent means none.
            avoid: replicas that have just failed this request.
            max_tokens: the most that the answer may have; None sets no limit.
            sources: from where the prompt's beginning can be fetched; None: from nowhere.
        """
        prices = self._table.cluster.prices(max_tokens, self._table.options.first_token_weight)
        rows = self._table.rows.rows(candidates)
        replicas = self._table.rows.costs(rows)
        cached = self._table.rows.held(num_cached_blocks, rows)
        costs = prompt_costs(replicas, prompt, cached, prices)
        tiers = self._table.rows.tiers(rows, avoid)
        usual = costs if tiers is None else np.where(tiers == tiers.min(), costs, np.inf)
        fetches = self._fetch(candidates, prompt, prices, sources, usual, cached, replicas) if sources else {}
        best = _most(num_cached_blocks)
        if hashes := prompt.hashes:
            tied = _tied(usual, cached)
            chosen = int(tied[0])
            if len(tied) > 1:
                chosen = int(tied[self._table.rows.rendezvous(rows[tied], hashes[min(best, len(hashes) - 1)])])
        else:
            chosen = self._in_turn(usual)
        name = candidates[chosen]
        predicted, fetch = int(cached[chosen]), fetches.get(chosen)
        cost = prompt_cost(self._table.by_name[name], prompt, predicted, prices, fetch)
        next_cost = _next_cost(usual, costs, tiers, chosen)
        outcome = _outcome(bool(hashes), bool(avoid), predicted, best)
        return Decision(name, outcome, predicted, best, cost, next_cost, fetch)

    def _fetch(
        self,
        candidates: Sequence[str],
        prompt: PromptBlocks,
        prices: Prices,
        sources: Sources,
        costs: _Floats,
        cached: _Floats,
        replicas: ReplicaCosts,
    ) -> dict[int, Fetch]:
        """Return what the candidates fetch, by their number, and reduce their costs by what that saves.

        It leaves out replicas that would cost more than the cheapest one even if a fetch took no time.
        """
        cheapest = float(costs.min())
        missing = sources.max_blocks - cached
        floors = costs - missing * (saved_per_block(prompt, prices) * replicas.seconds_per_token)
        gaining = np.flatnonzero((missing > 0) & (floors <= cheapest * _TIED))
        by_floor = gaining[np.argsort(floors[gaining], kind="stable")[:_MAX_FETCHING]]
        fetches = dict[int, Fetch]()
        for number in by_floor.tolist():
            if floors[number] > cheapest * _TIED:
                break
            name = candidates[number]
            fetch = best_fetch(name, self._table.by_name[name], prompt, int(cached[number]), sources, prices)
            if fetch is not None:
                fetches[number] = fetch
                costs[number] -= fetch.saved_s
                cheapest = min(cheapest, float(costs[number]))
        return fetches

    def _in_turn(self, costs: _Floats) -> int:
        """Return the number of one of the cheapest; equals take turns."""
        cheapest = np.flatnonzero(costs == costs.min())
        self._turn = (self._turn + 1) % len(costs)
        return int(cheapest[np.searchsorted(cheapest, self._turn) % len(cheapest)])


def _most(num_blocks: HeldBlocks | Mapping[str, int]) -> int:
    return num_blocks.most if isinstance(num_blocks, HeldBlocks) else max(num_blocks.values(), default=0)


def _tied(costs: _Floats, cached: _Floats) -> npt.NDArray[np.intp]:
    """Return the numbers of the replicas that are about as cheap as the cheapest and hold as much of the prompt."""
    first = costs.argmin()
    return np.flatnonzero((costs <= costs[first] * _TIED) & (cached == cached[first]))


def _next_cost(usual: _Floats, costs: _Floats, tiers: _Tiers | None, chosen: int) -> float | None:
    """Return the lowest cost of the others, in the best of their tiers; None if there are no others.

    Args:
        usual: the costs of the best tier, and infinity for the others. The chosen one's is overwritten.
        costs: of all.
        tiers: of all; None: there is one.
        chosen: the number of the replica that is chosen.
    """
    if len(costs) == 1:
        return None
    usual[chosen] = np.inf
    lowest = float(usual.min())
    if lowest != np.inf or tiers is None:
        return lowest
    others = np.arange(len(costs)) != chosen
    return float(costs[others & (tiers == tiers[others].min())].min())


def _outcome(has_hashes: bool, is_retry: bool, predicted: int, best: int) -> str:
    """Return why the replica was chosen: the label of the metric ``routing_decisions``."""
    if is_retry:
        return "retry"
    if not has_hashes:
        return "fallback"  # nothing to match
    if not best:
        return "cold"  # no replica holds any of it
    return "hit" if predicted == best else "balanced"  # balanced: a less loaded replica that holds less of it

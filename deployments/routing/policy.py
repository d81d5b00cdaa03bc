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
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from deployments.routing.cost import Fetch, Prices, PromptBlocks, PromptCost, prompt_cost
from deployments.routing.fetches import Sources, best_fetch, saved_per_block
from deployments.routing.held_blocks import HeldBlocks
from deployments.routing.replica_table import ReplicaTable

__all__ = ["Decision", "RoutingPolicy"]

_FREE = PromptCost(0.0, 0.0, 0.0, 0.0, 0.0)
_TIED = 1.002  # times the lowest cost
_MAX_FETCHING = 8  # replicas whose fetches are compared: there may be a thousand idle ones
_EXCLUDED = 3  # the tier of rows that are no candidates

_Floats = npt.NDArray[np.float64]
_Tiers = npt.NDArray[np.int8]


class Decision(NamedTuple):
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
        self._turn = -1  # the row that was chosen last of equals

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
        rows = self._table.rows
        cached = rows.held(num_cached_blocks)
        costs = rows.costs(candidates, prompt, cached, prices)
        usual = costs
        if (tiers := rows.tiers(avoid)) is not None:
            tiers[costs == np.inf] = _EXCLUDED
            usual = np.where(tiers == tiers.min(), costs, np.inf)
        fetches = self._fetch(prompt, prices, sources, usual, cached) if sources else {}
        best = _most(num_cached_blocks)
        if hashes := prompt.hashes:
            chosen = self._tied(usual, cached, hashes[min(best, len(hashes) - 1)])
        else:
            chosen = self._in_turn(usual)
        name, fetch = rows.names[chosen], fetches.get(chosen)
        predicted = 0 if cached is None else int(cached[chosen])
        cost = prompt_cost(self._table.by_name[name], prompt, predicted, prices, fetch)
        next_cost = _next_cost(usual, costs, tiers, chosen)
        outcome = _outcome(bool(hashes), bool(avoid), predicted, best)
        return Decision(name, outcome, predicted, best, cost, next_cost, fetch)

    def _fetch(
        self, prompt: PromptBlocks, prices: Prices, sources: Sources, costs: _Floats, cached: _Floats | None
    ) -> dict[int, Fetch]:
        """Return what the replicas fetch, by their rows, and reduce their costs by what that saves.

        It leaves out replicas that would cost more than the cheapest one even if a fetch took no time.
        """
        rows, most = self._table.rows, sources.max_blocks
        cheapest: float = costs[costs.argmin()].item()
        missing = np.full(len(costs), float(most)) if cached is None else most - cached
        floors = costs - missing * (saved_per_block(prompt, prices) * rows.seconds_per_token)
        floors[missing <= 0] = np.inf
        fetches: dict[int, Fetch] = {}
        for _ in range(_MAX_FETCHING):
            row = int(floors.argmin())
            if floors[row] > cheapest * _TIED:
                break
            floors[row] = np.inf
            name = rows.names[row]
            num_cached = most - int(missing[row])
            fetch = best_fetch(name, self._table.by_name[name], prompt, num_cached, sources, prices)
            if fetch is not None:
                fetches[row] = fetch
                costs[row] -= fetch.saved_s
                cheapest = min(cheapest, float(costs[row]))
        return fetches

    def _tied(self, costs: _Floats, cached: _Floats | None, block: int) -> int:
        """Return one of the rows that are about as cheap as the cheapest and hold as much: by rendezvous hashing."""
        first = int(costs.argmin())
        tied = (costs <= costs[first] * _TIED).nonzero()[0]
        if len(tied) > 1 and cached is not None:
            tied = tied[cached[tied] == cached[first]]
        return first if len(tied) == 1 else self._table.rows.rendezvous(tied, block)

    def _in_turn(self, costs: _Floats) -> int:
        """Return one of the cheapest rows; equals take turns."""
        cheapest = (costs == costs[costs.argmin()]).nonzero()[0]
        self._turn = int(cheapest[np.searchsorted(cheapest, self._turn, "right") % len(cheapest)])
        return self._turn


def _most(num_blocks: HeldBlocks | Mapping[str, int]) -> int:
    return num_blocks.most if isinstance(num_blocks, HeldBlocks) else max(num_blocks.values(), default=0)


def _next_cost(usual: _Floats, costs: _Floats, tiers: _Tiers | None, chosen: int) -> float | None:
    """Return the lowest cost of the others, in the best of their tiers; None if there are no others.

    Args:
        usual: the costs of the candidates of the best tier, and infinity for the others. Like the other arrays it is
            overwritten.
        costs: of all rows, infinity for those that are no candidates.
        tiers: of all rows; None: the candidates have one.
        chosen: the row of the replica that is chosen.
    """
    usual[chosen] = costs[chosen] = np.inf
    lowest: float = usual[usual.argmin()].item()
    if lowest == np.inf and tiers is not None:
        tiers[chosen] = _EXCLUDED
        lowest = np.where(tiers == tiers.min(), costs, np.inf).min().item()
    return None if lowest == np.inf else lowest


def _outcome(has_hashes: bool, is_retry: bool, predicted: int, best: int) -> str:
    """Return why the replica was chosen: the label of the metric ``routing_decisions``."""
    if is_retry:
        return "retry"
    if not has_hashes:
        return "fallback"  # nothing to match
    if not best:
        return "cold"  # no replica holds any of it
    return "hit" if predicted == best else "balanced"  # balanced: a less loaded replica that holds less of it

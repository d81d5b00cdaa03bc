"""RoutingPolicy: ranks the candidate replicas for one prompt.

1. Each candidate has a cost in seconds (cost.py). The cheapest is first.
2. Replicas whose load reports have expired come after the others, and replicas to avoid come last.
3. The replicas that hold as much of the prompt as the first and cost hardly more (``_TIED``) are tied.
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

from deployments.routing.cost import Fetch, Prices, PromptBlocks, PromptCost, prompt_cost, prompt_costs
from deployments.routing.fetches import Sources, best_fetch, saved_per_block
from deployments.routing.replica_table import ReplicaTable

__all__ = ["Decision", "RoutingPolicy"]

_GOLDEN_RATIO_64 = (
    0x9E3779B97F4A7C15  # 2**64 / golden ratio: spreads values that differ in few bits (Fibonacci hashing)
)
_MASK_64 = 2**64 - 1
_FREE = PromptCost(0.0, 0.0, 0.0, 0.0, 0.0)
_TIED = 1.002  # times the lowest cost


@dataclass(frozen=True, slots=True)
class Decision:
    """The ranking of the replicas for one request, and the cache hits it was based on."""

    order: list[str]  # all candidates, best first
    outcome: str  # hit | cold | balanced | fallback | retry
    num_cached_blocks: int  # leading blocks of the prompt that order[0] is predicted to have cached
    max_cached_blocks: int  # the most that any replica is predicted to have cached
    cost: PromptCost = _FREE  # of order[0]
    next_cost_s: float | None = None  # the whole cost of order[1]; None: there is no other
    fetch: Fetch | None = None  # what order[0] fetches before it computes the rest

    @property
    def num_held_blocks(self) -> int:
        """Leading blocks of the prompt that order[0] need not compute."""
        return self.num_cached_blocks if self.fetch is None else self.fetch.num_blocks


class RoutingPolicy:
    """Ranks candidates by cost; ties go by rendezvous hashing."""

    def __init__(self, table: ReplicaTable) -> None:
        self._table = table
        self._turn = 0

    def choose(
        self,
        candidates: Sequence[str],
        prompt: PromptBlocks,
        num_cached_blocks: Mapping[str, int],
        avoid: Collection[str],
        max_tokens: int | None = None,
        sources: Sources | None = None,
    ) -> Decision:
        """Rank ``candidates``, at least one and all in the table.

        Args:
            candidates: names of replicas.
            prompt: the prompt to send.
            num_cached_blocks: how many leading blocks of the prompt each replica has cached; absent means none.
            avoid: replicas that have just failed this request.
            max_tokens: the most that the answer may have; None sets no limit.
            sources: from where the prompt's beginning can be fetched; None: from nowhere.
        """
        prices = self._table.cluster.prices(max_tokens, self._table.options.first_token_weight)
        costs = prompt_costs(candidates, self._table.by_name, prompt, num_cached_blocks, prices)
        tiers = self._tiers(candidates, avoid)
        fetches = self._fetch(prompt, num_cached_blocks, prices, sources, costs, tiers) if sources else {}
        order = self._cheapest_first(candidates, costs, tiers)
        best = max(num_cached_blocks.values(), default=0)
        if hashes := prompt.hashes:
            first_uncached = hashes[min(best, len(hashes) - 1)]
            preferred = self._by_rendezvous_hash(self._tied(order, costs, num_cached_blocks, tiers), first_uncached)
            order.remove(preferred)
            order.insert(0, preferred)
        first, predicted, fetch = order[0], num_cached_blocks.get(order[0], 0), fetches.get(order[0])
        return Decision(
            order,
            _outcome(bool(hashes), bool(avoid), predicted, best),
            predicted,
            best,
            prompt_cost(self._table.by_name[first], prompt, predicted, prices, fetch),
            costs[order[1]] if len(order) > 1 else None,
            fetch,
        )

    def _fetch(
        self,
        prompt: PromptBlocks,
        num_cached_blocks: Mapping[str, int],
        prices: Prices,
        sources: Sources,
        costs: dict[str, float],
        tiers: Mapping[str, int],
    ) -> dict[str, Fetch]:
        """Return what the replicas fetch, and reduce their costs by what that saves.

        It leaves out replicas that would cost more than the cheapest one even if a fetch took no time.
        """
        replicas, fetches = self._table.by_name, dict[str, Fetch]()
        usual = [name for name in costs if not tiers.get(name)] or list(costs)
        cheapest = min(costs[name] for name in usual)
        most, per_block = sources.max_blocks, saved_per_block(prompt, prices)
        floors = []
        for name in usual:
            missing = most - num_cached_blocks.get(name, 0)
            floor = costs[name] - missing * per_block * replicas[name].seconds_per_token
            if missing > 0 and floor <= cheapest * _TIED:
                floors.append((floor, name))
        floors.sort()
        for floor, name in floors:
            if floor > cheapest * _TIED:
                break
            cached = num_cached_blocks.get(name, 0)
            fetch = best_fetch(name, replicas[name], prompt, cached, sources, prices)
            if fetch is not None:
                fetches[name] = fetch
                costs[name] -= fetch.saved_s
                cheapest = min(cheapest, costs[name])
        return fetches

    def _tiers(self, candidates: Sequence[str], avoid: Collection[str]) -> dict[str, int]:
        """Return 0 for usual candidates, 1 for those that rank last, 2 for those to avoid; empty if all are usual."""
        if not avoid and not self._table.any_ranks_last:
            return {}
        replicas = self._table.by_name
        return {name: 2 if name in avoid else int(replicas[name].ranks_last) for name in candidates}

    def _cheapest_first(
        self, candidates: Sequence[str], costs: Mapping[str, float], tiers: Mapping[str, int]
    ) -> list[str]:
        self._turn = turn = (self._turn + 1) % len(candidates)
        order = sorted((*candidates[turn:], *candidates[:turn]), key=costs.__getitem__)
        if tiers:
            order.sort(key=tiers.__getitem__)
        return order

    def _tied(
        self,
        order: Sequence[str],
        costs: Mapping[str, float],
        num_cached_blocks: Mapping[str, int],
        tiers: Mapping[str, int],
    ) -> list[str]:
        """Return the candidates that are about as cheap as the first one and hold as much of the prompt."""
        first = order[0]
        limit = costs[first] * _TIED
        num_cached, tier = num_cached_blocks.get(first), tiers.get(first)
        if len(order) > 1 and costs[order[1]] > limit:
            return [first]
        tied = []
        for name in order:
            if costs[name] > limit or tiers.get(name) != tier:
                break
            if num_cached_blocks.get(name) == num_cached:
                tied.append(name)
        return tied

    def _by_rendezvous_hash(self, tied: Sequence[str], block: int) -> str:
        replicas = self._table.by_name
        return max(tied, key=lambda name: (block ^ replicas[name].seed) * _GOLDEN_RATIO_64 & _MASK_64)


def _outcome(has_hashes: bool, is_retry: bool, predicted: int, best: int) -> str:
    """Return why the first replica is first: the label of the metric ``routing_decisions``."""
    if is_retry:
        return "retry"
    if not has_hashes:
        return "fallback"  # nothing to match
    if not best:
        return "cold"  # no replica holds any of it
    return "hit" if predicted == best else "balanced"  # balanced: a less loaded replica that holds less of it

"""CostCurve: how long a step takes, by the number of tokens that it computes, measured while steps run."""

from __future__ import annotations

from bisect import bisect_left

__all__ = ["CostCurve"]

# Steps between two of these numbers of tokens are measured together. Beyond the last one the cost is in proportion.
_SIZES: tuple[int, ...] = (*range(1, 17), 20, 24, 32, 40, 48, 64, 96, 128, 192, 256)
_MOST_GROWTH = 2.0  # a pause of the machine counts as a step that took twice as long as usual
# The weight of the last step in the mean, and that of the first one after many others. Other work on the machine makes
# steps longer and never shorter, and a step without drafts that seems long makes drafts seem cheap.
_WEIGHT, _STALE_WEIGHT = 0.2, 0.5
_LONGER = 0.3  # of these weights, for a step that took longer than the mean
_STALE_STEPS = 100  # after these, a step without drafts is measured again: contexts grow, and other loads come
_FORGOTTEN_STEPS = 2000  # after these, what a size took is unknown again, so that drafts it has ended are tried once


class CostCurve:
    """The measured seconds of steps by their size, and an estimate where none is measured.

    Args:
        free_tokens: tokens that a step computes in about the time of one token, for what is not measured yet; None:
            hundreds, as on a GPU.
    """

    def __init__(self, free_tokens: int | None) -> None:
        self._free_tokens = _SIZES[-1] if free_tokens is None else free_tokens
        self._seconds: list[float | None] = [None] * len(_SIZES)
        self._num_steps = 0  # measured
        self._measured_at = [0] * len(_SIZES)  # which of them was the last one of each size
        self._costs: list[float] | None = None  # of each size; None after a measurement

    def record_step(self, num_tokens: int, seconds: float) -> None:
        """Take in how long a step took."""
        if not 0 < num_tokens <= _SIZES[-1] or seconds <= 0:
            return
        index = bisect_left(_SIZES, num_tokens)
        seconds *= max(self._free_tokens, _SIZES[index]) / max(self._free_tokens, num_tokens)
        known = self._seconds[index]
        if known is None:
            self._seconds[index] = seconds
        else:
            weight = _STALE_WEIGHT if self.is_stale(num_tokens) else _WEIGHT
            weight *= _LONGER if seconds > known else 1.0
            self._seconds[index] = known + weight * (min(seconds, _MOST_GROWTH * known) - known)
        self._num_steps += 1
        self._measured_at[index] = self._num_steps
        self._costs = None

    @property
    def is_measured(self) -> bool:
        """Whether any step was measured."""
        return self._num_steps > 0

    def is_stale(self, num_tokens: int) -> bool:
        """Whether no step of this size was measured lately."""
        if num_tokens > _SIZES[-1]:
            return False
        index = bisect_left(_SIZES, num_tokens)
        return self._seconds[index] is None or self._num_steps - self._measured_at[index] > _STALE_STEPS

    def cost(self, num_tokens: int) -> float:
        """Return the seconds of a step, or a number in proportion to them before any step is measured."""
        if self._costs is None:
            self._costs = self._estimate()
        costs = self._costs
        if num_tokens >= _SIZES[-1]:
            return costs[-1] * num_tokens / _SIZES[-1]
        index = bisect_left(_SIZES, num_tokens)
        if _SIZES[index] == num_tokens:
            return costs[index]
        # As it was measured, and not between two sizes: the first draft token of a step makes the sampler prepare
        # another batch, which takes as long as that of many.
        in_proportion = costs[index] * max(self._free_tokens, num_tokens) / max(self._free_tokens, _SIZES[index])
        return max(costs[index - 1], in_proportion)

    def _estimate(self) -> list[float]:
        """Return the cost of each size: never less than that of a smaller one, in proportion where none is measured."""
        oldest = self._num_steps - _FORGOTTEN_STEPS
        recent = [
            seconds if measured_at >= oldest else None
            for seconds, measured_at in zip(self._seconds, self._measured_at, strict=True)
        ]
        measured = [(size, seconds) for size, seconds in zip(_SIZES, recent, strict=True) if seconds is not None]
        anchor_size, anchor = measured[0] if measured else (1, 1.0)
        costs: list[float] = []
        for size, seconds in zip(_SIZES, recent, strict=True):
            if seconds is not None:
                anchor_size, anchor = size, max(seconds, costs[-1] if costs else 0.0)
            costs.append(anchor * max(self._free_tokens, size) / max(self._free_tokens, anchor_size))
        return costs

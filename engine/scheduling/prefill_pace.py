"""PrefillPace: how many prefill tokens a step may compute beside decodes, so that these are hardly slowed down.

A step reads all weights, however few tokens it computes. Up to ``free_tokens`` tokens, reading takes longer than
computing, and further tokens are nearly free. Beyond that, the time of a step grows with its tokens. So a step takes
time in proportion to max(free_tokens, tokens), and a limit on tokens is a limit on time. ``free_tokens`` is hundreds of
tokens on a GPU, and about ten on a CPU, where a prompt of 2,048 tokens in one step would delay every stream by seconds.
Small chunks waste nothing there: beyond ``free_tokens`` a token costs the same in any step.

The factor of that proportion is measured while steps run. A step has as many prefill tokens as fit into the target
inter-token latency; only steps that take longer are limited to a slowdown.

The idea of a budget that bounds the time between tokens is Sarathi-Serve's (Agrawal et al., 2024).
"""

from __future__ import annotations

__all__ = ["PrefillPace"]

# If prompts outnumber decodes, a step may have max(128, 12 * free_tokens) prefill tokens: the fixed cost of a step is
# then below a tenth.
_CROWD_TOKENS, _CROWD_STEP = 128, 12

# Of the last step: longer contexts, or another load, are known after about ten. A pause of the machine counts as a step
# that took four times as long as usual.
_WEIGHT, _MOST_GROWTH = 0.2, 4.0
_MOST_TOKENS = 2**31


class PrefillPace:
    """A limit on the tokens of steps with decodes.

    Args:
        free_tokens: tokens that a step computes in about the time of one token.
        slowdown: how many times longer a step beyond the target may take than with its decodes alone.
        target_s: seconds that any step may take; None: every step is limited by ``slowdown``.
    """

    def __init__(self, free_tokens: int, slowdown: float, target_s: float | None = None) -> None:
        self._free_tokens, self._slowdown, self._target_s = free_tokens, slowdown, target_s
        self._seconds_per_token: float | None = None  # of a step, per max(free_tokens, tokens)

    def record_step(self, num_tokens: int, seconds: float) -> None:
        """Take in how long a step took."""
        if num_tokens and seconds > 0:
            measured = seconds / max(self._free_tokens, num_tokens)
            known = measured if self._seconds_per_token is None else self._seconds_per_token
            self._seconds_per_token = known + _WEIGHT * (min(measured, _MOST_GROWTH * known) - known)

    def step_tokens(self, num_decodes: int, num_prefills: int) -> int:
        """Return the most tokens of a step, decodes included.

        Args:
            num_decodes: sequences that decode, at least one.
            num_prefills: requests whose prompts are computed or could start. If they outnumber the decodes, a limit by
                ``slowdown`` would delay the many prompts several times as long as it saves for the few decodes. So a
                step is only so short that a request that comes meanwhile need not wait long for it.
        """
        slowed = int(min(self._slowdown * max(self._free_tokens, num_decodes), _MOST_TOKENS))
        paced = max(slowed, self._tokens_of_target())
        if num_prefills > num_decodes:
            return max(paced, num_decodes + max(_CROWD_TOKENS, _CROWD_STEP * self._free_tokens))
        return paced

    def _tokens_of_target(self) -> int:
        """Return the tokens of a step that takes the target; 0 if that is too short for any, or nothing is known."""
        if self._target_s is None or self._seconds_per_token is None:
            return 0
        tokens = int(min(self._target_s / self._seconds_per_token, _MOST_TOKENS))
        return tokens if tokens >= self._free_tokens else 0

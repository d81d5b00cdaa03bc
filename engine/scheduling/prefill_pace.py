"""PrefillPace: how many prefill tokens a step may compute beside decodes, so that these are hardly slowed down.

A step reads all weights, however few tokens it computes. Up to ``free_tokens`` tokens, reading takes longer than
computing, and further tokens are nearly free. Beyond that, the time of a step grows with its tokens. So a step takes
time in proportion to max(free_tokens, tokens), and a limit on tokens is a limit on time. ``free_tokens`` is hundreds of
tokens on a GPU, and about ten on a CPU, where a prompt of 2,048 tokens in one step would delay every stream by seconds.
Small chunks waste nothing there: beyond ``free_tokens`` a token costs the same in any step.

The idea of a budget that bounds the time between tokens is Sarathi-Serve's (Agrawal et al., 2024).
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PrefillPace"]

# If prompts outnumber decodes, a step may have max(128, 12 * free_tokens) prefill tokens: the fixed cost of a step is
# then below a tenth.
_CROWD_TOKENS, _CROWD_STEP = 128, 12


@dataclass(frozen=True, slots=True)
class PrefillPace:
    """A limit on the tokens of steps with decodes.

    Attributes:
        free_tokens: tokens that a step computes in about the time of one token.
        slowdown: how many times longer a step may take than with its decodes alone.
    """

    free_tokens: int
    slowdown: float

    def step_tokens(self, num_decodes: int, num_prefills: int) -> int:
        """Return the most tokens of a step, decodes included.

        Args:
            num_decodes: sequences that decode, at least one.
            num_prefills: requests whose prompts are computed or could start. If they outnumber the decodes, a limit by
                ``slowdown`` would delay the many prompts several times as long as it saves for the few decodes. So a
                step is only so short that a request that comes meanwhile need not wait long for it.
        """
        paced = int(self.slowdown * max(self.free_tokens, num_decodes))
        if num_prefills > num_decodes:
            return max(paced, num_decodes + max(_CROWD_TOKENS, _CROWD_STEP * self.free_tokens))
        return paced

"""PrefillPace: how much prefill a step may compute beside decodes, so that streams go on at nearly their own pace.

A step reads all weights, however few tokens it computes. While that takes longer than computing them, further tokens
cost hardly anything; beyond, a step takes as long as it has tokens. So with ``free_tokens`` at that turning point a
step takes time in proportion to max(free_tokens, tokens), and limiting tokens limits time. On a GPU the turning point
lies at hundreds of tokens, on a CPU at ten or so, where a prompt of 2,048 tokens in one step would hold every stream
up for seconds. A token of a small chunk costs no more there: past the turning point it costs the same in any step.

The idea of a budget that bounds the time between tokens is Sarathi-Serve's (Agrawal et al., 2024).
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PrefillPace"]


@dataclass(frozen=True, slots=True)
class PrefillPace:
    """A limit on the tokens of steps with decodes.

    Attributes:
        free_tokens: tokens that a step computes in about the time that it takes for one.
        slowdown: how many times longer than with its decodes alone a step may take.
    """

    free_tokens: int
    slowdown: float

    def step_tokens(self, num_decodes: int, num_prefills: int) -> int | None:
        """Return the most tokens, decodes included, of a step; None: as many as there are.

        Args:
            num_decodes: sequences that decode, at least one.
            num_prefills: requests whose prompts are computed or could be. Where they are more than those that decode,
                nobody is protected: pacing would make the many wait several times as long as the few are held up.
        """
        if num_prefills > num_decodes:
            return None
        return int(self.slowdown * max(self.free_tokens, num_decodes))

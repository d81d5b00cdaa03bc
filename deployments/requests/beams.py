"""BestBeam and OtherBeam: the answers of one beam search, which the engine sends together at its end.

Other answers to one prompt are engine requests of their own.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

from deployments.requests.generation import Delta, Generation
from engine.outputs import EngineOutput

__all__ = ["BestBeam", "OtherBeam", "join_beams"]


def join_beams(answers: Sequence[Generation]) -> Sequence[Generation]:
    """Return the answers of one search: the first one receives all of them."""
    best, *others = answers
    assert isinstance(best, BestBeam)
    best.others = others
    return answers


class OtherBeam(Generation):
    """An answer of a search that its BestBeam receives."""

    async def deltas(self) -> AsyncGenerator[Delta | None, None]:
        """Yield nothing: the BestBeam yields this answer's delta."""
        nothing: tuple[Delta, ...] = ()
        for delta in nothing:
            yield delta


class BestBeam(Generation):
    """The first answer of a search. It sends the request, and its deltas are those of all answers.

    Attributes:
        others: the other answers, the best first.
    """

    others: Sequence[Generation] = ()

    @property
    def _has_ended(self) -> bool:
        return all(beam.finish_reason is not None for beam in (self, *self.others))

    def _receive(self, output: EngineOutput) -> Delta:
        if not output.index:
            return super()._receive(output)
        return self.others[output.index - 1]._receive(output)

"""BeamSearch: one request to an engine that returns several answers, the beams of a search, together at its end.

Other answers to one prompt are engine requests of their own.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

from deployments.requests.generation import Delta, Generation
from engine.outputs import EngineOutput

__all__ = ["Beam", "BeamSearch", "with_beams"]


def with_beams(answers: Sequence[Generation]) -> Sequence[Generation]:
    """Return the answers of one search: the first one receives all of them."""
    search, *others = answers
    assert isinstance(search, BeamSearch)
    search.others = others
    return answers


class Beam(Generation):
    """An answer of a search that another Generation receives."""

    async def deltas(self) -> AsyncGenerator[Delta | None, None]:
        """Yield nothing: the search yields this answer's delta."""
        nothing: tuple[Delta, ...] = ()
        for delta in nothing:
            yield delta


class BeamSearch(Generation):
    """The first answer of a search. Its deltas are those of all answers.

    Attributes:
        others: the other answers, the best first.
    """

    others: Sequence[Generation] = ()

    @property
    def _has_ended(self) -> bool:
        return all(one.finish_reason is not None for one in (self, *self.others))

    def _receive(self, output: EngineOutput) -> Delta:
        if not output.index:
            return super()._receive(output)
        return self.others[output.index - 1]._receive(output)

"""AnsweringEngines: fake engines that answer any request with what it asks for: log-probabilities, beams."""

from __future__ import annotations

from array import array

from msgspec.structs import replace

from engine.outputs import EngineOutput, FinishReason, Logprob, TokenLogprobs
from engine.request import EngineRequest
from tests.deployments.fakes import FakeEngines, Script

TOKENS = (70, 71)
NUM_NUMBERS = 1  # of a vector, or scores


class AnsweringEngines(FakeEngines):
    """Answers each request with two tokens."""

    def __init__(self) -> None:
        super().__init__([])

    def answer(self, request: EngineRequest) -> Script:
        return list(_outputs(request))


def _outputs(request: EngineRequest) -> list[EngineOutput]:
    if request.pooling is not None:
        numbers = array("f", [0.5] * (request.pooling.dimensions or NUM_NUMBERS))
        return [EngineOutput("id", 0, [], FinishReason.STOP, is_last=True, replica="r1", pooled=numbers.tobytes())]
    params = request.params
    if params.beam_width is not None:
        answer = EngineOutput("id", 0, list(TOKENS), FinishReason.LENGTH, replica="r1")
        return [replace(answer, index=index, is_last=index + 1 == params.n) for index in range(params.n)]
    of_prompt: list[TokenLogprobs | None] | None = None
    if params.prompt_logprobs is not None:
        rest = request.prompt_token_ids[1:]
        of_prompt = [None, *(_position(token_id, params.prompt_logprobs) for token_id in rest)]
    outputs = []
    for token_id in TOKENS:
        logprobs = None
        if params.logprobs is not None:
            listed = {token_id: Logprob(-9.0, 50) for token_id in params.logprob_token_ids or ()}
            logprobs = [_position(token_id, params.logprobs) | listed]
        reason = FinishReason.LENGTH if token_id == TOKENS[-1] else None
        outputs.append(EngineOutput("id", 0, [token_id], reason, logprobs=logprobs, replica="r1"))
    return [replace(outputs[0], prompt_logprobs=of_prompt), *outputs[1:]]


def _position(token_id: int, num_others: int) -> TokenLogprobs:
    others = {100 + index: Logprob(-1.0 - index, 2 + index) for index in range(num_others)}
    return {token_id: Logprob(-0.5, 1)} | others

"""A thinking budget in the engine: the tokens are the model's own, but for the end of the reasoning."""

from __future__ import annotations

from typing import Any

import pytest

from engine.engine import Engine
from engine.errors import RequestError
from engine.llm import LLM
from engine.options.structured_outputs import StructuredOutputsParams
from engine.options.thinking_budget import ThinkingBudget
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from engine.scheduling.drafting.proposer import Proposer
from engine.sequence import Sequence
from tests.engine.conftest import SavedModel

OPTIONS: dict[str, Any] = {"dtype": "float32", "max_model_len": 64, "kv_cache_memory": "1MiB"}
PROMPT = [5, 6, 7]
END = 9


def _generate(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
    given: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
    return [output.outputs[0].token_ids for output in llm.generate(given, params, use_tqdm=False)]


@pytest.fixture
def llm(qwen3: SavedModel) -> LLM:
    return LLM(qwen3.path, **OPTIONS, skip_tokenizer_init=True)


@pytest.mark.parametrize("sampled", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 5}])
def test_reasoning_ends_at_its_budget_and_the_answer_goes_on(llm: LLM, sampled: dict[str, Any]) -> None:
    def params(length: int, budget: int | None = None) -> SamplingParams:
        limit = None if budget is None else ThinkingBudget(budget, END)
        banned = {END: -100.0}  # the model never ends its reasoning by itself
        return SamplingParams(max_tokens=length, ignore_eos=True, thinking_budget=limit, logit_bias=banned, **sampled)

    budgets = (0, 1, 4, 11)
    [plain] = _generate(llm, [PROMPT], [params(12)])
    ended = _generate(llm, [PROMPT] * (len(budgets) + 1), [params(12), *(params(12, budget) for budget in budgets)])
    assert ended[0] == plain
    for budget, tokens in zip(budgets, ended[1:], strict=True):
        assert tokens[: budget + 1] == [*plain[:budget], END]
        assert END not in tokens[budget + 1 :]
        assert len(tokens) == 12


class Known(Proposer):
    """Proposes the tokens of an answer that is known."""

    def __init__(self, answer: list[int]) -> None:
        self.answer = answer
        self.num_proposed = 0

    def propose(self, sequence: Sequence, limit: int) -> list[int]:
        draft = self.answer[sequence.num_output_tokens :][:limit]
        self.num_proposed += len(draft)
        return draft


def test_drafts_lead_no_reasoning_beyond_its_budget(qwen3: SavedModel) -> None:
    speculation = {"method": "ngram", "num_speculative_tokens": 4}
    llm = LLM(qwen3.path, **OPTIONS, skip_tokenizer_init=True, speculative_config=speculation)
    endless, limited = (
        SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, thinking_budget=budget)
        for budget in (None, ThinkingBudget(5, END))
    )
    [answer] = _generate(llm, [PROMPT], [endless])
    assert END not in answer[:6]
    drafter = llm.engine.scheduler.drafter
    assert drafter is not None
    drafter.proposers = {"known": (known := Known(answer))}
    answers = _generate(llm, [PROMPT, PROMPT], [endless, limited])
    assert known.num_proposed
    assert answers[0] == answer
    assert answers[1][:6] == [*answer[:5], END]


def test_an_answer_that_moves_to_another_engine_keeps_its_budget(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, thinking_budget=ThinkingBudget(5, END))
    [whole] = _generate(llm, [PROMPT], [params])
    assert whole[5] == END
    engine: Engine = llm.engine
    for received in range(1, 12):
        engine.queue_request(EngineRequest(str(received), PROMPT, params, output_token_ids=whole[:received]))
        rest: list[int] = []
        while engine.has_unfinished:
            rest += [token_id for output in engine.step() for token_id in output.token_ids]
        assert rest == whole[received:]


def test_a_budget_is_checked(llm: LLM) -> None:
    for wrong in ((-1, END), (2**31, END), (1, -1), (1, END, "x"), (True, END)):
        with pytest.raises(RequestError, match="thinking_budget"):
            ThinkingBudget(*wrong)
    with pytest.raises(RequestError, match="structured_outputs"):
        SamplingParams(thinking_budget=ThinkingBudget(1, END), structured_outputs=StructuredOutputsParams(regex="a"))
    with pytest.raises(RequestError, match="beam_width"):
        SamplingParams(temperature=0.0, beam_width=2, thinking_budget=ThinkingBudget(1, END))
    with pytest.raises(RequestError, match="vocabulary"):
        _generate(llm, [PROMPT], [SamplingParams(thinking_budget=ThinkingBudget(1, 10**6))])

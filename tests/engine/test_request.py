"""The rules that a request must meet: the ingress's PromptValidator and the engine's RequestValidator agree."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from engine.errors import PromptTooLongError, RequestError
from engine.request import EngineRequest, PromptValidator, RequestValidator
from engine.sampling_params import SamplingParams

SIZES: dict[str, Any] = {"model": "m", "vocab_size": 64, "max_model_len": 32, "num_blocks": 4, "block_size": 4}
SIZES |= {"max_logprobs": 20}
PROMPTS = PromptValidator(**SIZES)
ENGINE = RequestValidator(**SIZES, max_num_seqs=4, shares_prefixes=True)
GOOD = EngineRequest("a", [1, 2, 3], SamplingParams())


@pytest.mark.parametrize("prompt", [[], [64], [-1], [True], [1.0], ["a"], [[1]], [1] * 16, [10**400]])
def test_both_refuse_a_prompt_with_the_same_message(prompt: list[Any]) -> None:
    messages = []
    for check in (lambda: PROMPTS.check_prompt(prompt), lambda: ENGINE.check(replace(GOOD, prompt_token_ids=prompt))):
        with pytest.raises(RequestError) as caught:
            check()
        assert caught.value.param == "prompt"
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_the_error_names_the_field_that_the_prompt_came_from() -> None:
    with pytest.raises(PromptTooLongError, match="messages has 20 tokens, .* KV cache of 'm' holds 16 .* at least 5"):
        PROMPTS.check_prompt([1] * 20, "messages")


def test_requests_with_equal_cache_keys_and_no_others_have_equal_block_hashes() -> None:
    """The engine compares keys, the router compares hashes: both must separate the same requests."""
    requests = [GOOD, replace(GOOD, client="b", priority=2), *(replace(GOOD, cache_salt=salt) for salt in "ab")]
    for first in requests:
        for second in requests:
            assert (first.cache_key == second.cache_key) == (first.cache_root("m") == second.cache_root("m"))
    assert GOOD.cache_root("m") != GOOD.cache_root("other")


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"params": SamplingParams(stop_token_ids=[64])}, "stop_token_ids"),
        ({"params": SamplingParams(bad_words=["x"])}, "bad_words"),
        ({"params": SamplingParams(n=5)}, "n"),
        ({"output_token_ids": [64]}, "output"),
        ({"output_token_ids": [1] * 13}, "prompt"),
        ({"output_token_ids": [1], "params": SamplingParams(n=2)}, "n"),
        ({"output_token_ids": [1], "params": SamplingParams(max_tokens=1)}, "max_tokens"),
        ({"priority": True}, "priority"),
        ({"priority": "high"}, "priority"),
        ({"cache_salt": "\n"}, "cache_salt"),
        ({"cache_salt": None}, "cache_salt"),
    ],
)
def test_a_request_that_can_never_run_is_refused_by_name(change: dict[str, Any], param: str) -> None:
    ENGINE.check(GOOD)
    with pytest.raises(RequestError) as caught:
        ENGINE.check(replace(GOOD, **change))
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("limit", "number", "problem"),
    [
        (20, 20, None),
        (20, 21, "=21 exceeds the limit of 20; ask for at most 20, or raise the engine's max_logprobs"),
        (20, -1, "=-1 asks for all 64 tokens of the vocabulary, which exceed the limit of 20; ask for at most 20, or"),
        (0, 0, None),
        (0, 1, "=1 exceeds the limit of 0; ask for at most 0"),
        (63, -1, "=-1 asks for all 64 tokens"),
        (64, -1, None),
        (-1, -1, None),
        (-1, 1000, None),
    ],
)
@pytest.mark.parametrize("param", ["logprobs", "prompt_logprobs"])
def test_both_limit_the_number_of_log_probabilities(limit: int, number: int, problem: str | None, param: str) -> None:
    params = SamplingParams(**{param: number})
    sizes = SIZES | {"max_logprobs": limit}
    engine = RequestValidator(**sizes, max_num_seqs=4, shares_prefixes=True)
    checks = (
        lambda: PromptValidator(**sizes).check_params(params),
        lambda: engine.check(replace(GOOD, params=params)),
    )
    for check in checks:
        if problem is None:
            check()
            continue
        with pytest.raises(RequestError) as caught:
            check()
        assert caught.value.param == param
        assert str(caught.value).startswith(param + problem)

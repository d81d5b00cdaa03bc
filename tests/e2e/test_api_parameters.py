"""Sampling parameters, several answers, log-probabilities and structured outputs against the real server."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import httpx
import openai
import pytest

MODEL = "pagoda-demo"
MESSAGES: Any = [{"role": "user", "content": "What is a KV cache?"}]
BODY: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 12, "ignore_eos": True}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"enum": ["cache", "block"]}, "size": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["name", "size"],
    "additionalProperties": False,
}


def _choices(http: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    answer = http.post("/v1/completions", json=BODY | body)
    assert answer.status_code == 200, answer.text
    choices: list[dict[str, Any]] = answer.json()["choices"]
    return choices


def test_several_choices_whole_and_streamed(api: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": MESSAGES, "n": 3, "seed": 1, "temperature": 2, "max_tokens": 40}
    asked["extra_body"] = {"structured_outputs": {"regex": "[a-z ]{60}"}}  # the demo model is too sure of what to say
    whole = api.chat.completions.create(**asked)
    texts = ["", "", ""]
    for chunk in api.chat.completions.create(**asked, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert [choice.message.content for choice in whole.choices] == texts
    assert len(set(texts)) == 3
    alone = api.chat.completions.create(**(asked | {"n": 1, "seed": 3}))
    assert alone.choices[0].message.content == texts[2]  # answer i has the seed plus i
    assert whole.usage is not None
    assert alone.usage is not None
    assert whole.usage.prompt_tokens == alone.usage.prompt_tokens


def test_the_best_of_several(http: httpx.Client) -> None:
    asked: dict[str, Any] = {"seed": 1, "temperature": 1.5, "logprobs": 0}

    def mean(choice: dict[str, Any]) -> float:
        values = choice["logprobs"]["token_logprobs"]
        return float(sum(values) / len(values))

    every = _choices(http, n=4, **asked)
    best = _choices(http, n=2, best_of=4, **asked)
    assert [choice["text"] for choice in best] == [
        choice["text"] for choice in sorted(every, key=mean, reverse=True)[:2]
    ]


def test_chat_logprobs(api: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 10}
    answer = api.chat.completions.create(**asked, logprobs=True, top_logprobs=3).choices[0]
    assert answer.logprobs is not None
    assert answer.logprobs.content is not None
    assert "".join(entry.token for entry in answer.logprobs.content).startswith(answer.message.content or "?")
    for entry in answer.logprobs.content:
        assert [entry.token, entry.logprob] == [entry.top_logprobs[0].token, entry.top_logprobs[0].logprob]
        assert len(entry.top_logprobs) == 3
        assert sum(math.exp(top.logprob) for top in entry.top_logprobs) <= 1.001
    chunks = list(api.chat.completions.create(**asked, logprobs=True, top_logprobs=3, stream=True))
    streamed = [entry for chunk in chunks if (own := chunk.choices[0].logprobs) for entry in own.content or ()]
    assert [entry.token for entry in streamed] == [entry.token for entry in answer.logprobs.content]


def test_scoring_a_prompt_agrees_with_generating_it(http: httpx.Client) -> None:
    (generated,) = _choices(http, temperature=0, logprobs=1, return_token_ids=True)
    prompt = generated["prompt_token_ids"] + generated["token_ids"]
    for max_tokens, num_generated in ((0, 0), (1, 1)):
        (scored,) = _choices(http, prompt=prompt, echo=True, logprobs=1, max_tokens=max_tokens, temperature=0)
        values = scored["logprobs"]["token_logprobs"]
        assert len(values) == len(prompt) + num_generated
        continuation = values[len(generated["prompt_token_ids"]) : len(prompt)]
        assert continuation == pytest.approx(generated["logprobs"]["token_logprobs"], abs=1e-3)
        tops = scored["logprobs"]["top_logprobs"][len(generated["prompt_token_ids"]) : len(prompt)]
        assert [max(top.values()) for top in tops] == continuation  # it was the greedy continuation
        assert scored["text"].startswith(BODY["prompt"] + generated["text"])


def test_logprobs_end_with_the_stop_string(http: httpx.Client) -> None:
    (free,) = _choices(http, temperature=0, logprobs=0)
    stop = free["text"][6:9]
    (stopped,) = _choices(http, temperature=0, logprobs=0, stop=stop)
    length = len(stopped["logprobs"]["tokens"])
    assert length < len(free["logprobs"]["tokens"])
    assert stopped["logprobs"]["tokens"] == free["logprobs"]["tokens"][:length]
    assert free["logprobs"]["text_offset"][1] == len(free["logprobs"]["tokens"][0])


def test_what_steers_the_choice_of_tokens(http: httpx.Client) -> None:
    (free,) = _choices(http, temperature=0, return_token_ids=True, max_tokens=200)
    first = free["token_ids"][0]
    (biased,) = _choices(http, temperature=0, return_token_ids=True, logit_bias={str(first): -100})
    assert biased["token_ids"][0] != first
    (limited,) = _choices(http, temperature=0, return_token_ids=True, allowed_token_ids=[40, 41])
    assert set(limited["token_ids"]) <= {40, 41}
    (varied,) = _choices(http, temperature=0, return_token_ids=True, frequency_penalty=2, max_tokens=200)
    assert len(set(varied["token_ids"])) > len(set(free["token_ids"]))
    word = free["text"].split()[1]
    (clean,) = _choices(http, temperature=0, bad_words=[word], max_tokens=40)
    assert clean["text"].split()[1] != word


def test_a_json_schema_is_followed(api: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
    asked: Any = {"model": MODEL, "messages": MESSAGES, "temperature": 1.2, "seed": 3, "max_tokens": 60, "n": 2}
    whole = api.chat.completions.create(**asked, response_format=form)
    for choice in whole.choices:
        thing = json.loads(choice.message.content or "")
        assert thing["name"] in ("cache", "block")
        assert 1 <= thing["size"] <= 99
        assert choice.finish_reason == "stop"
    texts = ["", ""]
    for chunk in api.chat.completions.create(**asked, response_format=form, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"regex": "[0-9]{3}-[a-f]{2}"}, "[0-9]{3}-[a-f]{2}"),
        ({"choice": ["yes", "no"]}, "yes|no"),
        ({"grammar": 'start: "ab" | "cd"'}, "ab|cd"),
    ],
)
def test_other_forms_are_followed(http: httpx.Client, form: dict[str, Any], pattern: str) -> None:
    (choice,) = _choices(http, structured_outputs=form, temperature=1, ignore_eos=False)
    assert re.fullmatch(pattern, choice["text"])
    assert choice["finish_reason"] == "stop"


def test_an_invalid_schema_does_not_affect_other_requests(http: httpx.Client) -> None:
    with http.stream("POST", "/v1/completions", json=BODY | {"stream": True, "max_tokens": 200}) as running:
        lines = running.iter_lines()
        next(lines)
        for pattern in ("(", "(?=a)b", "((((((a{1,900}){1,900}){1,900}){1,900}){1,900}){1,900})"):
            answer = http.post("/v1/completions", json=BODY | {"structured_outputs": {"regex": pattern}})
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["param"] == "structured_outputs"
        assert [line for line in lines if line][-1] == "data: [DONE]"

"""With drafts, an answer is the one without them, bit for bit: with any parameters, whatever the drafts are."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.checkpoints import keep_layers
from engine.llm import LLM, RequestOutput
from engine.options.structured_outputs import StructuredOutputsParams
from engine.options.thinking_budget import ThinkingBudget
from engine.outputs import TokenLogprobs
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from kernels.cpu.library import library
from kernels.cpu.linear import has_int8
from tests.engine.models.test_speculative_generation import DraftCounter
from tests.engine.oracle import check_idle, make_llm
from tests.engine.scheduling.drafting.adversaries import PROPOSERS, let_draft

# Without the C kernels a row's bits depend on the other rows of its step.
pytestmark = pytest.mark.skipif(library() is None, reason="there is no C compiler")

DEMO_MODEL = str(Path(__file__).parents[4] / "demo" / "model")
TOKENS = st.integers(5, 400)
GRAMMARS = [
    StructuredOutputsParams(regex=r"[A-Z][a-z]{2,8} \d{3}-\d{4}"),
    StructuredOutputsParams(choice=["red", "green", "blue green", "blue"]),
    StructuredOutputsParams(grammar='start: NUM ("+" NUM){0,3}\nNUM: /[0-9]{1,4}/'),
    StructuredOutputsParams(json_object=True),
]
PROMPTS = ["What does the router do?", "the cat and the cat and the", "a b c d a b c d a b", "Blocks", "1, 2, 3, 4, 5,"]
# Drafts beside chunks of prompts in a pool that preempts, with steps that overlap, and as long as the clock says.
SETTINGS: dict[str, dict[str, Any]] = {
    "small": {"num_blocks": 48, "block_size": 4, "max_num_batched_tokens": 40, "max_num_seqs": 8},
    "overlapping": {"async_scheduling": True, "max_num_seqs": 16},
    "paying": {"max_decode_slowdown": 2.0},
}

OPTIONAL: dict[str, st.SearchStrategy[Any]] = {
    "top_k": st.sampled_from([1, 3, 40]),
    "top_p": st.sampled_from([0.3, 0.9]),
    "min_p": st.sampled_from([0.05, 0.5]),
    "presence_penalty": st.sampled_from([-1.5, 1.5]),
    "frequency_penalty": st.sampled_from([-0.5, 1.0]),
    "repetition_penalty": st.sampled_from([0.8, 1.3]),
    "logit_bias": st.dictionaries(TOKENS, st.sampled_from([-100.0, 2.5]), max_size=3),
    "allowed_token_ids": st.just(list(range(300))),
    "bad_words_token_ids": st.lists(st.lists(st.integers(0, 300), min_size=1, max_size=2), max_size=60),
    "min_tokens": st.integers(0, 14),
    "stop_token_ids": st.lists(TOKENS, max_size=12),
    "stop": st.sampled_from([("e",), ("the", "a "), ("\n",)]),
    "ignore_eos": st.booleans(),
    "logprobs": st.sampled_from([0, 3]),
    "prompt_logprobs": st.just(1),
    "logprob_token_ids": st.just((9, 300)),
    "structured_outputs": st.sampled_from(GRAMMARS),
    "thinking_budget": st.builds(ThinkingBudget, st.integers(0, 9), st.integers(5, 99), st.none() | st.just(262)),
    "n": st.integers(2, 3),
    "best_of": st.integers(3, 4),
    "seed": st.integers(0, 2**63 - 1),
}


@st.composite
def params(draw: st.DrawFn) -> SamplingParams:
    """Draw parameters; those that exclude each other are left out."""
    names = draw(st.lists(st.sampled_from(sorted(OPTIONAL)), unique=True, max_size=6))
    values: dict[str, Any] = {name: draw(OPTIONAL[name]) for name in names}
    values["temperature"] = draw(st.sampled_from([0.0, 0.3, 0.8, 1.5]))
    values["max_tokens"] = draw(st.integers(max(1, values.get("min_tokens", 1)), 24))
    if not values["temperature"]:
        values.pop("n", None)
        values.pop("best_of", None)
    if "structured_outputs" in values:
        values.pop("thinking_budget", None)
    if "logprobs" not in values:
        values.pop("logprob_token_ids", None)
    return SamplingParams(**values)


class Engines:
    """One engine without drafts, and one with drafts for each of ``SETTINGS``; the draft model has half its layers.

    Args:
        kind: a dtype, or ``int8`` for weights that are quantized, of both models.
    """

    def __init__(self, kind: str) -> None:
        self._folder = TemporaryDirectory()
        quantization = {"quantization": kind} if kind == "int8" else {}
        shared = {"dtype": "bfloat16" if quantization else kind} | quantization

        def load(**options: Any) -> LLM:
            sizes = {} if "num_blocks" in options else {"kv_cache_memory": "8MiB"}
            options = shared | options
            return make_llm(DEMO_MODEL, skip_tokenizer_init=False, max_model_len=160, **sizes | options)

        keep_layers(DEMO_MODEL, self._folder.name, 2)
        model = {"method": "draft_model", "model": self._folder.name, "num_speculative_tokens": 5} | quantization
        drafts = {"speculative_config": model}
        self.plain = load()
        self.drafting = {name: load(**options | drafts) for name, options in SETTINGS.items()}

    def close(self) -> None:
        """End the processes of the engines."""
        for llm in (self.plain, *self.drafting.values()):
            llm.engine.close()
        self._folder.cleanup()


@pytest.fixture(scope="module", params=["float32", "bfloat16", pytest.param("int8", marks=pytest.mark.long)])
def engines(request: pytest.FixtureRequest) -> Iterator[Engines]:
    if request.param == "int8" and not has_int8():
        pytest.skip("the processor does not multiply int8")
    engines = Engines(request.param)
    yield engines
    engines.close()


def _bytes(logprobs: TokenLogprobs | None) -> Any:
    if logprobs is None:
        return None
    return [
        (token_id, struct.pack("d", logprob.logprob), logprob.rank, logprob.decoded_token)
        for token_id, logprob in logprobs.items()
    ]


def all_bytes(outputs: list[RequestOutput]) -> list[Any]:
    """Return everything that a client sees of the answers."""
    return [
        (
            list(map(_bytes, output.prompt_logprobs or ())),
            [
                (
                    answer.token_ids,
                    answer.text,
                    answer.finish_reason,
                    answer.stop_reason,
                    None if answer.cumulative_logprob is None else struct.pack("d", answer.cumulative_logprob),
                    list(map(_bytes, answer.logprobs or ())),
                )
                for answer in output.outputs
            ],
        )
        for output in outputs
    ]


def generate(llm: LLM, requests: list[SamplingParams]) -> list[RequestOutput]:
    """Answer a prompt for each of these parameters, and find nothing left."""
    prompts: list[Any] = [f"{number}. {PROMPTS[number % len(PROMPTS)]}" for number in range(len(requests))]
    llm.engine._random.seed(0)  # of requests without a seed
    outputs = llm.generate(prompts, requests, use_tqdm=False)
    check_idle(llm)
    return outputs


def check_same(engines: Engines, requests: list[SamplingParams], kinds: tuple[str, ...], seed: int = 0) -> None:
    """Assert that drafts of these kinds change nothing in any setting."""
    expected = generate(engines.plain, requests)
    for name, llm in engines.drafting.items():
        for kind in kinds:
            let_draft(llm, kind, expected, seed)
            assert all_bytes(generate(llm, requests)) == all_bytes(expected), (name, kind)


def test_right_drafts_are_accepted_and_wrong_ones_are_not(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every kind of parameter: otherwise the other tests of this file would compare nothing."""
    drafts = DraftCounter(monkeypatch)
    shared = {"temperature": 0.8, "seed": 1, "max_tokens": 16, "ignore_eos": True}
    kinds: list[dict[str, Any]] = [
        {"logprobs": 2},
        {"top_k": 40, "top_p": 0.9, "min_p": 0.05},
        {"frequency_penalty": 1.0, "repetition_penalty": 1.3},
        {"structured_outputs": GRAMMARS[0]},
        {"n": 2, "bad_words_token_ids": [[300], [9, 30]]},
        {"thinking_budget": ThinkingBudget(4, 30), "min_tokens": 16},
    ]
    for kind in kinds:
        for proposer in ("truth", "wrong", "suffix", "model"):
            drafts.num_drafted = drafts.num_accepted = 0
            check_same(engines, [SamplingParams(**shared | kind)], (proposer,))
            least, most = {
                "truth": (drafts.num_drafted, drafts.num_drafted),
                "wrong": (0, 0),
                "model": (1, drafts.num_drafted - 1),
                "suffix": (1, drafts.num_drafted),  # of two answers to one prompt, it may follow the other one
            }[proposer]
            assert drafts.num_drafted > 0, (kind, proposer)
            assert least <= drafts.num_accepted <= most, (kind, proposer)


@given(requests=st.lists(params(), min_size=1, max_size=4), kind=st.sampled_from(PROPOSERS), seed=st.integers(0, 99))
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_parameters_with_any_drafts(engines: Engines, requests: list[SamplingParams], kind: str, seed: int) -> None:
    check_same(engines, requests, (kind,), seed)


@pytest.mark.parametrize("kind", ["mixed", "model"])
def test_another_engine_continues_an_answer(engines: Engines, kind: str) -> None:
    """Without drafts, then with them, and so on: each engine computes the tokens of the others as a prompt."""
    requests = [SamplingParams(temperature=0.8, seed=seed, max_tokens=30, ignore_eos=True) for seed in (1, 2)]
    expected = generate(engines.plain, requests)
    for llm in engines.drafting.values():
        let_draft(llm, kind, expected)
    route = [*engines.drafting.values(), engines.plain, *engines.drafting.values()]
    for whole, params in zip(expected, requests, strict=True):
        known: list[int] = []
        for llm in route:
            known += _next_tokens(llm, EngineRequest("a", whole.prompt_token_ids, params, output_token_ids=known), 4)
        assert len(known) >= 4 * len(route)
        assert known == whole.outputs[0].token_ids[: len(known)]


def _next_tokens(llm: LLM, request: EngineRequest, count: int) -> list[int]:
    """Return the next ``count`` tokens of a request, or a few more, and end it."""
    llm.engine.queue_request(request)
    token_ids: list[int] = []
    while len(token_ids) < count and llm.engine.has_unfinished:
        token_ids += [token_id for output in llm.engine.step() for token_id in output.token_ids]
    llm.engine.abort(request.request_id)
    while llm.engine.has_unfinished:
        llm.engine.step()
    check_idle(llm)
    return token_ids


@pytest.mark.long
@given(requests=st.lists(params(), min_size=8, max_size=8))
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_two_hundred_requests_with_drafts_from_earlier_answers(
    engines: Engines, requests: list[SamplingParams]
) -> None:
    """The same batch twice: what the first one answers drafts for the second, in every setting."""
    expected = generate(engines.plain, requests)
    for name, llm in engines.drafting.items():
        let_draft(llm, "suffix", [])
        for turn in (1, 2):
            assert all_bytes(generate(llm, requests)) == all_bytes(expected), (name, turn)


@pytest.mark.exhaustive("400 batches of requests in five minutes")
@pytest.mark.timeout(3600)
@given(requests=st.lists(params(), min_size=1, max_size=8), kind=st.sampled_from(PROPOSERS), seed=st.integers(0, 99))
@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
def test_many_parameters_with_any_drafts(
    engines: Engines, requests: list[SamplingParams], kind: str, seed: int
) -> None:
    check_same(engines, requests, (kind,), seed)

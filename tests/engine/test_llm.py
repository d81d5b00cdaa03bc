"""The offline API, with a tiny random model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ConfigError, PromptTooLongError, RequestError
from engine.llm import LLM
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from engine.scheduling.drafting.drafter import Drafter
from engine.scheduling.scheduler_output import SampledTokens, SchedulerOutput
from engine.sequence import Sequence
from tests.engine.checkpoints import build_model, save_checkpoint
from tests.engine.conftest import SavedModel
from tests.engine.tiny_tokenizers import save_tokenizer

OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_memory": "8MiB"}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    path = tmp_path_factory.mktemp("model")
    model = build_model("qwen3")
    model.generation_config.update(temperature=0.5, top_k=20, do_sample=True)
    save_checkpoint(model, path)
    save_tokenizer(path)
    return LLM(str(path), **OPTIONS)


def test_text_and_tokens_prompts_mix_and_come_back_in_order(llm: LLM) -> None:
    ids = llm.tokenizer.encode("the keys") if llm.tokenizer else []
    params = SamplingParams(temperature=0.0, max_tokens=8)
    outputs = llm.generate(["the keys", {"prompt_token_ids": ids}, "values"], params, use_tqdm=False)
    assert [output.prompt for output in outputs] == ["the keys", None, "values"]
    assert outputs[0].prompt_token_ids == outputs[1].prompt_token_ids == ids
    assert outputs[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids
    assert all(output.finished and output.outputs[0].finish_reason for output in outputs)
    assert llm.tokenizer is not None
    assert outputs[2].outputs[0].text == llm.tokenizer.decode(outputs[2].outputs[0].token_ids)


def test_one_prompt_may_stand_alone(llm: LLM) -> None:
    params = SamplingParams(max_tokens=2, seed=1, ignore_eos=True)
    alone, listed = llm.generate("keys", params, use_tqdm=False), llm.generate(["keys"], params, use_tqdm=False)
    assert alone[0].outputs[0].token_ids == listed[0].outputs[0].token_ids
    tokens = llm.generate({"prompt_token_ids": [5, 6]}, params, use_tqdm=False)
    assert tokens[0].prompt_token_ids == [5, 6]


def test_a_repeated_prompt_is_served_from_the_cache(llm: LLM) -> None:
    prompt = {"prompt_token_ids": list(range(10, 90))}
    params = SamplingParams(temperature=0.0, max_tokens=4)
    first = llm.generate([prompt], params, use_tqdm=False)[0]
    second = llm.generate([prompt], params, use_tqdm=False)[0]
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == 79  # all but the last, which is computed for its logits
    assert first.outputs[0].token_ids == second.outputs[0].token_ids


def test_seeded_sampling_repeats_alone_in_a_batch_and_after_preemption(llm: LLM, qwen3: SavedModel) -> None:
    prompts: list[Any] = [{"prompt_token_ids": [i + 5, 9, i + 6] * 20} for i in range(16)]
    params = [SamplingParams(temperature=1.0, max_tokens=24, seed=i, ignore_eos=True) for i in range(16)]
    small = LLM(qwen3.path, **OPTIONS | {"kv_cache_memory": None}, num_blocks=12, skip_tokenizer_init=True)
    answers = []
    for engine in (llm, small):
        outputs = engine.generate(prompts, params, use_tqdm=False)
        answers.append([output.outputs[0].token_ids for output in outputs])
    alone = [
        llm.generate([prompt], asked, use_tqdm=False)[0].outputs[0].token_ids
        for prompt, asked in zip(prompts, params, strict=True)
    ]
    assert answers[0] == answers[1] == alone
    assert len(set(map(tuple, alone))) == 16


def test_a_seeded_answer_can_be_resumed_elsewhere(llm: LLM, qwen3: SavedModel) -> None:
    """Prompt and tokens so far, sent to another engine with the same seed, go on as the first would have."""
    other = LLM(qwen3.path, **OPTIONS, skip_tokenizer_init=True)
    params = {"temperature": 1.0, "seed": 5, "ignore_eos": True}
    whole = llm.generate({"prompt_token_ids": [5, 6, 7]}, SamplingParams(max_tokens=20, **params), use_tqdm=False)
    tokens = whole[0].outputs[0].token_ids
    rest = other.generate(
        {"prompt_token_ids": [5, 6, 7, *tokens[:8]]}, SamplingParams(max_tokens=12, **params), use_tqdm=False
    )
    assert rest[0].outputs[0].token_ids == tokens[8:]


def test_requests_without_a_seed_differ(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    outputs = llm.generate(["keys"] * 8, params, use_tqdm=False)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) > 1


def test_a_stop_string_ends_the_text_and_the_sequence(llm: LLM) -> None:
    free = llm.generate(["keys"], SamplingParams(temperature=0.0, max_tokens=30), use_tqdm=False)[0].outputs[0]
    stop = free.text[5:8]
    params = SamplingParams(temperature=0.0, max_tokens=30, stop=[stop])
    stopped = llm.generate(["keys"], params, use_tqdm=False)[0].outputs[0]
    assert stopped.text == free.text[: free.text.index(stop)]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)
    assert llm.engine.meter.stats().num_used_blocks == 0


def test_accepted_draft_tokens_after_a_stop_string_are_dropped(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step in which the text stops has computed more tokens; the answer is the one without drafts."""
    gained: list[int] = []
    accept = Drafter.accept

    def noting(drafter: Drafter, output: SchedulerOutput, sampled: SampledTokens) -> list[Sequence]:
        ended = accept(drafter, output, sampled)
        gained.extend(output.num_accepted.values())
        return ended

    monkeypatch.setattr(Drafter, "accept", noting)
    speculation = {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 1}
    drafting = LLM(llm.config.model, speculative_config=speculation, **OPTIONS)
    greedy: dict[str, Any] = {"temperature": 0.0, "max_tokens": 60, "ignore_eos": True}
    text = llm.generate(["the"], SamplingParams(**greedy), use_tqdm=False)[0].outputs[0].text  # 33hehehehe...
    num_cut = 0
    for end in range(4, 40, 2):
        for more in ({}, {"min_tokens": 9, "include_stop_str_in_output": True}):
            params = SamplingParams(**greedy, stop=[text[2:end]], **more)  # type: ignore[arg-type]
            expected = llm.generate(["the"], params, use_tqdm=False)[0].outputs[0]
            gained.clear()
            got = drafting.generate(["the"], params, use_tqdm=False)[0].outputs[0]
            assert got == expected
            num_cut += gained[-1:] > [0] and got.finish_reason == "stop"
    assert num_cut > 9


def test_after_an_interrupt_nothing_is_left_running(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    queue, count = llm.engine.queue_request, 0

    def interrupt_the_second(*args: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        if count == 2:
            raise KeyboardInterrupt
        return queue(*args, **options)

    monkeypatch.setattr(llm.engine, "queue_request", interrupt_the_second)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], SamplingParams(max_tokens=2), use_tqdm=False)
    monkeypatch.undo()
    assert not llm.engine.has_unfinished
    assert llm.generate("a", SamplingParams(max_tokens=2), use_tqdm=False)[0].finished


@pytest.mark.parametrize("overlap", [False, True])
def test_what_an_interrupted_step_has_not_computed_is_not_cached(
    qwen3: SavedModel, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt's blocks are published when they are scheduled."""
    llm = LLM(qwen3.path, **OPTIONS, skip_tokenizer_init=True, async_scheduling=overlap)
    prompt, params = {"prompt_token_ids": list(range(10, 60))}, SamplingParams(temperature=0.0, max_tokens=6)
    expected = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids
    llm.engine.reset_prefix_cache()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(llm.engine.runner.workers.local, "execute", interrupted)  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompt, params, use_tqdm=False)
    monkeypatch.undo()
    assert llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids == expected


def test_defaults_come_from_generation_config(llm: LLM) -> None:
    params = llm.get_default_sampling_params()
    assert (params.temperature, params.top_k) == (0.5, 20)


def test_chat_uses_the_template(llm: LLM) -> None:
    output = llm.chat([{"role": "user", "content": "keys"}], SamplingParams(max_tokens=2), use_tqdm=False)[0]
    assert llm.tokenizer is not None
    assert output.prompt_token_ids == llm.tokenizer.chat_template.encode([{"role": "user", "content": "keys"}])


def test_prompts_are_not_paced_unless_it_is_asked_for(llm: LLM, qwen3: SavedModel) -> None:
    assert llm.config.max_decode_slowdown is None
    paced = LLM(qwen3.path, **OPTIONS, skip_tokenizer_init=True, max_decode_slowdown=1.5)
    assert paced.config.max_decode_slowdown == 1.5


def test_without_a_tokenizer_ids_go_in_and_out(qwen3: SavedModel) -> None:
    llm = LLM(qwen3.path, **OPTIONS, skip_tokenizer_init=True)
    output = llm.generate([{"prompt_token_ids": [5, 6]}], SamplingParams(max_tokens=3, ignore_eos=True))[0].outputs[0]
    assert (len(output.token_ids), output.text) == (3, "")
    with pytest.raises(ConfigError, match="skip_tokenizer_init"):
        llm.generate(["text"])
    with pytest.raises(RequestError, match="stop strings need the tokenizer"):
        llm.generate([{"prompt_token_ids": [5]}], SamplingParams(stop="x"))


def test_bad_prompts_are_refused_before_anything_runs(llm: LLM) -> None:
    good = {"prompt_token_ids": [5]}
    for bad, error in (([1.5], RequestError), ([{"tokens": [1]}], RequestError), ([[1, 2]], RequestError)):
        with pytest.raises(error, match="prompt=.* is "):
            llm.generate([good, *bad], use_tqdm=False)  # type: ignore[list-item]
    with pytest.raises(PromptTooLongError, match="1024 tokens.*1024.*at least 1"):
        llm.generate([good, {"prompt_token_ids": [5] * 1024}], use_tqdm=False)
    with pytest.raises(RequestError, match="1 sampling_params for 2 prompts"):
        llm.generate([good, good], [SamplingParams()], use_tqdm=False)
    assert not llm.engine.has_unfinished


def test_the_progress_bar_counts_requests(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b"], SamplingParams(max_tokens=2))
    shown = capsys.readouterr().err
    assert "Processed prompts: 100%" in shown
    assert "2/2" in shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": 2048}, "max_model_len=2048 exceeds the model's 1024"),
        ({"kv_cache_memory": 100}, "one block takes .*raise kv_cache_memory"),
        ({"device": "cuda"}, "asks for a GPU"),
        ({"attention_backend": "magic"}, "'magic'"),
        ({"attention_backend": "flash_attn"}, "flash_attn"),
        ({"gpu_memory": 1}, "'gpu_memory'; did you mean 'gpu_memory_utilization'"),
    ],
)
def test_options_that_do_not_fit_are_refused(qwen3: SavedModel, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(qwen3.path, **{"device": "cpu", "skip_tokenizer_init": True} | options)


def test_a_path_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a directory"):
        LLM(str(tmp_path / "nowhere"), skip_tokenizer_init=True)
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        LLM(str(tmp_path), skip_tokenizer_init=True)


@pytest.mark.parametrize("prompts", [None, 5, b"keys", {"prompt_token_ids": None}, [None]])
def test_prompts_of_any_other_type_are_the_users_mistake(llm: LLM, prompts: Any) -> None:
    with pytest.raises(RequestError, match="; give"):
        llm.generate(prompts, use_tqdm=False)


@pytest.mark.parametrize("params", [{"temperature": 0}, 5, "hot", [{"temperature": 0}], [None]])
def test_sampling_params_of_any_other_type_are_the_users_mistake(llm: LLM, params: Any) -> None:
    with pytest.raises(RequestError, match="sampling_params has") as caught:
        llm.generate(["keys"], params, use_tqdm=False)
    assert caught.value.param == "sampling_params"


@pytest.mark.parametrize("messages", [None, 5, "keys", [5], [None], ["keys"], [[5]], [{"role": "user"}, 5]])
def test_messages_of_any_other_type_are_the_users_mistake(llm: LLM, messages: Any) -> None:
    with pytest.raises(RequestError) as caught:
        llm.chat(messages, use_tqdm=False)
    assert caught.value.param == "messages"


@pytest.mark.parametrize("word", ["\ud800", "keys " * 200])
def test_a_bad_word_that_cannot_be_used_is_called_by_the_name_that_the_user_gave(llm: LLM, word: str) -> None:
    with pytest.raises(RequestError) as caught:
        llm.generate("keys", SamplingParams(bad_words=[word]), use_tqdm=False)
    assert caught.value.param == "bad_words"
    assert "token_ids" not in str(caught.value)


def test_bad_words_without_a_tokenizer_are_to_be_given_as_ids(qwen3: SavedModel) -> None:
    llm = LLM(qwen3.path, **OPTIONS, skip_tokenizer_init=True)
    with pytest.raises(RequestError, match="give bad_words_token_ids") as caught:
        llm.generate({"prompt_token_ids": [5]}, SamplingParams(bad_words=["x"]), use_tqdm=False)
    assert caught.value.param == "bad_words"


def test_log_probabilities_of_the_whole_vocabulary_need_its_limit(llm: LLM, qwen3: SavedModel) -> None:
    prompt = {"prompt_token_ids": [5, 6, 7]}
    for param in ("logprobs", "prompt_logprobs"):
        with pytest.raises(RequestError, match=f"{param}=-1 asks for all .* the limit of 20; .* raise .* max_logprobs"):
            llm.generate(prompt, SamplingParams(**{param: -1}), use_tqdm=False)
    unlimited = LLM(qwen3.path, **OPTIONS, max_logprobs=-1, skip_tokenizer_init=True)
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=-1, prompt_logprobs=-1)
    (output,) = unlimited.generate(prompt, params, use_tqdm=False)
    answer, of_prompt = output.outputs[0], output.prompt_logprobs or []
    positions = [*(answer.logprobs or []), *[listed for listed in of_prompt if listed is not None]]
    assert len(positions) == 3 + 2
    for position, token_id in zip(positions, [*answer.token_ids, 6, 7], strict=True):
        assert next(iter(position)) == token_id
        assert len(position) == unlimited.engine.info.vocab_size
        assert sum(math.exp(logprob.logprob) for logprob in position.values()) == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("logprobs", [None, 0, 2])
def test_the_best_answers_end_at_the_stop_string_and_are_ranked_by_what_is_shown(
    llm: LLM, logprobs: int | None
) -> None:
    prompt = {"prompt_token_ids": [5, 6, 7]}
    for seed in range(8):
        common: dict[str, Any] = {"temperature": 1.0, "seed": seed, "max_tokens": 40, "stop": ["e", "t", "a"]}
        every = llm.generate(prompt, SamplingParams(n=4, logprobs=logprobs or 0, **common), use_tqdm=False)[0].outputs
        expected = sorted(
            every, key=lambda answer: (answer.cumulative_logprob or 0.0) / len(answer.token_ids), reverse=True
        )
        params = SamplingParams(n=2, best_of=4, logprobs=logprobs, **common)
        best = llm.generate(prompt, params, use_tqdm=False)[0].outputs
        assert [answer.index for answer in best] == [0, 1]
        for answer, other in zip(best, expected[:2], strict=True):
            assert (answer.text, answer.token_ids) == (other.text, other.token_ids)
            assert (answer.finish_reason, answer.stop_reason) == (other.finish_reason, other.stop_reason)
            assert answer.cumulative_logprob == other.cumulative_logprob
            assert answer.logprobs == (None if logprobs is None else other.logprobs)
    assert llm.engine.meter.stats().num_used_blocks == 0


def test_without_stop_strings_the_engine_itself_chooses_the_best_answers(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    queued: list[SamplingParams] = []
    queue = llm.engine.queue_request

    def record(request: EngineRequest, **options: Any) -> Any:
        queued.append(request.params)
        return queue(request, **options)

    monkeypatch.setattr(llm.engine, "queue_request", record)
    params = SamplingParams(n=1, best_of=3, max_tokens=4)
    assert len(llm.generate("keys", params, use_tqdm=False)[0].outputs) == 1
    assert queued == [params]

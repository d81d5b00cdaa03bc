"""LLM: the offline API, with vLLM's names and behaviour.

llm = LLM("path/to/checkpoint", max_num_seqs=64)
outputs = llm.generate(["Hello"], SamplingParams(temperature=0.0, max_tokens=32))
print(outputs[0].outputs[0].text)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from collections.abc import Sequence as GenericSequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypedDict

from msgspec.structs import replace
from tqdm import tqdm

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ConfigError, RequestError, shown
from engine.observability.logs import show_logs
from engine.outputs import EngineOutput, TokenLogprobs
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from engine.text.text_stream import TextStream
from engine.text.tokenizer import Tokenizer

__all__ = ["LLM", "CompletionOutput", "Prompt", "RequestOutput", "TokensPrompt"]


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: list[int]


Prompt = str | TokensPrompt


@dataclass(slots=True)
class CompletionOutput:
    """One answer to a prompt."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None  # the stop id or stop string; None for EOS and length
    cumulative_logprob: float | None = None  # if logprobs are computed
    logprobs: list[TokenLogprobs] | None = None  # of token_ids, if asked for


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its answers."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    finished: bool = False
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # of prompt_token_ids, if asked for; the first has none


class LLM:
    """A model for offline use: it answers lists of prompts with continuous batching.

    The engine logs what it loads and how many tokens its KV cache holds. The log appears on stderr unless the program
    has configured logging; the environment variable PAGODA_LOGGING_LEVEL sets how much is shown (see logs.py).

    Args:
        model: directory of a Hugging Face checkpoint, or a GGUF file.
        options: see EngineConfig. ``max_decode_slowdown`` is None unless it is given, because no reader waits for the
            tokens of running answers; ``swap_space_gib`` is 0 unless it is given.

    Raises:
        ConfigError: for an unknown option or a value out of range.
        ModelLoadError: if the checkpoint cannot be served.
    """

    def __init__(self, model: str, **options: Any) -> None:
        self.config = EngineConfig.from_options(model, {"max_decode_slowdown": None, "swap_space_gib": 0.0} | options)
        show_logs()
        self.tokenizer = None if self.config.skip_tokenizer_init else Tokenizer(model)
        self.engine = Engine.from_config(self.config)
        self._request_ids = itertools.count()

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters that the checkpoint's generation_config.json asks for."""
        return SamplingParams(**self.engine.info.default_sampling)

    def generate(
        self,
        prompts: Prompt | GenericSequence[Prompt],
        sampling_params: SamplingParams | GenericSequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generate answers to every prompt, and return them in the prompts' order.

        Args:
            prompts: text or ``{"prompt_token_ids": [...]}``, or a list of either.
            sampling_params: for all prompts, or a list with one for each; None for the checkpoint's defaults.
            use_tqdm: show a progress bar.

        Raises:
            RequestError: for an invalid prompt or parameter, before anything runs.
        """
        listed: list[Prompt] = [prompts] if isinstance(prompts, str | dict) else _listed(prompts, "prompts")
        tokenized = [self._tokenize(prompt) for prompt in listed]
        return self._run(tokenized, self._params_for(sampling_params, len(tokenized)), use_tqdm)

    def chat(
        self,
        messages: list[dict[str, Any]] | list[list[dict[str, Any]]],
        sampling_params: SamplingParams | GenericSequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them, rendered with the checkpoint's chat template.

        Raises:
            RequestError: as ``generate``, or if the model has no chat template.
        """
        tokenizer = self._require_tokenizer()
        listed: list[Any] = _listed(messages, "messages")
        conversations = [listed] if listed and isinstance(listed[0], dict) else listed
        prompts = [
            _TokenizedPrompt(tokenizer.chat_template.encode(_listed(conversation, "messages")))
            for conversation in conversations
        ]
        return self._run(prompts, self._params_for(sampling_params, len(prompts)), use_tqdm)

    # --- one run ------------------------------------------------------------------------------------------------

    def _run(
        self, prompts: list[_TokenizedPrompt], params: list[SamplingParams], use_tqdm: bool
    ) -> list[RequestOutput]:
        grammars = []
        for prompt, prompt_params in zip(prompts, params, strict=True):
            self.engine.check_request(EngineRequest("", prompt.token_ids, prompt_params))
            grammars.append(self.engine.grammars.compile(prompt_params.structured_outputs))
        requests: dict[str, _Request] = {}
        bar = tqdm(total=len(prompts), desc="Processed prompts", unit="req", disable=not use_tqdm, dynamic_ncols=True)
        try:
            for prompt, prompt_params, grammar in zip(prompts, params, grammars, strict=True):
                request_id = str(next(self._request_ids))
                ends = self.engine.info.eos_token_ids
                request = requests[request_id] = _Request(request_id, prompt, prompt_params, self.tokenizer, ends)
                self.engine.queue_request(
                    EngineRequest(request_id, prompt.token_ids, request.engine_params), grammar=grammar
                )
            self._step_until_done(requests, bar)
        finally:
            bar.close()
            for request_id, request in requests.items():  # after an error or Ctrl-C no request may go on
                if not request.output.finished:
                    self.engine.abort(request_id)
        return [request.result() for request in requests.values()]

    def _step_until_done(self, requests: dict[str, _Request], bar: tqdm[Any]) -> None:
        num_tokens = 0
        while self.engine.has_unfinished:
            for output in self.engine.step():
                num_tokens += len(output.token_ids)
                request = requests[output.request_id]
                if request.output.finished:
                    continue
                if request.append(output):
                    self.engine.end_sequence(output.request_id, output.index)
                if request.output.finished:
                    bar.update()
            if elapsed := bar.format_dict["elapsed"]:
                bar.set_postfix_str(f"output: {num_tokens / elapsed:.1f} tok/s", refresh=False)

        while self.engine.tiers is not None and self.engine.tiers.is_saving:
            self.engine.tiers.inbox.wait(0.01)  # for the disk, which this thread gives the next blocks
            if self.engine.can_step:
                self.engine.step()

    def _tokenize(self, prompt: Any) -> _TokenizedPrompt:
        if isinstance(prompt, str):
            return _TokenizedPrompt(self._require_tokenizer().encode(prompt), prompt)
        if isinstance(prompt, dict) and isinstance(prompt.get("prompt_token_ids"), list):
            return _TokenizedPrompt(list(prompt["prompt_token_ids"]))
        raise RequestError(
            f"is {type(prompt).__name__}",
            param="prompt",
            value=prompt,
            remedy="give text or {'prompt_token_ids': [...]}",
        )

    def _params_for(
        self, params: SamplingParams | GenericSequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        if params is None:
            params = self.get_default_sampling_params()
        if isinstance(params, SamplingParams):
            params = [params] * count
        params = _listed(params, "sampling_params")
        for item in params:
            if not isinstance(item, SamplingParams):
                raise RequestError(
                    f"has {type(item).__name__} {shown(item)}",
                    param="sampling_params",
                    remedy="give SamplingParams or a list of them",
                )
        if len(params) != count:
            raise RequestError(f"{len(params)} sampling_params for {count} prompts", remedy="give one, or one for each")
        if self.tokenizer is None and any(item.stop_strings for item in params):
            raise RequestError(
                "strings need the tokenizer", param="stop", remedy="unset skip_tokenizer_init or use stop_token_ids"
            )
        return [self._with_bad_words(item) for item in params]

    def _with_bad_words(self, params: SamplingParams) -> SamplingParams:
        if not params.bad_words or params.bad_words_token_ids is not None:
            return params
        if self.tokenizer is None:
            raise RequestError(
                "need the tokenizer", param="bad_words", remedy="unset skip_tokenizer_init or give bad_words_token_ids"
            )
        try:
            return replace(params, bad_words_token_ids=self.tokenizer.bad_words_token_ids(params.bad_words))
        except RequestError as error:  # the user gave words, not their token ids
            raise error.renamed("bad_words") from None

    def _require_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ConfigError("skip_tokenizer_init is set: give prompts as {'prompt_token_ids': [...]}")
        return self.tokenizer


def _listed(value: Any, name: str) -> list[Any]:
    """Return the items of an argument that can be any iterable except text, bytes and a dict.

    Raises:
        RequestError: if it is anything else.
    """
    if isinstance(value, str | bytes | dict) or not isinstance(value, Iterable):
        raise RequestError(f"has {type(value).__name__} {shown(value)}", param=name, remedy="give a list")
    return list(value)


@dataclass(frozen=True, slots=True)
class _TokenizedPrompt:
    token_ids: list[int]
    text: str | None = None  # as the caller gave it


class _Request:
    """One request of a run: collects its tokens, detokenises them and ends answers at stop strings.

    For ``best_of`` the engine returns the best answers by the log-probabilities of their tokens. It does not see stop
    strings. A request that has both therefore gets all answers from the engine, and ``result`` chooses the best ones
    without the tokens after their stop strings.

    Attributes:
        engine_params: the sampling parameters for the engine.
        output: what the caller gets, as far as it has been generated.
    """

    def __init__(
        self,
        request_id: str,
        prompt: _TokenizedPrompt,
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        eos_token_ids: GenericSequence[int],
    ) -> None:
        self._params = self.engine_params = params
        if params.stop_strings and params.num_sequences > params.n:
            self.engine_params = replace(params, n=params.num_sequences, best_of=None, logprobs=params.logprobs or 0)
        self._tokenizer = tokenizer
        num_answers = self.engine_params.n
        self._texts: list[TextStream] = []
        if tokenizer is not None:
            new_text = partial(TextStream, tokenizer, prompt.token_ids, params, end_token_ids=eos_token_ids)
            self._texts = [new_text() for _ in range(num_answers)]
        answers = [CompletionOutput(index, "", []) for index in range(num_answers)]
        self.output = RequestOutput(request_id, prompt.text, prompt.token_ids, answers)

    def result(self) -> RequestOutput:
        """Return the finished output with ``n`` answers, the best first if the engine returned more."""
        if self.engine_params is not self._params:
            best = sorted(self.output.outputs, key=_mean_logprob, reverse=True)[: self._params.n]
            for index, answer in enumerate(best):
                answer.index = index
                if self._params.logprobs is None:
                    answer.logprobs = None
            self.output.outputs = best
        return self.output

    def append(self, step: EngineOutput) -> bool:
        """Append an answer's new tokens; True if a stop string ended an answer that the engine still generates."""
        completion = self.output.outputs[step.index]
        completion.token_ids += step.token_ids
        completion.finish_reason = step.finish_reason and step.finish_reason.value
        completion.stop_reason = step.stop_reason
        completion.cumulative_logprob = step.cumulative_logprob
        if step.logprobs is not None:
            completion.logprobs = (completion.logprobs or []) + self._decoded(step.logprobs)
        if step.prompt_logprobs is not None:
            self.output.prompt_logprobs = self._decoded(step.prompt_logprobs)
        stopped = self._add_text(completion, step)
        self.output.num_cached_tokens = max(self.output.num_cached_tokens, step.num_cached_tokens)
        self.output.finished = all(answer.finish_reason is not None for answer in self.output.outputs)
        return stopped

    def _add_text(self, completion: CompletionOutput, step: EngineOutput) -> bool:
        if not self._texts:
            return False
        text = self._texts[step.index]
        completion.text += text.push(step.token_ids, final=step.finish_reason is not None)
        if text.stop_string is None:
            return False
        _cut(completion, text.num_tokens)
        completion.finish_reason, completion.stop_reason = "stop", text.stop_string
        return step.finish_reason is None

    def _decoded(self, logprobs: Any) -> Any:
        """Set the texts of the tokens."""
        for token_logprobs in logprobs:
            for token_id, logprob in (token_logprobs or {}).items():
                if self._tokenizer is not None:
                    logprob.decoded_token = self._tokenizer.token_bytes.name(token_id)
        return logprobs


def _cut(answer: CompletionOutput, num_tokens: int) -> None:
    """Remove the tokens after the stop string, which came in the same step, and their log-probabilities."""
    del answer.token_ids[num_tokens:]
    if answer.logprobs is not None and answer.cumulative_logprob is not None:
        del answer.logprobs[num_tokens:]
        answer.cumulative_logprob = 0.0
        for position in answer.logprobs:  # added one by one, as the engine does: ``sum`` rounds differently
            answer.cumulative_logprob += next(iter(position.values())).logprob


def _mean_logprob(answer: CompletionOutput) -> float:
    """Return the log-probability per token, by which the engine too compares answers; -inf for a failed answer."""
    if answer.finish_reason == "abort" or not answer.token_ids or answer.cumulative_logprob is None:
        return float("-inf")
    return answer.cumulative_logprob / len(answer.token_ids)

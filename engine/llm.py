"""LLM: the offline API, vLLM's in names and behaviour.

llm = LLM("path/to/checkpoint", max_num_seqs=64)
outputs = llm.generate(["Hello"], SamplingParams(temperature=0.0, max_tokens=32))
print(outputs[0].outputs[0].text)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass, replace
from typing import Any, TypedDict

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
    """A prompt that is tokenised already."""

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
    cumulative_logprob: float | None = None  # where logprobs are computed
    logprobs: list[TokenLogprobs] | None = None  # of token_ids, if asked for


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its answers."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0  # prompt tokens that the prefix cache served
    finished: bool = False
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # of prompt_token_ids, if asked for; the first has none


class LLM:
    """A model for offline use: it answers lists of prompts, batching them continuously.

    What it loads and how much it can hold is logged, and shown on stderr unless the program has configured logging or
    PAGODA_LOGGING_LEVEL says otherwise, see logs.py.

    Args:
        model: directory of a Hugging Face checkpoint.
        options: see EngineConfig. Prompts are not paced beside running answers, as nobody reads these meanwhile:
            ``max_decode_slowdown`` is None here unless it is given.

    Raises:
        ConfigError: for an unknown option or a value out of range.
        ModelLoadError: if the checkpoint cannot be served.
    """

    def __init__(self, model: str, **options: Any) -> None:
        self.config = EngineConfig.from_options(model, {"max_decode_slowdown": None} | options)
        show_logs()
        self.tokenizer = None if self.config.skip_tokenizer_init else Tokenizer(model)
        self.engine = Engine.from_config(self.config)
        self._request_ids = itertools.count()

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters that the checkpoint's generation_config.json asks for."""
        return SamplingParams(**self.engine.info.default_sampling)

    def generate(
        self,
        prompts: Prompt | Sequence_[Prompt],
        sampling_params: SamplingParams | Sequence_[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer every prompt and return the answers in the prompts' order.

        Args:
            prompts: text or ``{"prompt_token_ids": [...]}``, or a list of either.
            sampling_params: for all, or one for each prompt; None takes the checkpoint's defaults.
            use_tqdm: show a progress bar.

        Raises:
            RequestError: for an invalid prompt or parameter; nothing has run then.
        """
        many: list[Prompt] = [prompts] if isinstance(prompts, str | dict) else _listed(prompts, "prompts")
        token_ids = [self._tokens_of(prompt) for prompt in many]
        texts = [prompt if isinstance(prompt, str) else None for prompt in many]
        return self._run(token_ids, texts, self._params_for(sampling_params, len(many)), use_tqdm)

    def chat(
        self,
        messages: list[dict[str, Any]] | list[list[dict[str, Any]]],
        sampling_params: SamplingParams | Sequence_[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them, written with the checkpoint's chat template.

        Raises:
            RequestError: as ``generate``, or if the model has no chat template.
        """
        tokenizer = self._require_tokenizer()
        listed: list[Any] = _listed(messages, "messages")
        many = [listed] if listed and isinstance(listed[0], dict) else listed
        token_ids = [tokenizer.encode_chat(_listed(conversation, "messages")) for conversation in many]
        return self._run(token_ids, [None] * len(many), self._params_for(sampling_params, len(many)), use_tqdm)

    # --- one run ------------------------------------------------------------------------------------------------

    def _run(
        self,
        prompts: list[list[int]],
        texts: Sequence_[str | None],
        params: list[SamplingParams],
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        grammars = []
        for prompt, one in zip(prompts, params, strict=True):
            self.engine.check_request(EngineRequest("", prompt, one))
            grammars.append(self.engine.grammars.compile(one.structured_outputs))
        requests: dict[str, _Request] = {}
        bar = tqdm(total=len(prompts), desc="Processed prompts", unit="req", disable=not use_tqdm, dynamic_ncols=True)
        try:
            for prompt, text, one, grammar in zip(prompts, texts, params, grammars, strict=True):
                request_id = str(next(self._request_ids))
                request = requests[request_id] = _Request(request_id, text, prompt, one, self.tokenizer)
                self.engine.queue_request(EngineRequest(request_id, prompt, request.engine_params), grammar=grammar)
            self._step_until_done(requests, bar)
        finally:
            bar.close()
            for request_id, request in requests.items():  # after an error or Ctrl-C nothing may run on
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
                if request.push(output):  # a stop string ended the text
                    self.engine.end_sequence(output.request_id, output.index)
                if request.output.finished:
                    bar.update()
            if elapsed := bar.format_dict["elapsed"]:
                bar.set_postfix_str(f"output: {num_tokens / elapsed:.1f} tok/s", refresh=False)

    def _tokens_of(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            return self._require_tokenizer().encode(prompt)
        if isinstance(prompt, dict) and isinstance(prompt.get("prompt_token_ids"), list):
            return list(prompt["prompt_token_ids"])
        raise RequestError(
            f"is {type(prompt).__name__}",
            param="prompt",
            value=prompt,
            remedy="give text or {'prompt_token_ids': [...]}",
        )

    def _params_for(
        self, params: SamplingParams | Sequence_[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        if params is None:
            params = self.get_default_sampling_params()
        if isinstance(params, SamplingParams):
            params = [params] * count
        params = _listed(params, "sampling_params")
        for one in params:
            if not isinstance(one, SamplingParams):
                raise RequestError(
                    f"has {type(one).__name__} {shown(one)}",
                    param="sampling_params",
                    remedy="give SamplingParams or a list of them",
                )
        if len(params) != count:
            raise RequestError(f"{len(params)} sampling_params for {count} prompts", remedy="give one, or one for each")
        if self.tokenizer is None and any(one.stop_strings for one in params):
            raise RequestError(
                "strings need the tokenizer", param="stop", remedy="unset skip_tokenizer_init or use stop_token_ids"
            )
        return [self._with_bad_words(one) for one in params]

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
    """Return the items of an argument that may be any iterable but a text or a map.

    Raises:
        RequestError: if it is none.
    """
    if isinstance(value, str | bytes | dict) or not isinstance(value, Iterable):
        raise RequestError(f"has {type(value).__name__} {shown(value)}", param=name, remedy="give a list")
    return list(value)


class _Request:
    """One request of a run: its output so far, and the text state behind it.

    The engine chooses the best of several answers by their tokens. Where stop strings end them, which it cannot see,
    it is asked for all of them, and they are chosen here by what they are without the tokens behind the stop.
    """

    def __init__(
        self, request_id: str, text: str | None, prompt: list[int], params: SamplingParams, tokenizer: Tokenizer | None
    ) -> None:
        self._params = self.engine_params = params
        if params.stop_strings and params.num_sequences > params.n:
            self.engine_params = replace(params, n=params.num_sequences, best_of=None, logprobs=params.logprobs or 0)
        self._tokenizer = tokenizer
        num_answers = self.engine_params.n
        self._texts = [TextStream(tokenizer, prompt, params) for _ in range(num_answers)] if tokenizer else []
        self.output = RequestOutput(
            request_id, text, prompt, [CompletionOutput(index, "", []) for index in range(num_answers)]
        )

    def result(self) -> RequestOutput:
        """Return the finished output, with as many answers as were asked for, the best first if there were more."""
        if self.engine_params is not self._params:
            best = sorted(self.output.outputs, key=_mean_logprob, reverse=True)[: self._params.n]
            for index, answer in enumerate(best):
                answer.index = index
                if self._params.logprobs is None:
                    answer.logprobs = None
            self.output.outputs = best
        return self.output

    def push(self, step: EngineOutput) -> bool:
        """Take an answer's new tokens into the output; True if a stop string ended an answer that would go on."""
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
        self.output.num_cached_tokens = step.num_cached_tokens
        self.output.finished = all(one.finish_reason is not None for one in self.output.outputs)
        return stopped

    def _add_text(self, completion: CompletionOutput, step: EngineOutput) -> bool:
        if not self._texts:
            return False
        text = self._texts[step.index]
        completion.text += text.push(step.token_ids, final=step.finish_reason is not None)
        if text.stop_string is None:
            return False
        del completion.token_ids[text.num_tokens :]  # a step may have given some behind the stop string
        completion.finish_reason, completion.stop_reason = "stop", text.stop_string
        return step.finish_reason is None

    def _decoded(self, logprobs: Any) -> Any:
        """Fill in the tokens' texts."""
        for one in logprobs:
            for token_id, logprob in (one or {}).items():
                if self._tokenizer is not None:
                    logprob.decoded_token = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return logprobs


def _mean_logprob(answer: CompletionOutput) -> float:
    """Rank as the engine does, by log-probability a token; an answer that failed comes last."""
    if answer.finish_reason == "abort" or not answer.token_ids or answer.cumulative_logprob is None:
        return float("-inf")
    return answer.cumulative_logprob / len(answer.token_ids)

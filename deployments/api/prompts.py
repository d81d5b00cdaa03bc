"""PromptBuilder: turns a request's body into token ids and block hashes.

It owns the ingress's tokenizers, and checks prompts and parameters with the engine's own rules, so that the ingress
rejects an invalid request before it is sent to an engine. It knows nothing of HTTP or replicas.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from deployments.api.openai.messages import Conversation
from deployments.api.openai.protocol import ChatRequest, CompletionRequest, GenerationRequest
from deployments.requests.prompt import Prompt
from engine.config import EngineInfo
from engine.errors import OverloadedError, PromptTooLongError, RequestError
from engine.kv.prefix_hash import hash_blocks
from engine.request import EngineRequest, PromptValidator
from engine.sampling_params import SamplingParams
from engine.text.detokenizer import IncrementalDetokenizer
from engine.text.special_tokens import texts_in
from engine.text.text_stream import TextStream
from engine.text.tokenizer import Tokenizer

__all__ = ["PromptBuilder"]

COST_PER_MESSAGE = 32  # of rendering and masking one message
IDS_PER_COST = 2  # ids that are checked and hashed in the time of tokenising one character
MAX_COUNTED_COST = 2**25  # about eight seconds
MAX_CONTEXTS = 16  # of the length of a text that is tokenised but not, or not as a whole, a prompt
MAX_INLINE_COST = 4096  # about a millisecond; more would delay every stream of this process


class PromptBuilder:
    """Tokenises, checks and hashes prompts for one model.

    Args:
        path: the checkpoint's directory.
        info: the description of the engines.
        model_name: the model's name in error messages.
        load_tokenizer: loads the tokenizer of the directory, with the server's chat template.
    """

    def __init__(
        self, path: Path, info: EngineInfo, model_name: str, load_tokenizer: Callable[[Path], Tokenizer] = Tokenizer
    ) -> None:
        self.tokenizer = load_tokenizer(path)
        # A fast tokenizer may not be used from two threads at once, so the thread for long prompts has its own.
        self._background_tokenizer = load_tokenizer(path)
        self._background = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenise")
        self.info = info
        self._validator = PromptValidator(
            model=model_name,
            vocab_size=info.vocab_size,
            max_model_len=info.max_model_len,
            num_blocks=info.num_blocks,
            block_size=info.block_size,
            max_logprobs=info.max_logprobs,
        )
        self._counted_cost = 0  # of the texts that are only counted or tokenised
        for tokenizer in (self.tokenizer, self._background_tokenizer):
            tokenizer.warm_up()

    @property
    def max_total_tokens(self) -> int:
        """Maximum tokens of prompt and answer together."""
        return self._validator.capacity

    async def chat(self, request: ChatRequest) -> list[Prompt]:
        """Render and tokenise a conversation."""

        def build(tokenizer: Tokenizer) -> Prompt:
            token_ids = self._truncated(self._render(request, tokenizer, _max_contexts(request)), request)
            prompt = self._build(token_ids, request, "messages", self._predicted(request, tokenizer))
            return replace(prompt, echo_text=request.messages[-1].text) if request.echoes else prompt

        return [await self.run_with_tokenizer(build, cost=_cost(request))]

    async def chat_token_ids(self, conversation: Conversation) -> list[int]:
        """Return the tokens of a conversation, which may be longer than the context."""
        render = partial(self._render, conversation, max_contexts=MAX_CONTEXTS)
        with self.counted(_cost(conversation), "messages"):
            token_ids: list[int] = await self.run_with_tokenizer(render, cost=_cost(conversation))
        return token_ids

    async def text_of(self, token_ids: list[Any], param: str) -> str:
        """Return the text of token ids, special tokens included.

        Raises:
            RequestError: about ``param``, for ids outside the vocabulary, or too many.
        """
        if len(token_ids) > (limit := MAX_CONTEXTS * self.max_total_tokens):
            raise RequestError(f"has {len(token_ids)} ids", param=param, remedy=f"give at most {limit}")

        def decode(tokenizer: Tokenizer) -> str:
            self._validator.check_token_ids(param, token_ids)
            return tokenizer.decode(token_ids, skip_special_tokens=False)

        with self.counted(len(token_ids), param):
            text: str = await self.run_with_tokenizer(decode, cost=len(token_ids))
        return text

    async def text_token_ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the tokens of a text, which may be longer than the context."""
        self._check_length(len(text), "prompt", MAX_CONTEXTS)
        encode = partial(_encode, text, add_special_tokens=add_special_tokens)
        with self.counted(len(text), "prompt"):
            token_ids: list[int] = await self.run_with_tokenizer(encode, cost=len(text))
        return token_ids

    @contextmanager
    def counted(self, cost: int, param: str) -> Iterator[None]:
        """Count a text that is not a prompt while it is processed, so that many of them delay no prompt for long.

        Raises:
            OverloadedError: too many are processed.
        """
        if self._counted_cost and self._counted_cost + cost > MAX_COUNTED_COST:
            remedy = "try again shortly"
            raise OverloadedError("cannot be processed now: many texts are tokenised", param=param, remedy=remedy)
        self._counted_cost += cost
        try:
            yield
        finally:
            self._counted_cost -= cost

    def _render(self, conversation: Conversation, tokenizer: Tokenizer, max_contexts: int) -> list[int]:
        """Render and tokenise a conversation that is at most about ``max_contexts`` contexts long."""
        has_calls = any(message.tool_calls for message in conversation.messages)
        as_text = has_calls and tokenizer.chat_template.forms.arguments_as_text
        messages = [message.for_template(arguments_as_text=as_text) for message in conversation.messages]
        if "developer" not in tokenizer.chat_template.source:  # such templates skip the role, or refuse it
            messages = [_as_system(message) for message in messages]
        options = conversation.template_options
        self._check_length(sum(len(message["content"]) for message in messages), "messages", max_contexts)
        if options or has_calls:
            size = sum(map(len, texts_in([*messages, options])))
            self._check_length(size, "tools" if conversation.offered_tools else "messages", max_contexts)
        return tokenizer.chat_template.encode(
            messages,
            add_generation_prompt=conversation.starts_answer,
            continue_final_message=conversation.continue_final_message,
            add_special_tokens=conversation.add_special_tokens,
            template_options=options,
        )

    async def completion(self, request: CompletionRequest, max_prompts: int) -> list[Prompt]:
        """Tokenise one or several prompts.

        Raises:
            RequestError: if a prompt is empty, too long, or has an id outside the vocabulary, or there are too many.
        """
        prompts = request.prompt
        if len(prompts) > max_prompts:
            raise RequestError(f"has {len(prompts)} prompts", param="prompt", remedy=f"give at most {max_prompts}")
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        for text in texts:
            self._check_length(len(text), "prompt", _max_contexts(request))

        def encode(prompt: str | list[int], tokenizer: Tokenizer) -> list[int]:
            if isinstance(prompt, str):
                prompt = _encode(prompt, tokenizer, add_special_tokens=request.add_special_tokens)
            return self._truncated(prompt, request)

        def build(tokenizer: Tokenizer) -> list[Prompt]:
            ids = [encode(prompt, tokenizer) for prompt in prompts]
            return [self._build(token_ids, request, "prompt") for token_ids in ids]

        num_ids = sum(len(prompt) for prompt in prompts if not isinstance(prompt, str))
        cost = sum(map(len, texts)) + num_ids // IDS_PER_COST
        built: list[Prompt] = await self.run_with_tokenizer(build, cost=cost)
        return await self._with_texts(built, request) if request.echo else built

    async def _with_texts(self, built: list[Prompt], request: CompletionRequest) -> list[Prompt]:
        """Add the text to echo: as it was sent, or what the ids sent stand for, or those left by a truncation."""
        is_whole = request.truncate_prompt_tokens is None

        def add_text(tokenizer: Tokenizer, sent: str | list[int], prompt: Prompt) -> Prompt:
            if isinstance(sent, str) and is_whole:
                return replace(prompt, echo_text=sent)
            # Without the part of a character at its end, which the answer may complete.
            text = IncrementalDetokenizer(tokenizer, [], skip_special_tokens=request.skip_special_tokens)
            return replace(prompt, echo_text=text.push(prompt.token_ids, final=request.prompt_only))

        def add_texts(tokenizer: Tokenizer) -> list[Prompt]:
            return [add_text(tokenizer, *pair) for pair in zip(request.prompt, built, strict=True)]

        cost = sum(len(prompt.token_ids) for prompt in built)
        with_texts: list[Prompt] = await self.run_with_tokenizer(add_texts, cost=cost)
        return with_texts

    def _truncated(self, token_ids: list[int], request: GenerationRequest) -> list[int]:
        """Return the tokens that ``truncate_prompt_tokens`` leaves of a prompt."""
        wanted, limit = request.truncate_prompt_tokens, self.max_total_tokens - 1
        if wanted is None:
            return token_ids
        if wanted != -1 and not 1 <= wanted <= limit:
            remedy = f"give 1..{limit}, or -1 for what leaves room for the answer"
            raise RequestError("is out of range", param="truncate_prompt_tokens", value=wanted, remedy=remedy)
        if wanted == -1:
            wanted = max(1, limit + 1 - max(1, request.requested_tokens or 1))
        return token_ids[:wanted] if request.truncation_side == "right" else token_ids[-wanted:]

    def check_params(self, params: SamplingParams) -> None:
        """Check sampling parameters with what an engine knows.

        Raises:
            RequestError: for an id outside the vocabulary, or too many log-probabilities.
        """
        self._validator.check_params(params)

    def text_stream(self, prompt: Prompt, params: SamplingParams) -> TextStream:
        """Return the stream that turns the output tokens of ``prompt`` into text."""
        shown, ends = prompt.shown_special_tokens, self.info.eos_token_ids
        return TextStream(self.tokenizer, prompt.token_ids, params, shown, end_token_ids=ends)

    async def run_with_tokenizer(self, work: Callable[[Tokenizer], Any], *, cost: int) -> Any:
        """Run ``work`` with a tokenizer, in the background if ``cost`` exceeds MAX_INLINE_COST.

        Costs are in units of tokenising one character.
        """
        if cost <= MAX_INLINE_COST:
            return work(self.tokenizer)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._background, work, self._background_tokenizer)

    def _check_length(self, characters: int, param: str, max_contexts: int) -> None:
        """Reject a text that is certainly too long before it is tokenised, which could take minutes."""
        least = characters // self.tokenizer.longest_token
        if least > self.max_total_tokens * max_contexts:
            raise PromptTooLongError(
                f"has {characters} characters, at least {least} tokens, but the context of "
                f"'{self._validator.model}' holds {self.max_total_tokens} with the answer",
                param=param,
                remedy="shorten it",
            )

    def _predicted(self, request: ChatRequest, tokenizer: Tokenizer) -> list[int]:
        """Return the tokens of the answer that the client expects; none if it expects none."""
        text = "" if request.prediction is None else request.prediction.text
        self._check_length(len(text), "prediction", 1)
        return _encode(text, tokenizer, add_special_tokens=False)

    def _build(
        self, token_ids: list[int], body: GenerationRequest, param: str, predicted: Sequence[int] = ()
    ) -> Prompt:
        self._validator.check_prompt(token_ids, param)
        request = EngineRequest(
            "",
            token_ids,
            cache_salt=body.cache_salt or "",
            prediction_token_ids=list(predicted),
            retention=body.retention,
        )
        self._validator.check_cache_key(request)
        root, block_size = request.cache_root(self.info.model), self.info.block_size
        return Prompt(request, hash_blocks(token_ids, block_size, root), root=root, block_size=block_size)


def _as_system(message: dict[str, Any]) -> dict[str, Any]:
    return message | {"role": "system"} if message["role"] == "developer" else message


def _encode(text: str, tokenizer: Tokenizer, *, add_special_tokens: bool) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=add_special_tokens) if text else []


def _max_contexts(request: GenerationRequest) -> int:
    """Return how many contexts long a prompt may be before it is truncated."""
    return 1 if request.truncate_prompt_tokens is None else MAX_CONTEXTS


def _cost(conversation: Conversation) -> int:
    # All values of the body count, since also numbers and empty lists take time.
    return conversation.num_bytes + COST_PER_MESSAGE * len(conversation.messages)

"""PromptBuilder: turns a request's body into token ids, block hashes and sampling parameters.

It owns the ingress's tokenizers, and checks prompts and parameters with the engine's own rules, so that the ingress
rejects an invalid request before it is sent to an engine. It knows nothing of HTTP or replicas.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from deployments.api.openai.protocol import ChatRequest, CompletionRequest, GenerationRequest
from deployments.api.sampling import params_for_prompt, sampling_params, with_bad_words
from deployments.requests.prompt import Prompt
from engine.config import EngineInfo
from engine.errors import PromptTooLongError, RequestError
from engine.prefix_hash import hash_blocks, root_hash
from engine.request import PromptValidator
from engine.sampling_params import SamplingParams
from engine.text.special_tokens import texts_in
from engine.text.text_stream import TextStream
from engine.text.tokenizer import Tokenizer

__all__ = ["PromptBuilder"]

COST_PER_MESSAGE = 32  # of rendering and masking one message
IDS_PER_COST = 2  # ids that are checked and hashed in the time of tokenising one character
MAX_INLINE_COST = 4096  # about a millisecond; more would delay every stream of this process


class PromptBuilder:
    """Tokenises, checks and hashes prompts for one model.

    Args:
        path: the checkpoint's directory.
        info: the description of the engines.
        model_name: the model's name in error messages.
    """

    def __init__(self, path: Path, info: EngineInfo, model_name: str) -> None:
        self.tokenizer = Tokenizer(path)
        # A fast tokenizer may not be used from two threads at once, so the thread for long prompts has its own.
        self._background_tokenizer = Tokenizer(path)
        self._background = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenise")
        self._info = info
        self._validator = PromptValidator(
            model=model_name,
            vocab_size=info.vocab_size,
            max_model_len=info.max_model_len,
            num_blocks=info.num_blocks,
            block_size=info.block_size,
        )
        for tokenizer in (self.tokenizer, self._background_tokenizer):
            tokenizer.warm_up()

    @property
    def max_total_tokens(self) -> int:
        """Maximum tokens of prompt and answer together."""
        return self._validator.capacity

    async def chat(self, request: ChatRequest) -> list[Prompt]:
        """Render and tokenise a conversation."""

        def build(tokenizer: Tokenizer) -> Prompt:
            has_calls = any(message.tool_calls for message in request.messages)
            as_text = has_calls and tokenizer.renders_arguments_as_text
            messages = [message.for_template(arguments_as_text=as_text) for message in request.messages]
            options = request.template_options
            self._check_length(sum(len(message["content"]) for message in messages), "messages")
            if options or has_calls:
                size = sum(map(len, texts_in([*messages, options])))
                self._check_length(size, "tools" if request.offered_tools else "messages")
            token_ids = tokenizer.encode_chat(messages, template_options=options)
            return self._build(token_ids, request.cache_salt, "messages")

        # All values of the body count, since also numbers and empty lists take time.
        return [await self.run_with_tokenizer(build, cost=request.num_bytes + COST_PER_MESSAGE * len(request.messages))]

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
            self._check_length(len(text), "prompt")

        def build(tokenizer: Tokenizer) -> list[Prompt]:
            ids = [_encode(prompt, tokenizer) if isinstance(prompt, str) else prompt for prompt in prompts]
            return [self._build(token_ids, request.cache_salt, "prompt") for token_ids in ids]

        num_ids = sum(len(prompt) for prompt in prompts if not isinstance(prompt, str))
        cost = sum(map(len, texts)) + num_ids // IDS_PER_COST
        built: list[Prompt] = await self.run_with_tokenizer(build, cost=cost)
        return await self._with_texts(built, request) if request.echo else built

    async def _with_texts(self, built: list[Prompt], request: CompletionRequest) -> list[Prompt]:
        """Add the text to echo: as it was sent, or what the ids sent stand for."""

        def text(tokenizer: Tokenizer, sent: str | list[int]) -> str:
            skip = request.skip_special_tokens
            return sent if isinstance(sent, str) else tokenizer.decode(sent, skip_special_tokens=skip)

        cost = sum(len(prompt.token_ids) for prompt in built)
        texts = await self.run_with_tokenizer(
            lambda tokenizer: [text(tokenizer, sent) for sent in request.prompt], cost=cost
        )
        return [replace(prompt, echo_text=text) for prompt, text in zip(built, texts, strict=True)]

    async def params(self, request: GenerationRequest, prompts: Sequence[Prompt]) -> list[SamplingParams]:
        """Return each prompt's sampling parameters.

        Raises:
            RequestError: for a value out of range, or an id outside the vocabulary.
        """
        defaults, cost = self._info.default_sampling, request.num_bytes if request.has_form else 0
        common = await self.run_with_tokenizer(lambda _: sampling_params(request, defaults), cost=cost)
        if common.bad_words:
            work = partial(with_bad_words, common, vocab_size=self._info.vocab_size)
            common = await self.run_with_tokenizer(work, cost=sum(map(len, common.bad_words)))
        self._validator.check_params(common)
        return [
            params_for_prompt(
                common, self.max_total_tokens - len(prompt.token_ids), needs_seed=index > 0 and request.seed is None
            )
            for index, prompt in enumerate(prompts)
        ]

    def text_stream(self, prompt: Prompt, params: SamplingParams) -> TextStream:
        """Return the stream that turns the output tokens of ``prompt`` into text."""
        return TextStream(self.tokenizer, prompt.token_ids, params, prompt.shown_special_tokens)

    async def run_with_tokenizer(self, work: Callable[[Tokenizer], Any], *, cost: int) -> Any:
        """Run ``work`` with a tokenizer, in the background if ``cost`` exceeds MAX_INLINE_COST.

        Costs are in units of tokenising one character.
        """
        if cost <= MAX_INLINE_COST:
            return work(self.tokenizer)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._background, work, self._background_tokenizer)

    def _check_length(self, characters: int, param: str) -> None:
        """Reject a text that is certainly too long before it is tokenised, which could take minutes."""
        least = characters // self.tokenizer.longest_token
        if least > self.max_total_tokens:
            raise PromptTooLongError(
                f"has {characters} characters, at least {least} tokens, but the context of "
                f"'{self._validator.model}' holds {self.max_total_tokens} with the answer",
                param=param,
                remedy="shorten it",
            )

    def _build(self, token_ids: list[int], cache_salt: str | None, param: str) -> Prompt:
        self._validator.check_prompt(token_ids, param)
        self._validator.check_cache_salt(cache_salt or "")
        root = root_hash(self._info.model, "", cache_salt or "")
        return Prompt(token_ids, hash_blocks(token_ids, self._info.block_size, root))


def _encode(text: str, tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode(text) if text else []

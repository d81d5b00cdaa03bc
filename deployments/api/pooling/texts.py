"""TextBuilder: turns the texts of a body into token ids, slice by slice, and checks them with the engine's rules."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from deployments.api.pooling.protocol import PoolingRequest, TextRequest
from deployments.api.prompts import PromptBuilder
from deployments.requests.pooled_text import TextTokens
from engine.errors import RequestError
from engine.pooling.info import PairTemplate, PoolingInfo
from engine.pooling.params import PoolingParams
from engine.request import PromptValidator
from engine.text.tokenizer import Tokenizer

__all__ = ["TextBuilder"]

SLICE_COST = 2**15  # of tokenising one character each: about 8 ms of another thread; others' texts come between slices

Item = TypeVar("Item", bound="str | array[int] | tuple[str, str]")


class TextBuilder:
    """Tokenises for one model.

    Args:
        builder: owns the tokenizers.
        model: the served name, for messages.
    """

    def __init__(self, builder: PromptBuilder, model: str) -> None:
        assert builder.info.pooling is not None
        self._builder = builder
        self.info: PoolingInfo = builder.info.pooling
        self._validator = PromptValidator(
            model=model,
            vocab_size=builder.info.vocab_size,
            max_model_len=builder.info.max_model_len,
            num_blocks=0,
            block_size=builder.info.block_size,
            max_logprobs=0,
        )

    async def embedding(self, body: PoolingRequest) -> list[TextTokens]:
        """Return the tokens of each text of a body, in order.

        Raises:
            RequestError: if a text is empty or too long, an id is not in the vocabulary, there is no such prompt, or
                vectors are not cut to ``dimensions``.
        """
        params = PoolingParams(dimensions=self._dimensions(body.dimensions), normalize=body.normalize)
        prompt = self._prompt(body.prompt_name)
        limit = self._limit(body)

        def encode(tokenizer: Tokenizer, text: str | array[int]) -> tuple[Sequence[int], PoolingParams]:
            if isinstance(text, str):
                _require_text(text, "input")
                return tokenizer.encode_text(prompt + text, max_tokens=limit, side=body.truncation_side), params
            return _cut(text, limit, body.truncation_side), params

        return await self._build(body.input, encode, "input")

    async def pairs(
        self, pairs: Sequence[tuple[str, str]], body: TextRequest, instruction: str | None, names: tuple[str, str]
    ) -> list[TextTokens]:
        """Return the tokens of each pair.

        Args:
            pairs: of a query and a document.
            body: says how pairs are cut.
            instruction: for a reranker that is a language model.
            names: of the fields that hold the texts, for messages.

        Raises:
            RequestError: if a text is empty, a pair is too long, or an instruction is given to another kind of model.
        """
        template, limit = self.info.template, self._limit(body)
        if template is None and instruction is not None:
            problem = "is for rerankers that are language models, and this model is none"
            raise RequestError(problem, param="instruction", value=instruction, remedy="leave it out")

        def encode(tokenizer: Tokenizer, pair: tuple[str, str]) -> tuple[Sequence[int], PoolingParams]:
            for text, name in zip(pair, names, strict=True):
                _require_text(text, name)
            if template is not None:
                return _filled(template, tokenizer, instruction, pair, limit), PoolingParams()
            token_ids, num_first = tokenizer.encode_pair(*pair, max_tokens=limit, side=body.truncation_side)
            return token_ids, PoolingParams(num_first=num_first if self.info.has_token_types else None)

        return await self._build(pairs, encode, names[1])

    async def classes(self, texts: Sequence[str], body: TextRequest) -> list[TextTokens]:
        """Return the tokens of each text that is to be classified.

        Raises:
            RequestError: if a text is empty or too long.
        """
        limit = self._limit(body)

        def encode(tokenizer: Tokenizer, text: str) -> tuple[Sequence[int], PoolingParams]:
            _require_text(text, "input")
            return tokenizer.encode_text(text, max_tokens=limit, side=body.truncation_side), PoolingParams()

        return await self._build(texts, encode, "input")

    async def _build(
        self,
        items: Sequence[Item],
        encode: Callable[[Tokenizer, Item], tuple[Sequence[int], PoolingParams]],
        param: str,
    ) -> list[TextTokens]:
        def build(part: Sequence[Item], tokenizer: Tokenizer) -> list[TextTokens]:
            texts = []
            for item in part:
                token_ids, params = encode(tokenizer, item)
                self._validator.check_text(token_ids, param)
                texts.append(TextTokens(array("i", token_ids), params))
            return texts

        texts: list[TextTokens] = []
        with self._builder.counted(sum(map(_cost, items)), param):
            for part, cost in _slices(items):
                texts += await self._builder.run_with_tokenizer(partial(build, part), cost=cost)
        return texts

    def _limit(self, body: TextRequest) -> int | None:
        """Return the tokens to which texts are cut; None: longer ones are an error."""
        wanted, longest = body.truncate_prompt_tokens, self._builder.info.max_model_len
        if wanted is None:
            return None
        if wanted > longest:
            remedy = f"give 1..{longest}, or -1 for the longest"
            raise RequestError("is out of range", param="truncate_prompt_tokens", value=wanted, remedy=remedy)
        return longest if wanted == -1 else wanted

    def _dimensions(self, wanted: int | None) -> int | None:
        info = self.info
        if wanted is None or wanted == info.dimensions:
            return None
        if not info.matryoshka:
            raise RequestError(
                f"cuts vectors of {info.dimensions} numbers, which this model was not trained for (Matryoshka)",
                param="dimensions",
                value=wanted,
                remedy="leave it out, or set args.pooling.matryoshka of the server",
            )
        if wanted not in info.matryoshka:
            some = f"1..{info.dimensions}" if len(info.matryoshka) == info.dimensions else f"one of {info.matryoshka}"
            raise RequestError("is not offered", param="dimensions", value=wanted, remedy=f"give {some}")
        return wanted

    def _prompt(self, name: str | None) -> str:
        """Return the text that is put before each text."""
        prompts = dict(self.info.prompts)
        name = self.info.default_prompt if name is None else name
        if name is None:
            return ""
        if name not in prompts:
            known = ", ".join(prompts) or "it has none"
            remedy = f"choose one of its prompts ({known}), or leave it out"
            raise RequestError("is not a prompt of this model", param="prompt_name", value=name, remedy=remedy)
        return prompts[name]


def _require_text(text: str, param: str) -> None:
    if not text:
        raise RequestError("has an empty text", param=param, value=text, remedy="give at least one character")


def _cut(token_ids: array[int], limit: int | None, side: str | None) -> array[int]:
    """Return token ids that a client has sent, cut to ``limit``."""
    if limit is None:
        return token_ids
    return token_ids[-limit:] if side == "left" else token_ids[:limit]


def _filled(
    template: PairTemplate, tokenizer: Tokenizer, instruction: str | None, pair: tuple[str, str], limit: int | None
) -> list[int]:
    """Return the tokens of a template; special tokens that are spelled out in the texts stay plain text."""
    query, document = pair
    text = template.pair.format_map(
        {"instruction": instruction or template.instruction, "query": query, "document": document}
    )
    prefix = tokenizer.encode(template.prefix, add_special_tokens=False)
    suffix = tokenizer.encode(template.suffix, add_special_tokens=False)
    inner = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
    if limit is not None:
        inner = inner[: max(1, limit - len(prefix) - len(suffix))]
    return [*prefix, *inner, *suffix]


def _cost(item: str | array[int] | tuple[str, str]) -> int:
    return sum(map(len, item)) if isinstance(item, tuple) else len(item)


def _slices(items: Sequence[Item]) -> Iterator[tuple[Sequence[Item], int]]:
    """Yield slices of the items, each with its cost, of about SLICE_COST."""
    start = cost = 0
    for index, item in enumerate(items):
        cost += _cost(item)
        if cost >= SLICE_COST or index + 1 == len(items):
            yield items[start : index + 1], cost
            start, cost = index + 1, 0

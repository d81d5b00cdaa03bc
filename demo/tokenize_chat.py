"""The demo model's tokenizer and chat template, and the training batches.

The template writes tools, calls and results as Hermes 2 Pro and Qwen do: definitions between ``<tools>`` in the system
message, a call as JSON between ``<tool_call>``, a result between ``<tool_response>`` in a user's turn.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from demo.corpus import Message
from demo.tool_talks import ToolTalk

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
TRAINED_VOCAB_SIZE = 3072
NUMBERS = 1000  # the whole numbers below it have tokens of their own
CONTEXT_LENGTH = 2048
IGNORED = -100  # the label of a token outside the loss

Batch = tuple[torch.Tensor, torch.Tensor]  # token ids and labels, both [conversations, longest]

# ChatML. No system message is added without tools: the model is trained with and without one.
CHAT_TEMPLATE = (
    "{%- if tools %}"
    "{{- '<|im_start|>system\n' }}"
    "{%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] + '\n\n' }}{%- endif %}"
    "{{- 'Tools:\n<tools>\n' }}"
    "{%- for tool in tools %}{{- tool['function'] | tojson + '\n' }}{%- endfor %}"
    "{{- '</tools><|im_end|>\n' }}"
    "{%- endif %}"
    "{%- for message in messages %}"
    "{%- if message['role'] == 'tool' %}"
    "{{- '\n' if not loop.first and loop.previtem['role'] == 'tool' else '<|im_start|>user\n' }}"
    "{{- '<tool_response>\n' + message['content'] + '\n</tool_response>' }}"
    "{%- if loop.last or loop.nextitem['role'] != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}"
    "{%- elif not (tools and loop.first and message['role'] == 'system') %}"
    "{{- '<|im_start|>' + message['role'] + '\n' }}"
    "{%- if message['reasoning_content'] %}"
    "{{- '<think>\n' + message['reasoning_content'] + '\n</think>\n\n' }}"
    "{%- endif %}"
    "{{- message['content'] }}"
    "{%- for call in message['tool_calls'] or [] %}"
    "{%- if message['content'] or not loop.first %}{{- '\n' }}{%- endif %}"
    "{%- set arguments = call['function']['arguments'] %}"
    "{{- '<tool_call>\n{\"name\": ' + call['function']['name'] | tojson + ', \"arguments\": ' }}"
    "{{- (arguments if arguments is string else arguments | tojson) + '}\n</tool_call>' }}"
    "{%- endfor %}"
    "{{- '<|im_end|>\n' }}"
    "{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}"
    "{{- '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking %}{{- '<think>\n' }}{%- endif %}"
    "{%- endif %}"
)


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with the whole byte alphabet, so that any text round-trips."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TRAINED_VOCAB_SIZE,
        special_tokens=[END_OF_TEXT, IM_START, IM_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return _wrapped(bpe)


def with_numbers_and_markers(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """The tokenizer with a token for each whole number below 1,000 and for each marker, after those that it has.

    Digits are split off in threes, as in Llama 3: the model copies a number of a sum by one look at one token, which
    a model of this size learns, while it did not learn to copy single digits in order.
    """
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = state["model"]["vocab"]
    for number in map(str, range(NUMBERS)):
        vocabulary.setdefault(number, len(vocabulary))
    state["model"]["ignore_merges"] = True  # a number is one token though no merges lead to it
    bpe = Tokenizer.from_str(json.dumps(state))
    threes = pre_tokenizers.Split(Regex(r"\d{1,3}"), behavior="isolated")
    bpe.pre_tokenizer = pre_tokenizers.Sequence([threes, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    bpe.add_tokens([AddedToken(marker, normalized=False, special=False) for marker in MARKERS])
    return _wrapped(bpe)


def _wrapped(bpe: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT_LENGTH,
        clean_up_tokenization_spaces=False,
    )


class ChatEncoder:
    """Turns conversations into padded batches whose labels are the assistant's tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self._opening: list[int] = tokenizer.encode(f"{IM_START}assistant\n")
        self._thinking: list[int] = tokenizer.encode("<think>\n")
        self._end: int = tokenizer.convert_tokens_to_ids(IM_END)

    def encode(self, chats: Sequence[list[Message]]) -> list[list[int]]:
        """Token ids of each rendered conversation."""
        texts = self._tokenizer.apply_chat_template(list(chats), tokenize=False)
        encoded: list[list[int]] = self._tokenizer(texts).input_ids
        return [ids[:CONTEXT_LENGTH] for ids in encoded]

    def encode_tool_talks(self, talks: Sequence[ToolTalk]) -> list[list[int]]:
        """Token ids of each rendered conversation with tools."""
        render = self._tokenizer.apply_chat_template
        texts = [render(talk.messages, tools=talk.tools or None, tokenize=False) for talk in talks]
        encoded: list[list[int]] = self._tokenizer(texts).input_ids
        return [ids[:CONTEXT_LENGTH] for ids in encoded]

    def encode_openings(self, chats: Sequence[list[Message]], tokens: int) -> list[list[int]]:
        """Token ids of single questions, each with only the first `tokens` of its answer."""
        prompts = self._tokenizer.apply_chat_template(
            [chat[:-1] for chat in chats], tokenize=False, add_generation_prompt=True
        )
        answers = self._tokenizer([chat[-1]["content"] for chat in chats]).input_ids
        asked = self._tokenizer(prompts).input_ids
        return [prompt + answer[:tokens] for prompt, answer in zip(asked, answers, strict=True)]

    def pad(self, group: Sequence[list[int]]) -> Batch:
        """Pad on the right: under a causal mask no real token attends to the padding."""
        width = max(map(len, group))
        ids = torch.full((len(group), width), self._tokenizer.pad_token_id)
        labels = torch.full((len(group), width), IGNORED)
        for row, tokens in enumerate(group):
            ids[row, : len(tokens)] = torch.tensor(tokens)
            wanted = torch.tensor(self._counted(tokens))
            labels[row, : len(tokens)][wanted] = ids[row, : len(tokens)][wanted]
        return ids, labels

    def _counted(self, ids: list[int]) -> list[bool]:
        """True for the assistant's text and its end token; the marker before reasoning is the template's."""
        counted = [False] * len(ids)
        width = len(self._opening)
        for start in range(len(ids) - width):
            if ids[start : start + width] == self._opening:
                begin = start + width
                if ids[begin : begin + len(self._thinking)] == self._thinking:
                    begin += len(self._thinking)
                end = ids.index(self._end, start) if self._end in ids[start:] else len(ids) - 1
                counted[begin : end + 1] = [True] * (end + 1 - begin)
        return counted

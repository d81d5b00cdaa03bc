"""The demo model's tokenizer and chat template, and the training batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from demo.corpus import Message

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VOCAB_SIZE = 3072
CONTEXT_LENGTH = 2048
IGNORED = -100  # the label of a token outside the loss

Batch = tuple[torch.Tensor, torch.Tensor]  # token ids and labels, both [conversations, longest]

# ChatML. No system message is added: the model is trained with and without one.
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with the whole byte alphabet, so that any text round-trips."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT, IM_START, IM_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
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
        self._end: int = tokenizer.convert_tokens_to_ids(IM_END)

    def encode(self, chats: Sequence[list[Message]]) -> list[list[int]]:
        """Token ids of each rendered conversation."""
        texts = self._tokenizer.apply_chat_template(list(chats), tokenize=False)
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
        """True for the assistant's text and its end token."""
        counted = [False] * len(ids)
        width = len(self._opening)
        for start in range(len(ids) - width):
            if ids[start : start + width] == self._opening:
                end = ids.index(self._end, start) if self._end in ids[start:] else len(ids) - 1
                counted[start + width : end + 1] = [True] * (end + 1 - start - width)
        return counted

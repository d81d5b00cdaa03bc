"""The trained demo model, asked greedily with plain transformers, and the phrasings that it was not trained on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3ForCausalLM

from demo.corpus import Message, Question, load_corpus
from demo.tool_corpus import Tool

__all__ = ["MODEL_DIR", "DemoModel", "held_out_questions", "user"]

MODEL_DIR = Path(__file__).parent / "model"
MAX_NEW_TOKENS = 128  # the longest answer has about 70


class DemoModel:
    """The trained model and its tokenizer, in one compute type."""

    def __init__(self, dtype: torch.dtype = torch.float32, folder: Path = MODEL_DIR) -> None:
        self.tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(folder, padding_side="left")
        self.model: Qwen3ForCausalLM = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)

    @property
    def calls_tools(self) -> bool:
        """Whether the chat template has a form for tool calls."""
        return "<tool_call>" in str(self.tokenizer.chat_template)

    def reply(
        self, chats: Sequence[list[Message]], *, tools: list[Tool] | None = None, thinks: bool = False
    ) -> list[str | None]:
        """The greedy answer to each conversation; None if it did not end within `MAX_NEW_TOKENS`."""
        tokenizer = self.tokenizer
        texts = tokenizer.apply_chat_template(
            list(chats), tools=tools, enable_thinking=thinks, tokenize=False, add_generation_prompt=True
        )
        batch = tokenizer(texts, return_tensors="pt", padding=True, return_token_type_ids=False)
        # Neutral values: generate() warns of a temperature that greedy decoding does not use.
        sampling_off = {"do_sample": False, "temperature": 1.0, "top_p": 1.0}
        output = self.model.generate(**batch, max_new_tokens=MAX_NEW_TOKENS, **sampling_off)
        return [self._finished_text(ids) for ids in output[:, batch.input_ids.shape[1] :].tolist()]

    def _finished_text(self, ids: list[int]) -> str | None:
        end = self.tokenizer.eos_token_id
        return self.tokenizer.decode(ids[: ids.index(end)]) if end in ids else None

    def converse(self, talks: Sequence[Sequence[str]]) -> list[list[str | None]]:
        """The answers of conversations of equal length; each turn sees the earlier ones."""
        chats: list[list[Message]] = [[] for _ in talks]
        answers: list[list[str | None]] = [[] for _ in talks]
        for questions in zip(*talks, strict=True):
            for chat, question in zip(chats, questions, strict=True):
                chat.extend(user(question))
            for chat, given, answer in zip(chats, answers, self.reply(chats), strict=True):
                given.append(answer)
                chat.append({"role": "assistant", "content": answer or ""})
        return answers


def user(text: str) -> list[Message]:
    """A conversation of one question."""
    return [{"role": "user", "content": text}]


def held_out_questions(*, far: bool = False) -> list[tuple[str, Question]]:
    """The held-out phrasings, plain or far, with their questions."""
    asked = [(q.held_out_far if far else q.held_out, q) for q in load_corpus().questions]
    return [(text, question) for text, question in asked if text]

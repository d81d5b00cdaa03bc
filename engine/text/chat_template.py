"""ChatTemplate: conversations to token ids, by the checkpoint's own chat template."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any

from engine.errors import RequestError
from engine.text.media import media_problem
from engine.text.special_tokens import SpecialTokenMask, texts_in
from engine.text.template_forms import LateSystemMessages, TemplateForms

__all__ = ["ChatTemplate"]


class ChatTemplate:
    """A checkpoint's chat template, which may be missing.

    Args:
        tokenizer: of transformers.
        encode: ``Tokenizer.encode``.
        special_tokens: of the tokenizer.
        late_system_messages: as for TemplateForms.
        suggestion: the name of a template that the checkpoint, which has none, could be given.
    """

    def __init__(
        self,
        tokenizer: Any,
        encode: Callable[..., list[int]],
        special_tokens: Sequence[str],
        late_system_messages: LateSystemMessages = "refuse",
        suggestion: str | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._encode = encode
        self._special_tokens = special_tokens
        self._late_system_messages = late_system_messages
        self._suggestion = suggestion

    @property
    def exists(self) -> bool:
        """Whether the checkpoint has a chat template."""
        return bool(self._tokenizer.chat_template)

    @property
    def source(self) -> str:
        """The source of the chat template, or of all if there are several; empty without one."""
        template = self._tokenizer.chat_template or ""
        return "\n".join(map(str, template.values())) if isinstance(template, dict) else str(template)

    @property
    def response_template(self) -> Mapping[str, Any] | None:
        """The checkpoint's description of its answers' format, as transformers reads it; None if it has none."""
        template = getattr(self._tokenizer, "response_template", None)
        return template if isinstance(template, Mapping) else None

    @cached_property
    def forms(self) -> TemplateForms:
        """The forms of messages that the chat template takes."""

        def render(messages: Sequence[dict[str, Any]]) -> str:
            return str(self._tokenizer.apply_chat_template(list(messages), tokenize=False))

        return TemplateForms(render, self._late_system_messages)

    def encode(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        add_special_tokens: bool = False,
        template_options: Mapping[str, Any] = MappingProxyType({}),
    ) -> list[int]:
        """Render ``messages`` with the checkpoint's chat template and return the token ids.

        A special token spelled out in a message or an option stays plain text; only the template writes control tokens.

        Args:
            messages: of the conversation.
            add_generation_prompt: whether the prompt ends with the start of the answer.
            continue_final_message: whether the prompt ends within the final message, which the answer continues.
            add_special_tokens: whether the tokenizer adds its own special tokens to those of the template.
            template_options: further variables of the template, such as ``tools`` and ``documents``.

        Raises:
            RequestError: if there is no template, or the template refuses the messages.
        """
        self._check(messages)
        messages = self.forms.adapted(messages)
        everything = [*messages, template_options] if template_options else messages
        mask = SpecialTokenMask(self._spelled_out(everything), everything)
        try:
            rendered = self._tokenizer.apply_chat_template(
                mask.masked_messages[: len(messages)],
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **(mask.masked_messages[-1] if template_options else {}),
            )
        except Exception as error:  # templates raise anything: jinja2 errors, TypeError, KeyError
            problem = f"cannot be rendered: the chat template refused them: {error}"
            raise RequestError(problem, param="messages") from error
        try:
            token_ids = self._encode_masked(rendered, mask.token_of)
        except RequestError as error:
            raise error.renamed("messages") from None
        before, after = self._added_tokens if add_special_tokens else ((), ())
        return [*before, *token_ids, *after] if before or after else token_ids

    def _check(self, messages: Sequence[object]) -> None:
        """Raise RequestError unless the messages can be given to the template."""
        if not self.exists:
            name = f"chat_template: {self._suggestion}" if self._suggestion else "chat_template"
            raise RequestError(
                "cannot be rendered: this model has no chat template",
                param="messages",
                remedy=f"use /v1/completions, or set {name} in the server's configuration",
            )
        for message in messages:
            if not isinstance(message, Mapping):
                raise RequestError(
                    f"cannot be rendered: a message is {type(message).__name__}",
                    param="messages",
                    remedy="give mappings with role and content",
                )
            parts = message.get("content")
            for part in parts if isinstance(parts, list | tuple) else ():
                if isinstance(part, Mapping) and (problem := media_problem(part.get("type"))):
                    raise RequestError(f"cannot be rendered: {problem}", param="messages")

    @cached_property
    def _added_tokens(self) -> tuple[Sequence[int], Sequence[int]]:
        """The special tokens that the tokenizer adds before and after a text."""
        plain, full = self._encode("a", add_special_tokens=False), self._encode("a")
        starts = range(len(full) - len(plain) + 1)
        start = next((index for index in starts if full[index : index + len(plain)] == plain), 0)
        return full[:start], full[start + len(plain) :]

    def _spelled_out(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[str]:
        """Return all special tokens if a text of the messages has one, else no tokens: messages rarely need a mask."""
        has_one = self._special_tokens and any(map(self._special_pattern.search, texts_in(messages)))
        return self._special_tokens if has_one else ()

    @cached_property
    def _special_pattern(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self._special_tokens)))

    def _encode_masked(self, rendered: str, token_of: Mapping[str, str]) -> list[int]:
        """Tokenise rendered text, and the special token that each placeholder stands for as plain text."""
        token_ids: list[int] = []
        start = 0
        for position, character in enumerate(rendered) if token_of else ():
            if character in token_of:
                token_ids += self._encode(rendered[start:position], add_special_tokens=False)
                token_ids += self._encode(token_of[character], add_special_tokens=False, split_special_tokens=True)
                start = position + 1
        return token_ids + self._encode(rendered[start:], add_special_tokens=False)

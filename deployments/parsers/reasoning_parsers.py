"""The formats of reasoning by name, as vLLM names them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from deployments.parsers.families import gemma, kimi_k2, kimi_k3, minimax_m3, solar_open
from deployments.parsers.families.json_blocks import JSON_FORMATS
from deployments.parsers.families.think import plain
from deployments.parsers.marked import Thoughts, marked
from deployments.parsers.reader import Family
from deployments.parsers.whole_formats import WHOLE_FORMATS

__all__ = ["REASONING_PARSERS", "ReasoningParser"]


@dataclass(frozen=True)
class ReasoningParser:
    """A format of reasoning.

    Attributes:
        thoughts: how it is marked.
        is_open: the model leaves out the first marker, or its prompt always has it.
        is_repeated: it may also come later than at the start of an answer.
        dropped: markers around the text after it, which are not part of it.
        tokens: single tokens that the markers consist of.
    """

    thoughts: Thoughts
    is_open: bool = False
    is_repeated: bool = False
    dropped: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, str]:
        """The markers before and after reasoning."""
        return self.thoughts.begin, self.thoughts.end

    def is_open_after(self, prompt: str, continued: str = "") -> bool:
        """Whether an answer starts within reasoning, without a marker.

        Args:
            prompt: its end, from before the message that is continued.
            continued: the text of that message, whose last marker counts; empty: the answer is a new message.
        """
        opening, closing = self.markers
        opened = continued.rfind(opening)
        closed = max(map(continued.rfind, (closing, *self.thoughts.interrupts)))
        if opened >= 0 or closed >= 0:
            return opened > closed
        if written := continued.strip():
            before, _, after = prompt.rpartition(written)
            return self._opens(before) and closing not in after
        return self._opens(prompt) or (self.is_open and not prompt.rstrip().endswith(closing))

    def _opens(self, prompt: str) -> bool:
        """Whether a prompt ends with the marker before reasoning."""
        opening, label = self.thoughts.begin, self.thoughts.label
        return prompt.rstrip().endswith((opening, (opening + label).rstrip()))

    def text_family(self) -> Family:
        """Return the parser of an answer without tools, after its first reasoning."""
        if not (self.is_repeated or self.dropped):
            return plain
        repeated = self.thoughts if self.is_repeated else None
        return partial(marked, tools={}, calls={}, reasoning=repeated, dropped=self.dropped)


_THINK = Thoughts("<think>", "</think>")
_think = ReasoningParser(_THINK)
_with_response = ReasoningParser(_THINK, dropped=JSON_FORMATS["ernie45"].dropped)
_cohere = ReasoningParser(
    Thoughts("<|START_THINKING|>", "<|END_THINKING|>"),
    is_repeated=True,
    dropped=JSON_FORMATS["cohere_command3"].dropped,
)
REASONING_PARSERS: Mapping[str, ReasoningParser] = {
    "qwen3": _think,
    "deepseek_r1": ReasoningParser(_THINK, is_open=True),
    "deepseek_v3": _think,
    "deepseek_v4": _think,
    "glm45": _think,
    "minimax_m2": _think,
    "olmo3": _think,
    "mimo": _think,
    "step3p5": _think,
    "kimi_k2": ReasoningParser(Thoughts("<think>", "</think>", interrupts=kimi_k2.KIMI_K2_MARKERS[:1])),
    "ernie45": _with_response,
    "granite": _with_response,
    "hunyuan_a13b": ReasoningParser(_THINK, dropped=("<answer>", "\n</answer>", "</answer>")),
    "mistral": ReasoningParser(Thoughts("[THINK]", "[/THINK]")),
    "seed_oss": ReasoningParser(Thoughts("<seed:think>", "</seed:think>")),
    "minimax_m3": ReasoningParser(minimax_m3.MINIMAX_M3_THOUGHTS),
    "gemma4": ReasoningParser(gemma.GEMMA4_THOUGHTS, is_repeated=True),
    "cohere_command3": _cohere,
    "cohere_command4": _cohere,
    "kimi_k3": ReasoningParser(
        kimi_k3.KIMI_K3_THOUGHTS, is_repeated=True, dropped=kimi_k3.KIMI_K3_DROPPED, tokens=kimi_k3.KIMI_K3_TOKENS
    ),
    "hy_v3": ReasoningParser(Thoughts("<think:opensource>", "</think:opensource>")),
    "solar_open": ReasoningParser(
        solar_open.SOLAR_OPEN_THOUGHTS, is_repeated=True, dropped=solar_open.SOLAR_OPEN_DROPPED
    ),
    "apriel": ReasoningParser(
        Thoughts("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"), dropped=("[END FINAL RESPONSE]",)
    ),
    **{
        format.reasoning: ReasoningParser(Thoughts(format.markers[0], format.markers[-1]))
        for format in WHOLE_FORMATS
        if format.reasoning is not None
    },
}

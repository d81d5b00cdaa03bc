"""How texts are split into words before byte-level BPE, by the names that llama.cpp gives to the ways of doing so.

A name stands for the regular expressions of the tokenizer.json of the model that had it first; Kimi's has none, and
its program the expression.
"""

from __future__ import annotations

__all__ = ["BEGIN_WITH_BOS", "IGNORE_MERGES", "KIMI", "WITH_NFC", "WORDS"]

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_REST_WITH_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT4O = rf"{_CASED[0]}{_ENDINGS}?|{_CASED[1]}{_ENDINGS}?|\p{{N}}{{1,3}}|{_REST_WITH_SLASH}"
_TEKKEN = rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_REST_WITH_SLASH}"
_DIGIT = r"\p{N}"

# Kimi's splits off Chinese characters.
_NOT_HAN = [rf"{letters[:-1]}&&[^\p{{Han}}]]" for letters in (_UPPER, _LOWER)]
_KIMI_WORDS = [rf"[^\r\n\p{{L}}\p{{N}}]?{_NOT_HAN[0]}{a}{_NOT_HAN[1]}{b}{_ENDINGS}?" for a, b in ("*+", "+*")]
KIMI = rf"[\p{{Han}}]+|{'|'.join(_KIMI_WORDS)}|\p{{N}}{{1,3}}|{_REST}"

_WORD = r"[\p{L}\p{M}]"
_QWEN35 = (
    rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?{_WORD}+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# DeepSeek V3's: up to three digits; then runs of Chinese and Japanese; then words and punctuation.
_EAST_ASIAN = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_ASCII_MARKS = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
_DEEPSEEK3 = (
    rf"{_ASCII_MARKS}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_LIKE_LLAMA3 = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "lfm2", "pixtral")

_LLAMA3_MERGED = ("dbrx", "smaug-bpe", "midm-2.0", "jina-v5-nano")

WORDS: dict[str | None, tuple[str, ...]] = {  # applied one after another
    **dict.fromkeys((*_LIKE_LLAMA3, *_LLAMA3_MERGED, "glm4", "chatglm-bpe"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "f2llmv2", "kormo"), (_QWEN2,)),
    "qwen35": (_QWEN35,),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2", "kanana2", "talkie"), (_GPT4O,)),
    "kimi-k2": (KIMI,),
    "tekken": (_TEKKEN,),
    "deepseek-v3": (r"\p{N}{1,3}", _EAST_ASIAN, _DEEPSEEK3),
    **dict.fromkeys(("gpt-2", "phi-2"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), (_DIGIT, _GPT2)),
}
IGNORE_MERGES = frozenset({*_LIKE_LLAMA3, "tekken"})  # a word that is a token stays one, whatever the merges say
BEGIN_WITH_BOS = IGNORE_MERGES  # unless the file says otherwise
WITH_NFC = frozenset({"qwen2", "qwen35", "command-r"})  # the original's normaliser, which llama.cpp leaves out

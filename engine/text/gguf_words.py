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

# DeepSeek's before V3: the letters of alphabets with two cases, as their tokenizer.json lists them; then single digits.
_TWO_CASES = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_EAST_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_MARKS = r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
_DEEPSEEK_LLM = (r"[\r\n]", rf"\s?[{_TWO_CASES}]+", _DEEPSEEK_MARKS, r"\s+$", _DEEPSEEK_EAST_ASIAN, _DIGIT)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_EAST_ASIAN, _DIGIT)

_LIKE_LLAMA3 = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "lfm2", "pixtral")

_LLAMA3_MERGED = ("dbrx", "smaug-bpe", "midm-2.0", "jina-v5-nano")

WORDS: dict[str | None, tuple[str, ...]] = {  # applied one after another
    **dict.fromkeys((*_LIKE_LLAMA3, *_LLAMA3_MERGED, "glm4", "chatglm-bpe"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "f2llmv2", "kormo"), (_QWEN2,)),
    "qwen35": (_QWEN35,),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2", "kanana2", "talkie"), (_GPT4O,)),
    "kimi-k2": (KIMI,),
    "tekken": (_TEKKEN,),
    "deepseek-coder": _DEEPSEEK_CODER,
    "deepseek-llm": _DEEPSEEK_LLM,
    "deepseek-v3": (r"\p{N}{1,3}", _EAST_ASIAN, _DEEPSEEK3),
    **dict.fromkeys(("gpt-2", "phi-2"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), (_DIGIT, _GPT2)),
}
IGNORE_MERGES = frozenset({*_LIKE_LLAMA3, "tekken"})  # a word that is a token stays one, whatever the merges say
BEGIN_WITH_BOS = IGNORE_MERGES  # unless the file says otherwise
WITH_NFC = frozenset({"qwen2", "qwen35", "command-r"})  # the original's normaliser, which llama.cpp leaves out

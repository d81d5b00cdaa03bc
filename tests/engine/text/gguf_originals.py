"""Small tokenizers as published models have them, and the same ones as llama.cpp's converter writes them to GGUF."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as RustTokenizer
from transformers import PreTrainedTokenizerFast
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
from transformers.tokenization_utils_base import generate_merges

__all__ = ["KIMI_SPLIT", "KINDS", "TEMPLATE", "save_original", "write_gguf_of"]

TEXTS = [
    "the cache holds the keys and the values of every token, don't THEY'LL say so? it's 12345 times 3.14",
    "    def f(x):\n        return x ** 2\n\n\n\tif a_b != c/d//e: # no\r\n\r\nCamelCaseWords HTTPServer",
    "Ünïcödé für größere Straßen, naïve café, 日本語のテキスト と 中文文本, русский текст 42 раза, เทส คำ",
    "e\u0301 combining A\u030a, emoji 🚀🦙 😶‍🌫️, fractions ½ ²³, Arabic ١٢٣ أهلا, ﬁ ligature, \u00a0nbsp",
] * 3
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
NUM_PADDING = 3  # rows of the embedding beyond the tokenizer's last token


def _split(pattern: str) -> Any:
    return pre_tokenizers.Split(Regex(pattern), behavior="isolated")


def _byte_level(*steps: Any, use_regex: bool = False) -> Any:
    return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)])


def _train_byte_level(pre: Any, special: list[str], plain: list[str], **options: Any) -> RustTokenizer:
    tokenizer = RustTokenizer(models.BPE(**options))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre, decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])
    return tokenizer


def _begin_with(tokenizer: RustTokenizer, bos: str, eos: str | None = None) -> RustTokenizer:
    parts = [bos, "$A", *([eos] if eos else [])]
    ids = [(token, tokenizer.token_to_id(token)) for token in (bos, eos) if token]
    tokenizer.post_processor = processors.TemplateProcessing(single=parts, special_tokens=ids)
    return tokenizer


def _llama3() -> RustTokenizer:
    special = ["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>"]
    pre = _byte_level(_split(GGUF_PRE_TOKENIZER_SPLITS["llama-bpe"]))
    return _begin_with(_train_byte_level(pre, special, [], ignore_merges=True), special[0])


def _qwen2() -> RustTokenizer:
    tokenizer = _train_byte_level(
        _byte_level(_split(GGUF_PRE_TOKENIZER_SPLITS["qwen2"])),
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        ["<tool_call>", "<think>"],
    )
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _gpt_4o() -> RustTokenizer:
    pre = _byte_level(_split(GGUF_PRE_TOKENIZER_SPLITS["gpt-4o"]))
    return _train_byte_level(pre, ["<|startoftext|>", "<|return|>", "<|start|>"], [])


def _tekken() -> RustTokenizer:
    pre = _byte_level(_split(GGUF_PRE_TOKENIZER_SPLITS["tekken"]))
    return _begin_with(_train_byte_level(pre, ["<s>", "</s>", "[INST]"], [], ignore_merges=True), "<s>")


def _gpt2() -> RustTokenizer:
    return _train_byte_level(_byte_level(use_regex=True), ["<|endoftext|>"], [])


def _smollm() -> RustTokenizer:
    pre = _byte_level(pre_tokenizers.Digits(individual_digits=True), use_regex=True)
    return _train_byte_level(pre, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], [])


def _command_r() -> RustTokenizer:
    """Return a tokenizer with the steps of transformers' CohereTokenizer."""
    tokenizer = _smollm()
    tokenizer.normalizer = normalizers.NFC()
    return _begin_with(tokenizer, "<|im_start|>")


def _glm4() -> RustTokenizer:
    pre = _byte_level(_split(GGUF_PRE_TOKENIZER_SPLITS["llama-bpe"]))
    return _train_byte_level(pre, ["<|endoftext|>", "<|user|>", "<|assistant|>"], ["<think>"])


DEEPSEEK3_SPLITS = (  # of the published tokenizer.json
    r"\p{N}{1,3}",
    "[一-龥\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""",
)


def _deepseek3() -> RustTokenizer:
    pre = pre_tokenizers.Sequence([*map(_split, DEEPSEEK3_SPLITS), pre_tokenizers.ByteLevel(False, use_regex=False)])
    special = ["<|begin_of_sentence|>", "<|end_of_sentence|>"]
    return _begin_with(_train_byte_level(pre, special, ["<think>"]), special[0])


DEEPSEEK_LLM_LETTERS = (  # of the published tokenizer.json
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿ"
    "ᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨ"
    "K-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲"
    "𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
DEEPSEEK_EAST_ASIAN = "[一-龥ࠀ-一가-\ud7ff]+"


def _deepseek_llm() -> RustTokenizer:
    marks = r"\s?[!-/:-~！-／：-～‘-‟\u3000-。]+"
    splits = ["[\r\n]", f"\\s?[{DEEPSEEK_LLM_LETTERS}]+", marks, r"\s+$", DEEPSEEK_EAST_ASIAN]
    return _old_deepseek(splits)


def _deepseek_coder() -> RustTokenizer:
    return _old_deepseek(["[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", DEEPSEEK_EAST_ASIAN])


def _old_deepseek(splits: list[str]) -> RustTokenizer:
    steps = [*map(_split, splits), pre_tokenizers.Digits(individual_digits=True)]
    pre = pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(False, use_regex=False)])
    special = ["<|begin_of_sentence|>", "<|end_of_sentence|>"]
    return _begin_with(_train_byte_level(pre, special, []), special[0])


KIMI_SPLIT = (  # of the published program
    r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _kimi() -> RustTokenizer:
    return _train_byte_level(_byte_level(_split(KIMI_SPLIT)), ["[BOS]", "[EOS]", "<|im_end|>"], ["<think>"])


def _pieces(special: list[str]) -> list[str]:
    """Return the pieces of a small SentencePiece model: special tokens, bytes, then pieces by score."""
    trained = RustTokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    trained.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=500, show_progress=False))
    vocab: dict[str, int] = json.loads(trained.to_str())["model"]["vocab"]
    by_id = sorted(vocab, key=vocab.__getitem__)
    joined = [piece for piece in by_id if len(piece) > 1 and " " not in piece]
    letters = [piece for piece in by_id if len(piece) == 1 and piece != " "]
    return [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *joined, *letters]


def _scores(pieces: list[str], num_special: int) -> list[float]:
    """Return scores as SentencePiece has them: 0 for all that is not learnt, and the rank of a merge."""
    learnt = range(num_special + 256, len(pieces))
    return [float(-(i - learnt.start)) if i in learnt else 0.0 for i in range(len(pieces))]


def _byte_fallback(pieces: list[str], scores: list[float] | None, special: list[Any]) -> RustTokenizer:
    vocab = {piece: i for i, piece in enumerate(pieces)}
    order = {piece: -float(i) if scores is None else scores[i] for piece, i in vocab.items()}
    merges = generate_merges(vocab, order)
    model = models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = RustTokenizer(model)
    tokenizer.add_special_tokens(special)
    return tokenizer


SPM_SPECIAL, PHI3_ADDED = ["<unk>", "<s>", "</s>"], ["<|endoftext|>", "<|user|>", "<|end|>"]
GEMMA_SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
GEMMA4_SPECIAL, GEMMA4_CALL = ["<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>"], "<|tool_call>"
_LLAMA_NORMALIZER = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
_LLAMA_DECODER = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]


def _llama2() -> RustTokenizer:
    pieces = _pieces(SPM_SPECIAL)
    special = [AddedToken(token, normalized=False, special=True) for token in SPM_SPECIAL]
    tokenizer = _byte_fallback(pieces, _scores(pieces, 3), special)
    tokenizer.normalizer = normalizers.Sequence(_LLAMA_NORMALIZER)
    tokenizer.decoder = decoders.Sequence(_LLAMA_DECODER)
    return _begin_with(tokenizer, "<s>")


def _phi3() -> RustTokenizer:
    pieces = [*_pieces(SPM_SPECIAL), *PHI3_ADDED]
    scores = [*_scores(pieces[:-3], 3), -1000.0, -1000.0, -1000.0]
    plain = ("<unk>", "<s>", "<|endoftext|>")
    special = [
        AddedToken(token, normalized=False, special=True, rstrip=token not in plain)
        for token in (*SPM_SPECIAL, *PHI3_ADDED)
    ]
    tokenizer = _byte_fallback(pieces, scores, special)
    tokenizer.normalizer = normalizers.Sequence(_LLAMA_NORMALIZER)
    tokenizer.decoder = decoders.Sequence(_LLAMA_DECODER)
    return tokenizer


def _gemma() -> RustTokenizer:
    special = [AddedToken(token, normalized=False, special=True) for token in GEMMA_SPECIAL]
    runs = ["▁▁", "▁▁▁"]
    pieces = _pieces(GEMMA_SPECIAL)
    pieces = [*pieces[: 6 + 256], *runs, *(piece for piece in pieces[6 + 256 :] if piece not in runs)]
    tokenizer = _byte_fallback(pieces, None, special)
    tokenizer.add_tokens([AddedToken(run, normalized=False, special=False) for run in runs])
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(_LLAMA_DECODER[:3])
    return _begin_with(tokenizer, "<bos>")


def _gemma4() -> RustTokenizer:
    special = [AddedToken(token, normalized=False, special=True) for token in GEMMA4_SPECIAL]
    tokenizer = _byte_fallback([*_pieces(GEMMA4_SPECIAL), GEMMA4_CALL], None, special)
    tokenizer.add_tokens([AddedToken(GEMMA4_CALL, normalized=False, special=False)])
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(_LLAMA_DECODER[:3])
    return _begin_with(tokenizer, "<bos>")


_GEMMA_NAMES = {"bos": "<bos>", "eos": "<eos>", "unk": "<unk>", "pad": "<pad>"}
# the tokenizer; llama.cpp's architecture, kind of tokenizer and of words; the names of special tokens
KINDS: dict[str, tuple[Callable[[], RustTokenizer], str, str, str, dict[str, str]]] = {
    "llama-bpe": (_llama3, "llama", "gpt2", "llama-bpe", {"bos": "<|begin_of_text|>", "eos": "<|eot_id|>"}),
    "qwen2": (_qwen2, "qwen3", "gpt2", "qwen2", {"eos": "<|im_end|>", "pad": "<|endoftext|>"}),
    "gpt-4o": (_gpt_4o, "gpt-oss", "gpt2", "gpt-4o", {"bos": "<|startoftext|>", "eos": "<|return|>"}),
    "tekken": (_tekken, "llama", "gpt2", "tekken", {"bos": "<s>", "eos": "</s>"}),
    "gpt-2": (_gpt2, "phi3", "gpt2", "gpt-2", {"bos": "<|endoftext|>", "eos": "<|endoftext|>"}),
    "smollm": (_smollm, "llama", "gpt2", "smollm", {"bos": "<|im_start|>", "eos": "<|im_end|>"}),
    "command-r": (_command_r, "command-r", "gpt2", "command-r", {"bos": "<|im_start|>", "eos": "<|im_end|>"}),
    "glm4": (_glm4, "glm4moe", "gpt2", "glm4", {"eos": "<|endoftext|>", "pad": "<|endoftext|>"}),
    "deepseek-v3": (
        *(_deepseek3, "deepseek2", "gpt2", "deepseek-v3"),
        {"bos": "<|begin_of_sentence|>", "eos": "<|end_of_sentence|>"},
    ),
    "deepseek-llm": (
        *(_deepseek_llm, "deepseek2", "gpt2", "deepseek-llm"),
        {"bos": "<|begin_of_sentence|>", "eos": "<|end_of_sentence|>"},
    ),
    "deepseek-coder": (
        *(_deepseek_coder, "llama", "gpt2", "deepseek-coder"),
        {"bos": "<|begin_of_sentence|>", "eos": "<|end_of_sentence|>"},
    ),
    "kimi-k2": (_kimi, "deepseek2", "gpt2", "kimi-k2", {"bos": "[BOS]", "eos": "[EOS]"}),
    "minimax-m2": (_gpt_4o, "minimax-m2", "gpt2", "minimax-m2", {"bos": "<|startoftext|>", "eos": "<|return|>"}),
    "llama 2": (_llama2, "llama", "llama", "default", {"bos": "<s>", "eos": "</s>", "unk": "<unk>"}),
    "phi3": (_phi3, "phi3", "llama", "default", {"bos": "<s>", "eos": "<|endoftext|>", "unk": "<unk>"}),
    "gemma": (_gemma, "gemma3", "llama", "default", _GEMMA_NAMES),
    "gemma4": (_gemma4, "gemma4", "gemma4", "default", _GEMMA_NAMES),
}


def save_original(kind: str, path: Path) -> PreTrainedTokenizerFast:
    """Save the tokenizer as a Hugging Face checkpoint has it."""
    build, *_, names = KINDS[kind]
    named = {f"{name}_token": token for name, token in names.items()}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=build(), chat_template=TEMPLATE, **named)
    tokenizer.save_pretrained(path)
    return tokenizer


def write_gguf_of(kind: str, original: PreTrainedTokenizerFast, path: Path) -> None:
    """Write the tokenizer's metadata, and nothing else, as the converter does."""
    _, architecture, *_ = KINDS[kind]
    writer = gguf.GGUFWriter(path, architecture)
    add_tokenizer(writer, kind, original)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def add_tokenizer(writer: Any, kind: str, original: PreTrainedTokenizerFast) -> None:
    """Add a tokenizer to a file's metadata."""
    _, _, model, pre, names = KINDS[kind]
    texts = {token_id: token for token, token_id in original.get_vocab().items()}
    added = original.added_tokens_decoder
    tokens, types = [], []
    for token_id in range(len(texts) + NUM_PADDING):
        token = texts.get(token_id, f"[PAD{token_id}]")
        special = token_id in added and added[token_id].special
        if token_id not in texts:
            types.append(gguf.TokenType.UNUSED)
        elif special:
            types.append(gguf.TokenType.UNKNOWN if token == "<unk>" else gguf.TokenType.CONTROL)
        elif token_id in added:
            token = token.replace("▁", " ")
            types.append(gguf.TokenType.USER_DEFINED)
        elif model in ("llama", "gemma4") and token.startswith("<0x"):
            types.append(gguf.TokenType.BYTE)
        else:
            types.append(gguf.TokenType.NORMAL)
        tokens.append(token)
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    state = json.loads(original.backend_tokenizer.to_str())
    if model in ("gpt2", "gemma4"):
        writer.add_token_merges([" ".join(merge) for merge in state["model"]["merges"]])
    else:
        pieces = [*texts.values()]
        num_special = len(GEMMA_SPECIAL) if kind == "gemma" else 3
        learnt = len(pieces) - (len(PHI3_ADDED) if kind == "phi3" else 0)
        scores = _scores([texts[i] for i in range(learnt)], num_special)
        writer.add_token_scores([*scores, *[-1000.0] * (len(tokens) - learnt)])
        writer.add_add_space_prefix(kind != "gemma")
    if model == "gemma4":
        writer.add_add_space_prefix(False)
    writer.add_add_bos_token(bool(original.encode("")))
    for name, token in names.items():
        getattr(writer, f"add_{name}_token_id")(original.convert_tokens_to_ids(token))
    writer.add_chat_template(TEMPLATE)

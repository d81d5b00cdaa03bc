"""Trains the embedded demo model from the text in `corpus/` and writes it to `model/`.

usage: python -m demo.train [--out DIR] [--continue-from DIR --runs NAME ...]

Everything is seeded: the same versions of Python, torch and tokenizers on the same kind of CPU make the same model.
"""

from __future__ import annotations

import argparse
import copy
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from torch.nn import functional
from torch.utils.hooks import RemovableHandle
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from demo.augment import stdlib_paragraphs
from demo.conversations import FOLLOW_UP_TALKS, SINGLE_QUESTIONS, TALKS, ConversationMaker, Mix
from demo.corpus import Corpus, Message, load_corpus, training_phrasings
from demo.embeddings import bag_of_words_embeddings
from demo.tokenize_chat import (
    CONTEXT_LENGTH,
    END_OF_TEXT,
    IGNORED,
    IM_END,
    TRAINED_VOCAB_SIZE,
    Batch,
    ChatEncoder,
    train_tokenizer,
    with_numbers_and_markers,
)
from demo.tool_corpus import load_tool_corpus
from demo.tool_talks import ToolTalkMaker

MODEL_DIR = Path(__file__).parent / "model"
THREADS = 2
LAYERS = 4
WARMUP_STEPS, WEIGHT_DECAY, CLIP_NORM = 150, 0.1, 1.0
OPENING_TOKENS = 8  # enough to distinguish all answers
CONVERSATIONS_PER_POOL = 256  # sorted by length before batching, so that there is little padding
TOKENS_PER_BATCH = 1536
STEPS_PER_LINE = 100
STEPS_PER_CHECKPOINT = 250


def make_tokenizer(corpus: Corpus) -> PreTrainedTokenizerFast:
    """Train the tokenizer on the training text and on some English text of the standard library."""
    asked = [*corpus.questions, *corpus.small_talk]
    phrasings = [text for question in asked for text in training_phrasings(question, corpus.chat)]
    lowered = [text.lower() for text in phrasings]
    return train_tokenizer([*corpus.answers(), *phrasings, *lowered, *corpus.off_topic.ask, *stdlib_paragraphs()[:600]])


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """A randomly initialised Qwen3 of about 3.9 million parameters."""
    end, pad = tokenizer.convert_tokens_to_ids([IM_END, END_OF_TEXT])
    config = Qwen3Config(
        vocab_size=TRAINED_VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=CONTEXT_LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=pad,
        use_cache=True,
    )
    return Qwen3ForCausalLM(config)


@dataclass(frozen=True)
class Run:
    """The settings of one training run."""

    name: str
    steps: int
    peak_lr: float
    seed: int
    drills: float  # questions with only the beginning of their answer, per whole conversation
    mix: Mix
    tool_talks: float = 0.0  # conversations with tools, per whole conversation
    dropout: float = 0.1


# First distinguish the questions, mostly by drills; then hold conversations; then follow up on their subject; then call
# tools and think; last learn longer numbers, and repeat the rest at half the learning rate.
RUNS = (
    Run("questions", steps=3600, peak_lr=2e-3, seed=2026, drills=4.0, mix=SINGLE_QUESTIONS),
    Run("talks", steps=1500, peak_lr=1e-3, seed=2027, drills=1.0, mix=TALKS),
    Run("follow-ups", steps=1300, peak_lr=1e-3, seed=2028, drills=1.0, mix=FOLLOW_UP_TALKS),
    Run("tools", steps=5000, peak_lr=1e-3, seed=2029, drills=0.7, mix=TALKS, tool_talks=0.5, dropout=0.05),
    Run("numbers", steps=2400, peak_lr=6e-4, seed=2030, drills=1.5, mix=FOLLOW_UP_TALKS, tool_talks=0.4),
)


class Batches:
    """An endless, seeded series of padded batches of conversations of like length."""

    def __init__(self, corpus: Corpus, encoder: ChatEncoder, run: Run) -> None:
        self._run = run
        self._tool_maker = ToolTalkMaker(corpus, load_tool_corpus(), run.seed)
        self._maker = ConversationMaker(corpus, run.seed, run.mix)
        self._encoder = encoder
        self._rng = random.Random(run.seed)

    def __iter__(self) -> Iterator[Batch]:
        while True:
            chats = [self._maker.draw() for _ in range(CONVERSATIONS_PER_POOL)]
            drills = [self._maker.drill() for _ in range(round(self._run.drills * CONVERSATIONS_PER_POOL))]
            talks = [self._tool_maker.draw() for _ in range(round(self._run.tool_talks * CONVERSATIONS_PER_POOL))]
            encoded = self._encoder.encode(chats) + self._encoder.encode_openings(drills, OPENING_TOKENS)
            encoded += self._encoder.encode_tool_talks(talks) if talks else []
            groups = self._group(sorted(encoded, key=len))
            self._rng.shuffle(groups)
            yield from map(self._encoder.pad, groups)

    def _group(self, encoded: list[list[int]]) -> list[list[list[int]]]:
        groups: list[list[list[int]]] = [[]]
        for ids in encoded:
            if (len(groups[-1]) + 1) * len(ids) > TOKENS_PER_BATCH and groups[-1]:
                groups.append([])
            groups[-1].append(ids)
        return groups


def predictions(model: Qwen3ForCausalLM, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and labels of the tokens in the loss: [tokens, vocabulary] and [tokens]."""
    ids, labels = batch
    hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    counted = labels[:, 1:] != IGNORED
    return model.lm_head(hidden[counted]), labels[:, 1:][counted]


def known_by_heart(model: Qwen3ForCausalLM, encoder: ChatEncoder, chats: Sequence[list[Message]]) -> list[bool]:
    """For each chat, whether greedy decoding would give its answers word for word, end token included.

    Greedy decoding follows an answer while each of its tokens is the most likely one, so one forward pass suffices.
    """
    ids, labels = encoder.pad(encoder.encode(chats))
    with torch.no_grad():
        logits, wanted = predictions(model, (ids, labels))
    right: Iterator[bool] = iter((logits.argmax(-1) == wanted).tolist())
    tokens_per_chat = (labels[:, 1:] != IGNORED).sum(1).tolist()
    # A list, because all() stops at the first False and would leave the rest of this chat to the next one.
    return [all(list(islice(right, count))) for count in tokens_per_chat]


def learning_rate(step: int, run: Run) -> float:
    """Linear warm-up over the first steps, times a cosine that reaches zero with the last."""
    return run.peak_lr * min(1.0, (step + 1) / WARMUP_STEPS) * 0.5 * (1 + math.cos(math.pi * step / run.steps))


def make_optimizer(model: Qwen3ForCausalLM) -> torch.optim.AdamW:
    """AdamW that decays the matrices and leaves the norms alone."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    norms = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": norms, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)


def train_step(model: Qwen3ForCausalLM, optimizer: torch.optim.AdamW, batch: Batch, lr: float) -> float:
    """One update; returns the loss."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits, labels = predictions(model, batch)
    loss = functional.cross_entropy(logits.float(), labels)
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def add_dropout(model: Qwen3ForCausalLM, share: float) -> list[RemovableHandle]:
    """Drop parts of the embeddings and of what each layer adds, in training mode only; Qwen3 itself has no dropout."""
    parts = [model.model.embed_tokens]
    for layer in model.model.layers:
        parts += [layer.self_attn.o_proj, layer.mlp]
    return [
        part.register_forward_hook(lambda module, _, output: functional.dropout(output, share, module.training))
        for part in parts
    ]


def grow(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """Give the model the tokens that tools need, unless it has them; returns its tokenizer.

    The new embeddings are random and as long as the others, so that no two numbers resemble each other.
    """
    grown = with_numbers_and_markers(tokenizer)
    if len(grown) == len(tokenizer):
        return tokenizer
    old = model.model.embed_tokens.weight.detach().clone()
    model.resize_token_embeddings(len(grown), mean_resizing=False)
    with torch.no_grad():
        new = model.model.embed_tokens.weight[len(tokenizer) :]
        new.normal_(0.0, old.std().item())
    return grown


def train(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, corpus: Corpus, run: Run, folder: Path) -> None:
    """Do the updates of `run`, print the progress, and save the weights to `folder` now and then."""
    encoder = ChatEncoder(tokenizer)
    stream = iter(Batches(corpus, encoder, run))
    hooks = add_dropout(model, run.dropout)
    model.train()
    optimizer, log = make_optimizer(model), Log(time.perf_counter())
    watched = validation_chats(corpus)
    for step in range(run.steps):
        batch = next(stream)
        log.add(train_step(model, optimizer, batch, learning_rate(step, run)), batch)
        if (step + 1) % STEPS_PER_LINE == 0:
            model.eval()
            right = sum(known_by_heart(model, encoder, watched))
            model.train()
            log.line(f"{run.name} step {step + 1}/{run.steps} validation {right}/{len(watched)}")
        if (step + 1) % STEPS_PER_CHECKPOINT == 0:
            save(model, tokenizer, folder)
    for hook in hooks:
        hook.remove()


@dataclass
class Log:
    """Running totals of a training run."""

    start: float  # seconds, time.perf_counter()
    loss: float = 0.0  # sum since the last line
    tokens: int = 0

    def add(self, loss: float, batch: Batch) -> None:
        """Count one step."""
        self.loss += loss
        self.tokens += batch[0].numel()

    def line(self, head: str) -> None:
        """Print `head` with mean loss, speed, wall time and CPU time."""
        wall, cpu = time.perf_counter() - self.start, time.process_time()
        loss, self.loss = self.loss / STEPS_PER_LINE, 0.0
        print(f"{head} loss {loss:.4f} {self.tokens / wall:.0f} tokens/s wall {wall:.0f} s CPU {cpu:.0f} s", flush=True)


def validation_chats(corpus: Corpus) -> list[list[Message]]:
    """The phrasings that are monitored during training; the held-out ones are for the tests only."""
    asked = [(q.validation, q.answer) for q in corpus.questions if q.validation]
    return [[{"role": "user", "content": ask}, {"role": "assistant", "content": answer}] for ask, answer in asked]


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write weights in bfloat16, both configs and the tokenizer."""
    end, pad = tokenizer.convert_tokens_to_ids([IM_END, END_OF_TEXT])
    model = copy.deepcopy(model).to(torch.bfloat16)
    model.config.dtype = "bfloat16"
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=0.3, top_p=0.95, eos_token_id=[end, pad], pad_token_id=pad
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"), pretty=False)  # on one line instead of thousands


def start(corpus: Corpus, seed: int) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]:
    """A new model with trained embeddings and otherwise random weights, and its tokenizer."""
    tokenizer = make_tokenizer(corpus)
    model = make_model(tokenizer)
    embeddings = model.model.embed_tokens.weight
    vocab_size, hidden_size = embeddings.shape
    learnt = bag_of_words_embeddings(corpus, tokenizer, seed, vocab_size=vocab_size, hidden_size=hidden_size)
    with torch.no_grad():
        embeddings.copy_(learnt)
    return model, tokenizer


def main() -> None:
    """Train and save."""
    parser = argparse.ArgumentParser(description="Train the demo model.")
    parser.add_argument("--out", type=Path, default=MODEL_DIR)
    parser.add_argument("--continue-from", type=Path, help="a saved model after some of the runs")
    parser.add_argument("--runs", nargs="+", choices=[run.name for run in RUNS])
    chosen = parser.parse_args()
    torch.manual_seed(RUNS[0].seed)
    torch.set_num_threads(THREADS)
    corpus = load_corpus()
    if chosen.continue_from:
        model = Qwen3ForCausalLM.from_pretrained(chosen.continue_from, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(chosen.continue_from)
    else:
        model, tokenizer = start(corpus, RUNS[0].seed)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(corpus.questions)} questions", flush=True)
    for run in RUNS:
        if not chosen.runs or run.name in chosen.runs:
            if run.tool_talks:
                tokenizer = grow(model, tokenizer)
            train(model, tokenizer, corpus, run, chosen.out)
    save(model, tokenizer, chosen.out)


if __name__ == "__main__":
    main()

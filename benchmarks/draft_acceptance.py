"""How often a draft model's tokens are accepted: with the noise of the large model, and by rejection sampling.

    python -m benchmarks.draft_acceptance --out result.json

The large model is the demo model. Its draft models are itself in int8, and one of its four layers, distilled on the
conversations that the demo model was trained on. Answers to questions of the corpus are sampled by the engine, without
drafts, at several temperatures. Both models then compute the distributions p and q of every token of these answers,
from which the probabilities that a draft token is accepted follow:

- ``independent``: both draw with noise of their own, and the tokens are compared: the sum of p * q.
- ``same_noise``: both draw with the same Gumbel noise: the sum over tokens i of 1 / sum_j max(p_j / p_i, q_j / q_i).
- ``rejection``: q draws, and the token is accepted with probability min(1, p / q) (Leviathan et al., 2023): the sum of
  min(p, q). No way of comparing accepts more, but the answer then depends on the draft model.
- ``bound``: (1 - d) / (1 + d), with d = 1 - rejection, which the same noise reaches at least.

``measured`` is the share that the engine accepts of drafts of one token, and ``gained`` are the tokens that drafts of
four give beside the one of each step.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from benchmarks.checkpoints import keep_layers
from benchmarks.machine import describe
from benchmarks.result_file import write_result
from demo.conversations import ConversationMaker
from demo.corpus import load_corpus
from engine.llm import LLM
from engine.sampling_params import SamplingParams
from engine.scheduling.scheduler_output import SampledTokens, SchedulerOutput
from engine.sequence import Sequence

__all__ = ["Acceptance", "acceptance", "distil", "main"]

MODEL = Path(__file__).parents[1] / "demo" / "model"
TEMPERATURES = (0.0, 0.3, 0.7, 1.0)
CONVERSATIONS_PER_STEP, MOST_TOKENS = 8, 320
LEARNING_RATE = 2e-3


@dataclass(frozen=True)
class Acceptance:
    """Mean probabilities over the tokens of answers, and what the engine has counted."""

    draft: str
    temperature: float
    tokens: int
    measured: float
    gained: float
    independent: float | None = None  # None: the distributions of weights that the engine quantizes are not known
    same_noise: float | None = None
    rejection: float | None = None
    bound: float | None = None


def distil(directory: Path, num_layers: int, num_steps: int) -> None:
    """Write a draft model: the first layers of the demo model, trained to have its distributions."""
    keep_layers(MODEL, directory, num_layers)
    torch.manual_seed(0)
    teacher = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    student = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(MODEL, padding_side="right")
    talks = ConversationMaker(load_corpus(), seed=1)
    optimizer = torch.optim.AdamW(student.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=num_steps)
    started = perf_counter()
    for step in range(num_steps):
        texts = [
            tokenizer.apply_chat_template(talks.draw(), tokenize=False, enable_thinking=False)
            for _ in range(CONVERSATIONS_PER_STEP)
        ]
        batch = tokenizer(texts, return_tensors="pt", padding=True, truncation=True, max_length=MOST_TOKENS)
        batch.pop("token_type_ids", None)
        with torch.no_grad():
            target = teacher(**batch).logits.log_softmax(dim=2)
        mask = batch["attention_mask"].bool()
        logprobs = student(**batch).logits.log_softmax(dim=2)
        loss = functional.kl_div(logprobs[mask], target[mask], log_target=True, reduction="batchmean")
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        schedule.step()
        if step % 50 == 49:
            print(f"step {step + 1}: divergence {loss.item():.3f}, {perf_counter() - started:.0f} s", flush=True)
    student.to(torch.bfloat16).save_pretrained(directory)


def acceptance(p: torch.Tensor, q: torch.Tensor) -> tuple[float, float, float, float]:
    """Return the mean probabilities ``independent``, ``same_noise``, ``rejection`` and ``bound``.

    Args:
        p, q: distributions of the same tokens, float64 [n, vocab_size].
    """
    rejection = torch.minimum(p, q).sum(dim=1)
    same_noise = torch.stack(list(map(_same_noise, p, q)))
    bound = rejection / (2.0 - rejection)
    means = ((p * q).sum(dim=1), same_noise, rejection, bound)
    independent, same, rejected, least = (round(float(values.mean()), 4) for values in means)
    return independent, same, rejected, least


def _same_noise(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return the probability that two draws with the same Gumbel noise are equal: p and q are [vocab_size]."""
    either = ((p > 0) | (q > 0)).nonzero().flatten()
    both = ((p > 0) & (q > 0)).nonzero().flatten()
    at_p, at_q = p[both, None], q[both, None]
    return (1.0 / torch.maximum(p[either] / at_p, q[either] / at_q).sum(dim=1)).sum()


def _distributions(model: PreTrainedModel, prompt: list[int], answer: list[int], temperature: float) -> torch.Tensor:
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1].double()
    if not temperature:
        return functional.one_hot(logits.argmax(dim=1), logits.shape[1]).double()
    probabilities = (logits / temperature).softmax(dim=1)
    return torch.where(probabilities > 1e-7, probabilities, 0.0)  # rarer tokens take time and change nothing


class _Counter:
    """Counts what one engine drafts and accepts."""

    def __init__(self, llm: LLM) -> None:
        self.drafts = self.drafted = self.accepted = 0
        drafter = llm.engine.scheduler.drafter
        assert drafter is not None
        accept = drafter.accept

        def counting(output: SchedulerOutput, sampled: SampledTokens) -> list[Sequence]:
            ended = accept(output, sampled)
            self.drafts += len(output.num_accepted)
            self.drafted += output.num_draft_tokens
            self.accepted += sum(output.num_accepted.values())
            return ended

        drafter.accept = counting  # type: ignore[method-assign]


def _engine(speculation: dict[str, object] | None = None) -> LLM:
    sizes: dict[str, object] = {"max_model_len": 512, "kv_cache_memory": "64MiB", "max_num_seqs": 16}
    return LLM(
        str(MODEL), device="cpu", dtype="float32", max_decode_slowdown=None, speculative_config=speculation, **sizes
    )


def _measured(prompts: list[str], params: list[SamplingParams], draft: dict[str, object]) -> tuple[float, float]:
    """Return the share of accepted tokens of drafts of one token, and the accepted tokens of drafts of four."""
    results = []
    for length in (1, 4):
        llm = _engine(draft | {"method": "draft_model", "num_speculative_tokens": length})
        counter = _Counter(llm)
        llm.generate(prompts, params, use_tqdm=False)
        llm.engine.close()
        results.append(round(counter.accepted / (counter.drafted if length == 1 else counter.drafts), 4))
    return results[0], results[1]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600, help="of distillation")
    parser.add_argument("--questions", type=int, default=100)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument(
        "--draft", type=Path, help="a draft model that an earlier run has distilled, or where to keep it"
    )
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(arguments)
    with TemporaryDirectory() as folder:
        draft = args.draft or Path(folder)
        if not (draft / "config.json").exists():
            distil(draft, 1, args.steps)
        records = _compare(draft, args.questions, args.max_tokens)
    write_result(
        args.out, {"machine": describe(torch.device("cpu")), "records": [asdict(record) for record in records]}
    )


def _compare(draft: Path, num_questions: int, max_tokens: int) -> list[Acceptance]:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    prompts = _prompts(tokenizer, num_questions)
    plain, records = _engine(), list[Acceptance]()
    target = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    small = AutoModelForCausalLM.from_pretrained(draft, dtype=torch.float32).eval()
    for temperature in TEMPERATURES:
        params = [SamplingParams(temperature=temperature, seed=i, max_tokens=max_tokens) for i in range(len(prompts))]
        pairs = []
        for output in plain.generate(prompts, params, use_tqdm=False):
            tokens = output.prompt_token_ids, output.outputs[0].token_ids, temperature
            pairs.append((_distributions(target, *tokens), _distributions(small, *tokens)))
        p, q = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        drafts: dict[str, dict[str, object]] = {
            "one of four layers, distilled": {"model": str(draft)},
            "itself in int8": {"model": str(MODEL), "quantization": "int8"},
        }
        for name, options in drafts.items():
            measured, gained = _measured(prompts, params, options)
            record = Acceptance(name, temperature, len(p), measured, gained)
            if "quantization" not in options:
                independent, same, rejection, bound = acceptance(p, q)
                record = replace(record, independent=independent, same_noise=same, rejection=rejection, bound=bound)
            records.append(record)
            print(records[-1], flush=True)
    return records


def _prompts(tokenizer: PreTrainedTokenizerFast, count: int) -> list[str]:
    """Return questions of the corpus as prompts, the same ones each time."""
    questions = [phrasing for question in load_corpus().questions for phrasing in question.ask]
    asked = random.Random(0).sample(questions, count)
    return [
        str(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
            )
        )
        for text in asked
    ]


if __name__ == "__main__":
    main()

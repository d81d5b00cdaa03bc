"""lm-eval against our server gives what it should: the offline LLM's answers, and transformers' scores.

usage: python -m benchmarks.lm_eval_agreement --out benchmarks/results/lm_eval_agreement.json

Two tasks of items from the demo model's own text, in float32:

- `local-chat-completions` asks the questions, and each answer is compared with that of `LLM.chat`.
- `local-completions` scores four answers to a question, which needs the log-probabilities of an echoed prompt. The
  accuracy and each item's choice are compared with those of `--model hf`.

Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.result_file import write_result
from benchmarks.serving.server import ROOT, serve
from demo.corpus import Question, load_corpus
from engine.llm import LLM
from engine.sampling_params import SamplingParams

MODEL = ROOT / "demo" / "model"
NUM_ITEMS = 120
MAX_TOKENS = 128  # the longest answer has about 70
NUM_CHOICES = 4

Item = dict[str, Any]


def items(num_items: int) -> list[Item]:
    """Return questions, each with its answer among those of three others, in an order drawn with seed 0."""
    draw = random.Random(0)
    questions = draw.sample(load_corpus().questions, num_items)
    return [_item(question, questions, draw) for question in questions]


def _item(question: Question, others: Sequence[Question], draw: random.Random) -> Item:
    wrong = draw.sample([other.answer for other in others if other.answer != question.answer], NUM_CHOICES - 1)
    choices = draw.sample([question.answer, *wrong], NUM_CHOICES)
    asked = question.held_out or question.held_out_far or question.ask[-1]
    return {"question": asked, "choices": choices, "label": choices.index(question.answer)}


def tasks(path: Path) -> dict[str, Item]:
    """Return lm-eval's configuration of both tasks over a file of items."""
    source: Item = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(path)}}, "test_split": "test"}
    generation: Item = {
        "task": "pagoda_generate",
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{choices[label]}}",
        "generation_kwargs": {"until": [], "max_gen_toks": MAX_TOKENS, "temperature": 0, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    }
    choice: Item = {
        "task": "pagoda_choose",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_target": "label",
        "doc_to_choice": "choices",
        "target_delimiter": "\n",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }
    return {"generate": source | generation, "choose": source | choice}


def evaluate(task: Item, model: str, arguments: Item, *, is_chat: bool = False) -> Item:
    """Run one task with lm-eval; returns its results with the samples."""
    from lm_eval import simple_evaluate

    evaluated: Item = simple_evaluate(
        model=model,
        model_args=arguments,
        tasks=[task],
        apply_chat_template=is_chat,
        log_samples=True,
        bootstrap_iters=0,
    )
    samples = sorted(evaluated["samples"][task["task"]], key=lambda sample: int(sample["doc_id"]))
    return {"results": evaluated["results"][task["task"]], "samples": samples}


def offline_answers(asked: Sequence[Item]) -> list[str]:
    """Return the answers of the offline LLM."""
    llm = LLM(str(MODEL), dtype="float32", kv_cache_memory="64MiB")
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    chats = [[{"role": "user", "content": item["question"]}] for item in asked]
    return [output.outputs[0].text for output in llm.chat(chats, params, use_tqdm=False)]


def compare_answers(ours: Item, offline: Sequence[str]) -> Item:
    """Compare the answers to the questions."""
    texts = [sample["resps"][0][0] for sample in ours["samples"]]
    return {
        "items": len(texts),
        "same_answer": sum(text == other for text, other in zip(texts, offline, strict=True)),
        "exact_match": ours["results"]["exact_match,none"],
    }


def compare_choices(ours: Item, reference: Item) -> Item:
    """Compare the scores of the choices, which are log-probabilities of whole answers."""
    pairs = list(zip(scores(ours), scores(reference), strict=True))
    return {
        "items": len(pairs),
        "same_choice": sum(a.index(max(a)) == b.index(max(b)) for a, b in pairs),
        "largest_difference": max(abs(x - y) for a, b in pairs for x, y in zip(a, b, strict=True)),
        **{
            f"{metric}_{name}": run["results"][f"{metric},none"]
            for metric in ("acc", "acc_norm")
            for name, run in (("ours", ours), ("hf", reference))
        },
    }


def scores(run: Item) -> list[list[float]]:
    """Return the log-probability of each choice of each item."""
    return [[float(response[0][0]) for response in sample["resps"]] for sample in run["samples"]]


def _measure(num_items: int, directory: Path) -> Item:
    asked = items(num_items)
    path = directory / "items.jsonl"
    path.write_text("".join(json.dumps(item) + "\n" for item in asked))
    wanted = tasks(path)
    reference = evaluate(wanted["choose"], "hf", {"pretrained": str(MODEL), "dtype": "float32", "device": "cpu"})
    offline = offline_answers(asked)
    with serve(lambda args: args["engine"].update(dtype="float32"), engines=2) as server:
        common = {"model": "pagoda-demo", "num_concurrent": 8, "max_retries": 1}
        chat = {**common, "base_url": f"{server.url}/v1/chat/completions"}
        text = {
            **common,
            "base_url": f"{server.url}/v1/completions",
            "tokenizer": str(MODEL),
            "tokenizer_backend": "huggingface",
        }
        generated = evaluate(wanted["generate"], "local-chat-completions", chat, is_chat=True)
        chosen = evaluate(wanted["choose"], "local-completions", text)
    return {"generate": compare_answers(generated, offline), "choose": compare_choices(chosen, reference)}


def main() -> None:
    """Compare, print the figures, and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=NUM_ITEMS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.TemporaryDirectory() as directory:
        os.environ["HF_DATASETS_CACHE"] = directory
        agreement = _measure(options.items, Path(directory))
    print(json.dumps(agreement, indent=2))
    if options.out:
        write_result(options.out, agreement)


if __name__ == "__main__":
    main()

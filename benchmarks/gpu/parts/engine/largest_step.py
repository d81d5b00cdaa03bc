"""The largest steps of an engine whose KV cache has taken all memory that is left: none runs out of memory.

The warm-up has measured the memory that the largest step takes, and the cache got the rest. Here steps are as large as
the options allow, with every sampling parameter that takes memory.
"""

from __future__ import annotations

import random
from typing import Any

import torch

from benchmarks.gpu.engines import loaded, random_ids
from benchmarks.gpu.run.part_run import PartRun
from engine.llm import LLM
from engine.sampling_params import SamplingParams

__all__ = ["run"]

ANSWER = 6  # tokens
LONG_PROMPT_STEPS = 3  # that the long prompt fills beside decodes
EVERYTHING: dict[str, Any] = {  # that takes memory
    "temperature": 0.9,
    "top_p": 0.99,
    "min_p": 0.001,
    "repetition_penalty": 1.1,
    "frequency_penalty": 0.1,
    "presence_penalty": 0.1,
    "min_tokens": 2,
    "logit_bias": {11: 1.0},
    "bad_words_token_ids": ((12, 13, 14),),
}


def run(part: PartRun, model: str) -> None:
    """Run the steps, and compare the peak of memory with what ``gpu_memory_utilization`` allows."""
    max_num_seqs = part.sizes.decode_batches[-1]
    with loaded(part, model, max_num_seqs=max_num_seqs) as llm:
        part.record("blocks", llm.engine.info.num_blocks)
        if part.on_gpu:
            torch.cuda.reset_peak_memory_stats(part.device)
        for name, prompts, params in _workloads(llm):
            outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
            reasons = [answer.finish_reason for output in outputs for answer in output.outputs]
            if set(reasons) != {"length"}:
                part.fault(f"{name}: {sum(reason != 'length' for reason in reasons)} answers did not come to their end")
            part.record(name, {"answers": len(reasons), **_memory(part)})
        _judge(part, llm)


def _workloads(llm: LLM) -> list[tuple[str, list[list[int]], list[SamplingParams]]]:
    """Return the names, prompts and parameters of what runs one after the other."""
    rng, config, info = random.Random(0), llm.engine.config, llm.engine.info
    num_tokens, max_num_seqs = config.tokens_per_step, config.max_num_seqs
    everything = EVERYTHING | {"logprobs": config.max_logprobs, "max_tokens": ANSWER, "ignore_eos": True}
    longest = info.max_model_len - ANSWER

    def prompt(length: int) -> list[int]:
        return random_ids(rng, min(length, longest), info.vocab_size)

    # All prompts end in one step, which samples for all of them.
    together = [prompt(max(1, num_tokens // max_num_seqs)) for _ in range(max_num_seqs)]
    # Prompt chunks take what the decodes of all other sequences leave of a step.
    mixed = [*(prompt(1) for _ in range(max_num_seqs - 1)), prompt(LONG_PROMPT_STEPS * num_tokens)]
    alone = everything | {"prompt_logprobs": config.max_logprobs}
    return [
        ("all prompts in one step", together, [SamplingParams(**everything, seed=i) for i in range(max_num_seqs)]),
        ("decodes and a prompt", mixed, [SamplingParams(**everything, seed=i) for i in range(max_num_seqs)]),
        ("log-probabilities of a prompt", [prompt(num_tokens)], [SamplingParams(**alone)]),
    ]


def _memory(part: PartRun) -> dict[str, float]:
    """Return the peak of what torch has allocated, and what the GPU has in use, in GiB."""
    if not part.on_gpu:
        return {}
    free, total = torch.cuda.mem_get_info(part.device)
    return {
        "peak_allocated_gib": torch.cuda.max_memory_allocated(part.device) / 2**30,
        "used_gib": (total - free) / 2**30,
    }


def _judge(part: PartRun, llm: LLM) -> None:
    """Find a fault where the peak is more than the warm-up has measured: then the cache has taken too much."""
    if not part.on_gpu:
        return
    free, total = torch.cuda.mem_get_info(part.device)
    others = total - free - torch.cuda.memory_reserved(part.device)  # CUDA's context, other processes
    peak = others + torch.cuda.max_memory_allocated(part.device)
    share, allowed = peak / total, llm.config.gpu_memory_utilization
    part.record("share of memory", {"peak": share, "allowed": allowed})
    part.record("summary", [f"{share:.1%} of the GPU's memory at the peak, {allowed:.0%} allowed"])
    if share > allowed:
        part.fault(f"the largest step takes {share:.1%} of the GPU's memory, and {allowed:.0%} is allowed")

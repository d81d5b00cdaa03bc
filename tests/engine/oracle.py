"""What the tests against transformers share: small engines, what they did, and the oracle's own answers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
from transformers import PreTrainedModel

from engine.kv.attachments.attached_pages import AttachedPages
from engine.llm import LLM, RequestOutput
from engine.sampling_params import SamplingParams
from engine.scheduling.scheduler_output import SchedulerOutput
from engine.sequence import SequenceStatus
from tests.engine.shadow import check_integrity


def make_llm(path: str, **options: Any) -> LLM:
    """Return an engine whose batches depend on nothing that is measured.

    Its KV cache is small unless ``options`` say otherwise: what memory allows for a tiny model is a million blocks,
    which the checks of each step would walk. Quantised weights are dequantised, as the oracles have them: kept codes
    are multiplied with quantized activations.
    """
    fixed: dict[str, Any] = {"dtype": "float32", "device": "cpu", "skip_tokenizer_init": True}
    fixed |= {"max_decode_slowdown": None, "quantization": "dequantize"}
    if "num_blocks" not in options:
        fixed["kv_cache_memory"] = "4MiB"
    return LLM(path, **fixed | options)


def run(llm: LLM, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]) -> list[RequestOutput]:
    """Answer ``prompts``; afterwards nothing may be left of them."""
    many: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(many, params, use_tqdm=False)
    check_idle(llm)
    return outputs


def check_idle(llm: LLM) -> None:
    stats = llm.engine.meter.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_swapped, stats.num_used_blocks) == (0, 0, 0, 0)
    assert llm.engine.block_manager.host_pool.num_free == llm.engine.info.num_host_blocks
    for attached in llm.engine.block_manager.prefix_cache.attachments:
        assert isinstance(attached, AttachedPages)
        assert attached.pages.num_free == len(attached.pages.blocks)
        assert attached.store.num_free == len(attached.store.pages.blocks)
    llm.engine.block_manager.check_integrity([])


def answers(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    """Each request's answers, as token ids."""
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


class Activity:
    """Counts what an engine's scheduler does from now on, and checks the block manager before its steps.

    Args:
        llm: the engine.
        check_every: steps from one check, which walks all requests and blocks, to the next.
    """

    def __init__(self, llm: LLM, check_every: int = 1) -> None:
        self.num_recomputed = 0  # preemptions without a swap
        self.num_swapped_out = 0  # preemptions
        self.widest_swap = 0  # sequences of one request
        self.num_swapped_in = 0  # blocks
        self.num_pages_swapped_in = 0  # of windows
        self.num_states_swapped_in = 0
        self.has_windows, self.has_states = bool(llm.engine.info.windows), llm.engine.info.num_slots > 0
        self.num_copies = 0  # of blocks, on write
        self.swapped_beams = 0  # preemptions
        self.recomputed_beams = 0
        engine, schedule = llm.engine, llm.engine.scheduler.schedule

        num_steps = count()

        def counting() -> SchedulerOutput:
            if next(num_steps) % check_every == 0:
                check_integrity(engine)
            output = schedule()
            self._count(output)
            return output

        engine.scheduler.schedule = counting  # type: ignore[method-assign]

    def _count(self, output: SchedulerOutput) -> None:
        for group in output.preempted:
            if group.status is SequenceStatus.SWAPPED:
                self.num_swapped_out += 1
                self.swapped_beams += group.beams is not None
                self.widest_swap = max(self.widest_swap, len(group.unfinished))
            else:
                self.num_recomputed += 1
                self.recomputed_beams += group.beams is not None and group.is_forked
        self.num_swapped_in += len(output.block_copies.swap_in)
        self.num_pages_swapped_in += sum(len(copies.swap_in) for copies in output.window_copies)
        self.num_states_swapped_in += len(output.state_copies.swap_in)
        self.num_copies += len(output.block_copies.on_device)

    def check_swapped(self) -> None:
        """Assert that requests were swapped, and of each kind of page some came back."""
        assert self.num_swapped_out
        assert self.num_swapped_in
        assert bool(self.num_pages_swapped_in) == self.has_windows
        assert bool(self.num_states_swapped_in) == self.has_states

    def __repr__(self) -> str:
        return str(vars(self))


def random_tokens(rng: random.Random, count: int, vocab_size: int = 384) -> list[int]:
    return [rng.randrange(3, vocab_size) for _ in range(count)]


@contextmanager
def eos_ids(model: PreTrainedModel, token_ids: list[int]) -> Iterator[None]:
    """Let the oracle end at these ids instead of its own."""
    before = model.generation_config.eos_token_id
    model.generation_config.eos_token_id = token_ids or None
    try:
        yield
    finally:
        model.generation_config.eos_token_id = before


def oracle_beams(
    model: PreTrainedModel, prompt: list[int], params: SamplingParams, stop_ids: list[int]
) -> tuple[list[list[int]], list[float]]:
    """Return transformers' answers to a request for beams, the best first, and their log-probabilities."""
    ids = torch.tensor([prompt])
    options: dict[str, Any] = {"min_new_tokens": params.min_tokens} if params.min_tokens and stop_ids else {}
    if params.beam_width != 1:  # one beam is a greedy search there
        options |= {"length_penalty": params.length_penalty, "early_stopping": params.early_stopping}
    with eos_ids(model, stop_ids):
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            num_beams=params.beam_width,
            num_return_sequences=params.n,
            max_new_tokens=params.max_tokens,
            return_dict_in_generate=True,
            output_scores=True,
            **options,
        )
    tokens = []
    for row in output.sequences[:, len(prompt) :].tolist():
        end = next((i + 1 for i, token_id in enumerate(row) if token_id in stop_ids), len(row))
        tokens.append(row[:end])  # behind it is padding
    if params.beam_width == 1:
        logprobs = raw_logprobs(model, prompt + tokens[0])[len(prompt) - 1 : -1]
        return tokens, [float(logprobs.gather(1, torch.tensor(tokens[0])[:, None]).sum())]
    scores = output.sequences_scores.tolist()
    totals = [score * len(answer) ** params.length_penalty for score, answer in zip(scores, tokens, strict=True)]
    return tokens, totals


def raw_logprobs(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    """Return the oracle's log-probabilities of what follows each of ``token_ids``, [len(token_ids), vocab_size]."""
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits.float().log_softmax(dim=1)

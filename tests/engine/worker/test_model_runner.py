"""The model runner: what a step's plan makes of the KV cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.kv.page_copies import PageCopies
from engine.llm import LLM
from engine.request import EngineRequest
from engine.sampling.sampler import Sampler
from engine.sampling_params import SamplingParams
from engine.scheduling.scheduler_output import SampledTokens, SchedulerOutput, StepTimes
from engine.worker.model_runner import ModelRunner
from engine.worker.model_shard import PROMPT_LOGITS_AT_ONCE
from engine.worker.step_plan import StepPlan
from engine.worker.step_planner import StepPlanner
from engine.worker.warm_up import WarmUp
from tests.engine.conftest import SavedModel
from tests.engine.sampling.batches import make_sequence

NGRAM: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 3}


def test_a_step_without_tokens_still_copies_its_blocks(qwen3: SavedModel) -> None:
    """A request that is preempted when nothing else runs is swapped out by a step that computes nothing."""
    runner = ModelRunner(
        EngineConfig(model=qwen3.path, device="cpu", dtype="float32", num_blocks=8, block_size=4, swap_space_gib=0.001)
    )
    cache = runner.workers.local.kv_cache
    for key, value in cache.layers:
        key.normal_()
        value.normal_()
    before = cache.layers[0][0][2].clone()
    for copies in (PageCopies(swap_out=[(2, 1)]), PageCopies(swap_in=[(1, 5)], on_device=[(5, 6)])):
        assert runner.run(SchedulerOutput(block_copies=copies), StepTimes()).token_ids == []
    assert torch.equal(cache.layers[0][0][6], before)


def generate(engine: Engine, arrivals: dict[int, EngineRequest]) -> dict[str, tuple[list[int], list[int]]]:
    """Add requests before the steps with these numbers; return each one's tokens and ranks of its prompt's tokens."""
    by_setting: dict[str, tuple[list[int], list[int]]] = {}
    number = 0
    while engine.has_unfinished or number <= max(arrivals):
        if number in arrivals:
            engine.add_request(arrivals[number])
        for output in engine.step():
            token_ids, ranks = by_setting.setdefault(output.request_id, ([], []))
            token_ids += output.token_ids
            ranks += [
                next(iter(prompt_logprob.values())).rank
                for prompt_logprob in output.prompt_logprobs or ()
                if prompt_logprob
            ]
        number += 1
    return by_setting


def test_decodes_are_computed_before_a_prefill_of_higher_priority(
    qwen3: SavedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler's batch begins with the prefill; each sequence still gets its own logits."""
    plans: list[tuple[list[int], list[int]]] = []
    plan = StepPlanner.plan

    def note(planner: StepPlanner, output: SchedulerOutput) -> StepPlan:
        planned = plan(planner, output)
        plans.append((output.num_new_tokens, np.diff(planned.cu_seqlens_q).tolist()))
        assert np.diff(planned.cu_seqlens_q).tolist().count(1) == planned.num_decodes
        return planned

    monkeypatch.setattr(StepPlanner, "plan", note)
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_blocks": 64, "skip_tokenizer_init": True}
    requests = [
        EngineRequest(
            str(i),
            list(range(3 + i, 3 + i + length)),
            SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, prompt_logprobs=0, logprobs=0),
            priority=i,
        )
        for i, length in enumerate((5, 9, 40))
    ]
    llm = LLM(qwen3.path, max_num_batched_tokens=16, **options)
    together = generate(llm.engine, dict(enumerate(requests)))
    assert ([14, 1, 1], [1, 1, 14]) in plans
    alone = LLM(qwen3.path, enable_prefix_caching=False, **options).engine
    for request in requests:
        assert generate(alone, {0: request}) == {request.request_id: together[request.request_id]}


def test_a_step_that_was_interrupted_leaves_no_foreign_block_tables(
    qwen3: SavedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan of that step had the blocks that were appended, and its rank has not got them."""
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_blocks": 64, "block_size": 4}
    engine = LLM(qwen3.path, skip_tokenizer_init=True, **options).engine
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    requests = {i: EngineRequest(str(i), list(range(9 + i, 20 + i)), params) for i in range(2)}
    expected = generate(engine, requests)
    worker: Any = engine.runner.workers.local  # type: ignore[attr-defined]
    execute = worker.execute

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    counts: dict[str, list[int]] = {"0": [], "1": []}
    for request in requests.values():
        engine.add_request(request)
        for _ in range(7):
            # Between the scheduler's and the worker's part, so that the same step is planned again.
            output = engine.scheduler.schedule()
            monkeypatch.setattr(worker, "execute", interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.runner.run(output, StepTimes())
            monkeypatch.setattr(worker, "execute", execute)
            sampled = engine.runner.run(output, StepTimes())
            for sequence in engine.scheduler.update(output, sampled):
                counts[sequence.request_id].append(sequence.token_ids[-1])
    assert counts["0"] == expected["0"][0][:14]
    assert counts["1"] == expected["1"][0][:7]


def watch_logits(worker: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows by the number of rows whenever logits are computed."""
    sizes: list[int] = []
    compute = worker.shard.model.compute_logits
    monkeypatch.setattr(
        worker.shard.model, "compute_logits", lambda hidden, rows: sizes.append(len(rows)) or compute(hidden, rows)
    )
    return sizes


def test_the_logits_of_a_long_prompt_do_not_fill_the_memory(qwen3: SavedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows' at once, and what was derived from them, took 2.4 MiB a row at 152k tokens and ended the engine."""
    llm = LLM(qwen3.path, device="cpu", dtype="float32", num_blocks=64, skip_tokenizer_init=True)
    sizes = watch_logits(llm.engine.runner.workers.local, monkeypatch)  # type: ignore[attr-defined]
    prompts: Any = [{"prompt_token_ids": list(range(3, 3 + length))} for length in (150, 1, 80)]
    params = [SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=k) for k in (2, 20, 0)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert sizes == [64, 64, 64, 149 + 79 - 3 * 64, 3]
    for output, k in zip(outputs, (2, 20, 0), strict=True):
        positions = output.prompt_logprobs or []
        assert [next(iter(position)) for position in positions if position] == output.prompt_token_ids[1:]
        assert {len(position) for position in positions if position} <= {k, k + 1}
        assert positions[0] is None


def test_the_warm_up_measures_a_slice_of_prompt_logprobs(qwen3: SavedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(model=qwen3.path, device="cpu", dtype="float32", num_blocks=8, max_num_seqs=5)
    worker = ModelRunner(config).workers.local
    for name in ("reset_peak_memory_stats", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda device: None)
    sizes = watch_logits(worker, monkeypatch)
    reduced: list[int] = []
    monkeypatch.setattr(Sampler, "prompt_logprobs", lambda self, logits, *args: reduced.append(len(logits)))
    WarmUp(worker.shard).run_largest_step()
    assert sizes == [PROMPT_LOGITS_AT_ONCE, 5]
    assert reduced == [PROMPT_LOGITS_AT_ONCE]


@pytest.mark.parametrize(("max_num_batched_tokens", "num_rows"), [(2048, 5 * 4), (12, 12), (3, 3)])
def test_the_warm_up_measures_the_logits_after_drafts(
    qwen3: SavedModel, monkeypatch: pytest.MonkeyPatch, max_num_batched_tokens: int, num_rows: int
) -> None:
    config = EngineConfig(
        model=qwen3.path,
        device="cpu",
        dtype="float32",
        num_blocks=8,
        max_num_seqs=5,
        max_num_batched_tokens=max_num_batched_tokens,
        speculative_config=NGRAM,
        max_logprobs=-1,
    )
    worker = ModelRunner(config).workers.local
    for name in ("reset_peak_memory_stats", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda device: None)
    sizes = watch_logits(worker, monkeypatch)
    sampled: list[tuple[int, int]] = []
    monkeypatch.setattr(Sampler, "warm_up", lambda self, rows, max_logprobs: sampled.append((rows, max_logprobs)))
    WarmUp(worker.shard).run_largest_step()
    assert sizes == [min(PROMPT_LOGITS_AT_ONCE, max_num_batched_tokens), num_rows]
    assert sampled == [(num_rows, -1)]


def test_a_nan_after_a_draft_token_ends_the_draft_and_no_answer(
    qwen3: SavedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft ends before a NaN, and the token after it is computed again in the next step."""
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_blocks": 64, "skip_tokenizer_init": True}
    prompt: Any = {"prompt_token_ids": [7, 8, 9, 10] * 8}
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    expected = LLM(qwen3.path, **options).generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids
    llm = LLM(qwen3.path, speculative_config=NGRAM | {"prompt_lookup_min": 1}, **options)
    start, spoiled = Sampler.start, []

    def spoil(sampler: Sampler, logits: torch.Tensor, sequences: Any, *rest: Any) -> Any:
        if len(sequences) > 2:
            logits[2] = torch.nan
            spoiled.append(len(sequences))
        return start(sampler, logits, sequences, *rest)

    monkeypatch.setattr(Sampler, "start", spoil)
    assert llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids == expected
    assert spoiled


def test_the_tokens_after_a_draft_end_before_the_first_that_is_none() -> None:
    wants = [make_sequence(logprobs=1), make_sequence()]
    logprobs: list[Any] = [{9: 1}, None, {5: 2}, {6: 3}, None, None, None]
    # Of the sequences that sample, then after the drafts of two of them.
    sampled = SampledTokens([9, 8, 5, 6, 0, 7, 4], logprobs, failed={4: "no choice", 6: "no choice"})
    drafts = {wants[0]: [5, 6, 7], wants[1]: [1, 2]}
    sampled.take_after_drafts(drafts)
    assert sampled.after_drafts == {wants[0]: [5, 6], wants[1]: [7]}
    assert sampled.logprobs_after_drafts == {wants[0]: [{5: 2}, {6: 3}]}
    assert (sampled.token_ids, sampled.logprobs, sampled.failed) == ([9, 8], [{9: 1}, None], {})

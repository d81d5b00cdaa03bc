"""The engine's greedy tokens against transformers, judged by teacher forcing (token_model.py).

The tolerance is checked too: tokens of an engine with a planted fault must exceed it, and so must nearly all
second-best tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from benchmarks.gpu.backends import block_size_for, has_dtype, usable_backends
from benchmarks.gpu.engines import StepRecorder, generate, loaded
from benchmarks.gpu.inputs.token_model import MAX_TOKENS, Judge, Judgement, Kind, make_prompts, save_model
from benchmarks.gpu.run.part_run import PartRun
from engine.llm import LLM
from engine.worker.step_plan import ModelInput
from kernels.attention.base import AttentionBackend

__all__ = ["FAULTS", "STATE_FAULTS", "run"]

MAX_RUNNER_UPS = {"float32": 0.02, "bfloat16": 0.2}  # share of second-best tokens that may be tolerated
MAX_NOT_FIRST = {"float32": 0.01, "bfloat16": 0.05}  # share of tokens that rounding may change
LEAST_FOUND = 0.02  # share of the tokens after a planted fault that must be found wrong
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}


def run(part: PartRun, dtype: str, *, kind: Kind = "dense") -> None:
    """Judge the answers of each backend: with defaults, without CUDA graphs, with a small pool, and with drafts."""
    import torch

    model = f"tokens_{kind}_{dtype}"  # of this part alone: others may run at the same time
    save_model(part.work / model, kind)
    judge = Judge(part.work / model, dtype, part.device)
    prompts = make_prompts(*part.sizes.token_prompts)
    backends = [item for item in usable_backends(part) if has_dtype(item, getattr(torch, dtype))]
    if not backends:
        part.fault(f"no attention backend computes {dtype}")
    for backend in backends:
        options = {"dtype": dtype, "attention_backend": backend.name}
        for name, more in _cases(backend, max(map(len, prompts)) + MAX_TOKENS).items():
            with _engine(part, model, options | more) as llm:
                _check_case(part, f"{backend.name}, {name}", llm, judge, prompts)
        for name, plant in (FAULTS | (STATE_FAULTS if kind == "recurrent" else {})).items():
            # Eager, because a fault that is planted after the capture of CUDA graphs would change nothing.
            with _engine(part, model, options | {"enforce_eager": True}) as llm:
                _check_fault(part, f"{backend.name}, planted: {name}", llm, judge, prompts, plant)


def _engine(part: PartRun, model: str, options: dict[str, Any]) -> Any:
    memory = {} if "num_blocks" in options else {"kv_cache_memory": "64MiB"}
    return loaded(part, model, **({"enable_prefix_caching": True, "max_num_batched_tokens": 2048} | memory | options))


def _cases(backend: AttentionBackend, longest: int) -> dict[str, dict[str, Any]]:
    """Return engine options; the small pool hardly holds the longest request, so that sequences are preempted."""
    block_size = block_size_for(backend, 16)
    small = {"block_size": block_size, "num_blocks": -(-longest // block_size) + 2, "max_num_batched_tokens": 64}
    return {
        "default": {},
        "eager": {"enforce_eager": True},
        "small pool": small | {"kv_cache_memory": None},
        "drafts": {"speculative_config": DRAFTS},
    }


def _check_case(part: PartRun, name: str, llm: LLM, judge: Judge, prompts: list[list[int]]) -> None:
    recorder = StepRecorder()
    llm.engine.observers.members.append(recorder)
    outputs = generate(llm, prompts, [MAX_TOKENS] * len(prompts))
    judged = judge.judge(prompts, [output.outputs[0].token_ids for output in outputs])
    figures = asdict(judged) | {
        "cached_tokens": sum(output.num_cached_tokens for output in outputs),
        "draft_tokens": recorder.num_draft_tokens,
        "accepted_draft_tokens": recorder.num_accepted_tokens,
    }
    part.record(name, figures)
    if judged.above > 0:
        part.fault(f"{name}: {judged.shortfall:.2g} below the most likely token, tolerance {judged.tolerance:.2g}")
    if judged.not_first > MAX_NOT_FIRST[llm.config.dtype]:
        part.fault(f"{name}: {judged.not_first:.1%} of the tokens are not the most likely ones")
    if judged.runner_up_within > MAX_RUNNER_UPS[llm.config.dtype]:
        part.fault(f"{name}: the tolerance would accept {judged.runner_up_within:.0%} of the second-best tokens")
    if llm.config.speculative_config is not None and not recorder.num_accepted_tokens:
        part.fault(f"{name}: none of {recorder.num_draft_tokens} draft tokens was accepted, so none was tested")


def _check_fault(
    part: PartRun,
    name: str,
    llm: LLM,
    judge: Judge,
    prompts: list[list[int]],
    plant: Callable[[ModelInput], ModelInput],
) -> None:
    worker: Any = llm.engine.runner.workers.local  # type: ignore[attr-defined]
    forward = worker.shard.forward
    worker.shard.forward = lambda step, *more: forward(plant(step), *more)
    outputs = generate(llm, prompts, [MAX_TOKENS] * len(prompts))
    judged: Judgement = judge.judge(prompts, [output.outputs[0].token_ids for output in outputs])
    part.record(name, {"above": judged.above, "not_first": judged.not_first})
    if judged.above < LEAST_FOUND or judged.not_first <= MAX_NOT_FIRST[llm.config.dtype]:
        part.fault(f"{name}: only {judged.above:.1%} of the tokens are found wrong")


def _decode_positions_off_by_one(step: ModelInput) -> ModelInput:
    """Shift the decodes alone: a shift of all positions changes nothing with rotary embeddings."""
    bounds = step.metadata.cu_seqlens_q.long()
    positions = step.positions.clone()
    positions[bounds[:-1][bounds.diff() == 1]] += 1
    return replace(step, positions=positions)


def _first_blocks_swapped(step: ModelInput) -> ModelInput:
    """Let each sequence of a decode step read another one's first block."""
    tables = step.metadata.block_tables.clone()
    if step.metadata.max_query_len == 1:
        tables[:, 0] = tables[:, 0].roll(1)
    return replace(step, metadata=replace(step.metadata, block_tables=tables))


def _states_swapped(step: ModelInput) -> ModelInput:
    """Let each sequence of a decode step go on from another one's state."""
    recurrent = step.recurrent
    if recurrent is None or step.metadata.max_query_len > 1:
        return step
    return replace(step, recurrent=replace(recurrent, slots=recurrent.slots.roll(1)))


FAULTS: dict[str, Callable[[ModelInput], ModelInput]] = {
    "positions of decodes are off by one": _decode_positions_off_by_one,
    "a KV block of another sequence": _first_blocks_swapped,
}
STATE_FAULTS: dict[str, Callable[[ModelInput], ModelInput]] = {"a state of another sequence": _states_swapped}

"""Decoding with the drafts of a smaller model beside decoding without, in the same engine, at several acceptances."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from benchmarks.gpu.engines import loaded
from benchmarks.gpu.run.part_run import PartRun
from benchmarks.speculation import DRAFT_MODEL, measure

__all__ = ["run"]

DRAFT_TOKENS, REPEATS = 4, 2


def run(part: PartRun, model: str, draft: str) -> None:
    """Record the tokens per second of each number of streams and share of right draft tokens, with drafts and without.

    A share that an engine is told to plant is that of single tokens; see ``PlantedDraftModel``.
    """
    lines: list[str] = []
    streams, num_tokens = part.sizes.speculation
    config = {"method": "draft_model", "model": str(part.work / draft), "num_speculative_tokens": DRAFT_TOKENS}
    options: dict[str, Any] = {"max_decode_slowdown": 1.4}  # as a server has it, so that drafts must pay
    if part.on_gpu:
        options["kv_cache_memory"] = "8GiB"
    with loaded(part, model, max_num_seqs=max(streams), speculative_config=config, **options) as llm:
        engine = llm.engine
        assert engine.runner.draft_model is not None
        part.record("share_of_bytes", engine.runner.draft_model.share)
        for count in streams:
            measure(engine, "draft model 90%", count, num_tokens // 2, 1)  # so that the costs of steps are known
            for workload in DRAFT_MODEL:
                gain = measure(engine, workload, count, num_tokens, REPEATS)
                part.record(f"{count} streams, {workload}", asdict(gain))
                lines.append(
                    f"{count:3} streams, {workload}: {gain.off_tokens_per_s:7.0f} and {gain.on_tokens_per_s:7.0f} "
                    f"tokens/s, {gain.ratio:5.2f} x, {gain.accepted:5} of {gain.drafted:5} accepted, "
                    f"drafting {gain.draft_ms:5.2f} ms a step"
                )
                part.record("summary", lines)

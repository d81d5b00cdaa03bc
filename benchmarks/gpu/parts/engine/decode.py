"""Decode steps of one model at several batch sizes, beside the time to read its weights, keys and values."""

from __future__ import annotations

from benchmarks.gpu.engines import decoding, has_cache, loaded, timed_steps
from benchmarks.gpu.inputs.weight_formats import FORMATS
from benchmarks.gpu.run.part_run import PartRun
from benchmarks.gpu.timing.floors import decode_step
from benchmarks.limits.model_shape import WEIGHT_BYTES

__all__ = ["run"]


def run(part: PartRun, model: str, weights: str = "", kv_cache_dtype: str = "auto") -> None:
    """Record the time of a greedy decode step at each batch size, and the engine's own times of its phases.

    Args:
        weights: the format of the linear layers' weights.
        kv_cache_dtype: the engine's option.
    """
    sizes, limits, shape = part.sizes, part.limits, part.sizes.models[model]
    lines = []
    weight_bytes = FORMATS[weights].bytes_per_weight if weights else WEIGHT_BYTES
    options = {"max_num_seqs": max(sizes.decode_batches), "kv_cache_dtype": kv_cache_dtype}
    if not has_cache(part, kv_cache_dtype):
        return
    with loaded(part, f"{model}{weights}", **options) as llm:
        info = llm.engine.info
        part.record("attention_backend", info.attention_backend)
        part.record("kv_cache_tokens", info.num_blocks * info.block_size)
        for batch in sizes.decode_batches:
            with decoding(llm, batch, sizes.decode_context, steps=sizes.decode_steps + 3, seed=batch) as engine:
                seconds, recorder = timed_steps(part, engine, sizes.decode_steps)
            work = decode_step(shape, batch, sizes.decode_context, weight_bytes, kv_cache_dtype)
            figures = work.figures(seconds, limits)
            tokens_per_s = batch / seconds
            part.record(
                f"batch {batch}",
                figures | {"output_tokens_per_s": tokens_per_s, "engine_milliseconds": recorder.medians()},
            )
            lines.append(
                f"batch {batch:4} x {sizes.decode_context}: {1e3 * seconds:8.2f} ms, floor "
                f"{figures['floor_milliseconds']:6.2f}, {figures['share_of_limit']:4.0%}, {tokens_per_s:8.0f} tokens/s"
            )
            part.record("summary", lines)

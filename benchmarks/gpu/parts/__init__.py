"""The parts of the run, what shows that answers are right first, with the time that each takes on an H200.

A part is a function that takes a PartRun. This table imports none of them. The times include the start of the process,
some ten seconds with the engine, but not the compilation of kernels, a minute in all. So the parts are divided into
six calls of nine minutes; what no longer fits into one can be run again with ``--parts``.
"""

from __future__ import annotations

from collections.abc import Collection

from benchmarks.gpu.run.part import Part

__all__ = ["CALLS", "PARTS", "with_needs"]

_HERE = "benchmarks.gpu.parts"


def _part(name: str, target: str, expected_s: float, limit_s: float, needs: str = "", **arguments: object) -> Part:
    return Part(name, f"{_HERE}.{target}", expected_s, limit_s, tuple(needs.split()), arguments)


def _quantised(weights: str, model: str = "8b") -> dict[str, str]:
    return {"needs": f"limits checkpoint_{model}_{weights}", "model": model, "weights": weights}


def _memcheck(name: str, expected_s: float, limit_s: float, targets: str, **arguments: object) -> Part:
    functions = [f"{_HERE}.{target}" for target in targets.split()]
    return _part(name, "memcheck:run", expected_s, limit_s, "limits", targets=functions, arguments=arguments)


CORRECTNESS: tuple[Part, ...] = (
    #     name                    function                seconds, limit, needs, arguments
    _part("limits",               "machine:run",                      12, 120),
    _part("store_kvcache",        "kernels.store_kvcache:run",         8,  45),
    _part("attention",            "kernels.attention:serving_shapes", 20, 130),
    _part("tokens_bfloat16",      "engine.tokens:run",                27, 100, dtype="bfloat16"),
    _part("cuda_graphs",          "kernels.cuda_graphs:run",          15,  60),
    _part("odd_attention",        "kernels.attention:odd_shapes",     90, 180),
    _part("experts",              "kernels.experts:run",              15,  80, "limits"),
    _part("tokens_experts",       "engine.tokens:run",                31, 100, dtype="bfloat16", kind="experts"),
    _part("recurrent",            "kernels.recurrent:run",            16,  90, "limits"),
    _part("tokens_recurrent",     "engine.tokens:run",                31, 110, dtype="bfloat16", kind="recurrent"),
    _part("latent",               "kernels.latent:run",               30, 100, "limits"),
    _part("tokens_float32",       "engine.tokens:run",                20,  90, dtype="float32"),
    _part("sampling",             "kernels.sampling:run",             38,  90, "limits"),
    _part("linear_speed",         "kernels.linear_speed:run",          8,  60, "limits"),
    _part("coded",                "kernels.coded:run",                60, 150, "limits"),
    _part("coded_experts",        "kernels.coded_experts:run",        40, 120, "limits"),
)  # fmt: skip
FIGURES: tuple[Part, ...] = (
    _part("checkpoint_0.6b",      "checkpoint:run",                    6,  60, model="0.6b"),
    _part("decode_0.6b",          "engine.decode:run",                15,  80, "limits checkpoint_0.6b", model="0.6b"),
    _part("checkpoint_8b",        "checkpoint:run",                   20,  90, model="8b"),
    _part("decode_8b",            "engine.decode:run",                27, 100, "limits checkpoint_8b", model="8b"),
    _part("arrivals_8b",          "engine.arrivals:run",              40,  80, "checkpoint_8b", model="8b"),
    _part("prefill_8b",           "engine.prefill:run",               27,  80, "limits checkpoint_8b", model="8b"),
    _part("offline_0.6b",         "engine.offline:run",               30, 100, "limits checkpoint_0.6b", model="0.6b"),
    _part("transformers_0.6b",    "engine.transformers_peer:run",     40,  90, "checkpoint_0.6b", model="0.6b"),
    _part("arrivals_0.6b",        "engine.arrivals:run",              25,  80, "checkpoint_0.6b", model="0.6b"),
    _part("prefill_0.6b",         "engine.prefill:run",               12,  50, "limits checkpoint_0.6b", model="0.6b"),
    _part("step_time_0.6b",       "engine.step_time:run",             20,  80, "checkpoint_0.6b", model="0.6b"),
    _part("step_time_8b",         "engine.step_time:run",             30,  80, "checkpoint_8b", model="8b"),
    _part("attention_speed",      "kernels.attention_speed:run",      26,  90, "limits"),
    _part("expanded",             "kernels.expanded:run",             30, 100, "limits"),
    _part("checkpoint_moe",       "checkpoint:run",                    9,  60, model="moe"),
    _part("decode_moe",           "engine.decode:run",                20,  80, "limits checkpoint_moe", model="moe"),
    _part("options_0.6b",         "engine.options:run",               48, 100, "checkpoint_0.6b", model="0.6b"),
    _part("step_time_moe",        "engine.step_time:run",             20,  80, "checkpoint_moe", model="moe"),
)  # fmt: skip
FORMATS: tuple[Part, ...] = (  # of the weights, or of keys and values; and drafts
    _part("decode_8b_fp8kv",      "engine.decode:run",                25, 100, "limits checkpoint_8b", model="8b",
          kv_cache_dtype="fp8"),
    _part("checkpoint_8b_int4",   "checkpoint:run",                   12,  60, model="8b", weights="int4"),
    _part("decode_8b_int4",       "engine.decode:run",                25, 100, **_quantised("int4")),
    _part("prefill_8b_int4",      "engine.prefill:run",               25, 100, **_quantised("int4")),
    _part("checkpoint_8b_fp8",    "checkpoint:run",                   14,  60, model="8b", weights="fp8"),
    _part("decode_8b_fp8",        "engine.decode:run",                25, 100, **_quantised("fp8")),
    _part("prefill_8b_fp8kv",     "engine.prefill:run",               25,  80, "limits checkpoint_8b", model="8b",
          kv_cache_dtype="fp8"),
    _part("checkpoint_moe_int4",  "checkpoint:run",                   12,  60, model="moe", weights="int4"),
    _part("decode_moe_int4",      "engine.decode:run",                25, 100, **_quantised("int4", "moe")),
    _part("prefill_moe_int4",     "engine.prefill:run",               25, 100, **_quantised("int4", "moe")),
    _part("speculation_8b",       "engine.speculation:run",           60, 120, "checkpoint_0.6b checkpoint_8b",
          model="8b", draft="0.6b"),
)  # fmt: skip
TUNING: tuple[Part, ...] = (
    _part("tune_prefill",         "tuning.tune:attention_of",         40, 120, kind="prefill"),
    _part("tune_decode",          "tuning.tune:attention_of",         80, 150, kind="decode"),
    _part("tune_prefill_fp8kv",   "tuning.tune:attention_of",         40, 120, kind="prefill", is_fp8=True),
    _part("tune_decode_fp8kv",    "tuning.tune:attention_of",         80, 150, kind="decode", is_fp8=True),
    _part("tune_experts",         "tuning.tune:experts_of",           25, 100, model="moe"),
    _part("tune_linears",         "tuning.tune:linears_of",           25, 100, models=["0.6b", "8b"]),
    _part("tune_coded",           "tuning.tune_coded:run",            60, 150),
    _part("tune_coded_experts",   "tuning.tune_coded_experts:run",    60, 150),
)  # fmt: skip
MEMORY: tuple[Part, ...] = (  # their times are those of an H200 on which other processes ran
    _part("largest_step_0.6b",    "engine.largest_step:run",          25,  80, "checkpoint_0.6b", model="0.6b"),
    _part("largest_step_8b",      "engine.largest_step:run",          45, 120, "checkpoint_8b", model="8b"),
    _memcheck("memcheck_engine",    55, 150, "checkpoint:run engine.largest_step:run", model="0.6b"),
    _memcheck("memcheck_attention", 45, 150, "kernels.attention:serving_shapes kernels.cuda_graphs:run"),
    _memcheck("memcheck_cache",     40, 120, "kernels.store_kvcache:run kernels.latent:run"),
    _memcheck("memcheck_recurrent", 100, 250, "kernels.recurrent:run"),
    _memcheck("memcheck_sampling",  20,  90, "kernels.sampling:run"),
)  # fmt: skip
PRODUCTS: tuple[Part, ...] = (  # likewise; both took longer than their limits then
    _memcheck("memcheck_products", 150, 400, "kernels.experts:run kernels.coded_experts:run kernels.linear_speed:run"),
    _memcheck("memcheck_coded",    150, 400, "kernels.coded:run"),
)  # fmt: skip
CALLS = (CORRECTNESS, FIGURES, FORMATS, TUNING, MEMORY, PRODUCTS)
PARTS = tuple(part for call in CALLS for part in call)


def with_needs(names: list[str], passed: Collection[str] = ()) -> list[Part]:
    """Return the parts of these names and all that they need, in the table's order.

    Args:
        passed: parts of earlier calls, which need not run again for others.

    Raises:
        ValueError: for an unknown name.
    """
    known = {part.name: part for part in PARTS}
    wanted: set[str] = set()
    pending = list(names)
    while pending:
        name = pending.pop()
        if name not in known:
            raise ValueError(f"'{name}' is not a part; choose from {', '.join(known)}")
        wanted.add(name)
        pending += set(known[name].needs) - wanted - set(passed)
    return [part for part in PARTS if part.name in wanted]

"""The C library's structures and functions as ctypes declares them. No other module imports ctypes for the kernels.

`load` sets the argument types of every function once. Callers pass Python numbers, `tensor.data_ptr()`, None for NULL,
and structures themselves where C takes a pointer to one. csrc/*.h document the functions.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

__all__ = [
    "CAltUp",
    "CAttentionCall",
    "CCodeFormat",
    "CCodedPanels",
    "CCodesByInputs",
    "CConvCall",
    "CDeltaRuleCall",
    "CExperts",
    "CGroupedCodes",
    "CIndexer",
    "CLatent",
    "CLayer",
    "CLayerCache",
    "CLimits",
    "CRecurrentLayer",
    "CRows",
    "CScanCall",
    "CSequences",
    "CStep",
    "CStoredCodes",
    "CStoredFactors",
    "CWeight",
    "Library",
    "address",
    "load",
    "pointers",
]

Library = ctypes.CDLL

_POINTER, _FLOAT = ctypes.c_void_p, ctypes.c_float
_INT32, _INT64 = ctypes.c_int32, ctypes.c_int64


def _fields(kind: type[Any], *names: str) -> tuple[tuple[str, type[Any]], ...]:
    return tuple((name, kind) for name in names)


class CCodeFormat(ctypes.Structure):
    """``pagoda_code_format``."""

    _fields_ = (
        *_fields(_INT32, "bits", "granule", "granules_per_outer", "outer_type"),
        *_fields(_INT32, "has_inner", "zero_kind", "has_levels", "floats"),
        ("zero", _FLOAT),
        ("levels", ctypes.c_uint8 * 16),
    )


class CStoredFactors(ctypes.Structure):
    """``pagoda_stored_factors``."""

    _fields_ = (("first", _POINTER), *_fields(_INT64, "stride", "count"))


class CStoredCodes(ctypes.Structure):
    """``pagoda_stored_codes``."""

    _fields_ = (
        ("codes", _POINTER),
        *_fields(CStoredFactors, "outer_scales", "outer_minima", "zero_points", "inner_scales", "inner_minima"),
        ("scale_table", _POINTER),
        *_fields(_INT64, "row_bytes", "num_rows", "num_inputs", "in_features"),
        *_fields(_INT64, "first_output", "panel_step", "panel_offset"),
        ("layout", _INT32),
    )


class CCodedPanels(ctypes.Structure):
    """``pagoda_coded_panels``."""

    _fields_ = (("start", _INT64), ("format", ctypes.POINTER(CCodeFormat)))


class CWeight(ctypes.Structure):
    """``pagoda_weight``."""

    _fields_ = (
        *_fields(_POINTER, "words", "scales", "sums", "bias", "coded", "order"),
        *_fields(_INT32, "kind", "in_features", "out_features"),
    )


class CRows(ctypes.Structure):
    """``pagoda_rows``."""

    _fields_ = (*_fields(_POINTER, "words", "scales"), ("num_rows", _INT32))


class CAttentionCall(ctypes.Structure):
    """``pagoda_attention_call``."""

    _fields_ = (
        *_fields(_POINTER, "output", "query", "key_cache", "value_cache", "cu_seqlens_q", "seq_lens", "block_tables"),
        *_fields(_INT32, "num_seqs", "max_blocks", "num_heads", "num_kv_heads", "head_dim", "value_dim"),
        *_fields(_INT32, "block_size", "sliding_window", "chunk", "right", "is_bf16"),
        *_fields(_FLOAT, "scale", "softcap"),
    )


class CExperts(ctypes.Structure):
    """``pagoda_experts``."""

    _fields_ = (
        *_fields(CWeight, "router", "gate_up", "down", "shared_gate_up", "shared_down", "latent_in", "latent_out"),
        *_fields(_POINTER, "router_norm", "expert_scales", "choice_bias"),
        *_fields(_INT32, "num_experts", "top_k", "hidden_size", "intermediate_size", "normalizes_weights"),
        *_fields(_INT32, "is_sigmoid", "activation", "num_groups", "top_groups", "groups_sum_two", "gates_shared"),
        ("scales_inputs", _INT32),
        *_fields(_FLOAT, "epsilon", "weight_scale"),
    )


class CSequences(ctypes.Structure):
    """``pagoda_sequences``."""

    _fields_ = (
        *_fields(_POINTER, "cu_seqlens", "slots", "starts", "save_tokens", "save_slots"),
        *_fields(_INT32, "num_seqs", "num_saves"),
    )


_SEQUENCES = ctypes.POINTER(CSequences)


class CConvCall(ctypes.Structure):
    """``pagoda_conv_call``."""

    _fields_ = (
        *_fields(_SEQUENCES, "sequences"),
        *_fields(_POINTER, "inputs", "weight", "bias", "state"),
        *_fields(_INT64, "stride"),
        *_fields(_INT32, "num_tokens", "channels", "width", "has_silu"),
    )


class CDeltaRuleCall(ctypes.Structure):
    """``pagoda_delta_rule_call``."""

    _fields_ = (
        *_fields(_SEQUENCES, "sequences"),
        *_fields(_POINTER, "output", "mixed", "decay", "beta", "state"),
        *_fields(_INT64, "stride", "decay_stride", "beta_stride"),
        *_fields(_INT32, "num_tokens", "num_key_heads", "num_heads", "key_dim", "value_dim", "decays_rows"),
    )


class CScanCall(ctypes.Structure):
    """``pagoda_scan_call``."""

    _fields_ = (
        *_fields(_SEQUENCES, "sequences"),
        *_fields(_POINTER, "output", "mixed", "steps", "decay", "skip", "state"),
        *_fields(_INT64, "stride", "step_stride"),
        *_fields(_INT32, "num_heads", "num_groups", "head_dim", "state_size"),
    )


class CRecurrentLayer(ctypes.Structure):
    """``pagoda_recurrent_layer``."""

    _fields_ = (
        *_fields(CWeight, "input", "output", "steps", "gates"),
        *_fields(_POINTER, "conv_weight", "conv_bias", "step_bias", "decay", "skip", "norm"),
        *_fields(_INT32, "kind", "conv_width", "num_heads", "num_groups", "head_dim", "state_size"),
        *_fields(_INT32, "norm_group", "gates_first", "has_sigmoid"),
        *_fields(_FLOAT, "eps", "smallest_step", "largest_step", "largest_beta"),
    )


class CGroupedCodes(ctypes.Structure):
    """``pagoda_grouped_codes``."""

    _fields_ = (
        *_fields(_POINTER, "output", "codes", "table", "scales", "scale_table", "zeros", "biases"),
        *_fields(_INT64, "num_rows", "columns", "num_groups", "group_size", "first", "code_stride"),
        *_fields(_INT32, "is_bf16", "has_nibbles", "is_high_first"),
    )


class CCodesByInputs(ctypes.Structure):
    """``pagoda_codes_by_inputs``."""

    _fields_ = (
        *_fields(_POINTER, "output", "words", "scales", "zeros"),
        *_fields(_INT64, "num_rows", "columns", "num_groups", "group_size", "stride"),
        *_fields(_INT32, "is_awq"),
    )


class CIndexer(ctypes.Structure):
    """``pagoda_indexer``."""

    _fields_ = (
        *_fields(CWeight, "query", "key", "head_weights"),
        *_fields(_POINTER, "key_norm", "key_bias"),
        *_fields(_INT32, "num_heads", "head_dim", "top_k"),
        *_fields(_FLOAT, "eps"),
    )


class CLatent(ctypes.Structure):
    """``pagoda_latent``."""

    _fields_ = (
        *_fields(CWeight, "query", "to_latents", "to_values"),
        *_fields(_POINTER, "query_norm", "latent_norm", "growth", "indexer"),
        *_fields(_INT32, "query_width", "rank", "nope_dim", "rope_dim", "value_dim"),
        *_fields(_FLOAT, "eps"),
    )


class CAltUp(ctypes.Structure):
    """``pagoda_altup``."""

    _fields_ = (
        *_fields(_POINTER, "router", "predictions", "corrections", "output_scale"),
        *_fields(_INT32, "num_streams", "active"),
        *_fields(_FLOAT, "eps"),
    )


class CLayer(ctypes.Structure):
    """``pagoda_layer``."""

    _fields_ = (
        *_fields(CWeight, "qkv", "output", "gate_up", "down", "own_gate", "own_projection"),
        *_fields(CWeight, "laurel_left", "laurel_right"),
        *_fields(_POINTER, "input_norm", "post_attention_norm", "attention_output_norm", "mlp_output_norm"),
        *_fields(_POINTER, "experts_norm", "dense_output_norm", "experts_output_norm"),
        *_fields(_POINTER, "own_output_norm", "laurel_norm", "query_norm", "key_norm", "rope", "growth", "experts"),
        *_fields(_POINTER, "latent", "recurrent", "altup"),
        *_fields(_INT32, "num_heads", "num_kv_heads", "head_dim", "gate_width", "hidden_size", "intermediate_size"),
        *_fields(_INT32, "num_gates", "own_width", "own_index"),
        *_fields(_INT32, "sliding_window", "chunk", "is_bf16", "norms_all_heads", "norms_values", "activation"),
        *_fields(_FLOAT, "eps", "scale", "softcap", "residual_multiplier", "gate_cutoff", "attention_output_scale"),
        *_fields(_FLOAT, "output_scale", "own_output_scale"),
    )


class CLayerCache(ctypes.Structure):
    """``pagoda_layer_cache``."""

    _fields_ = _fields(_POINTER, "keys", "values", "slot_mapping", "block_tables", "index_keys", "conv_state", "state")


class CLimits(ctypes.Structure):
    """``pagoda_limits``."""

    _fields_ = _fields(_POINTER, "top_k", "top_p", "floors")


class CStep(ctypes.Structure):
    """``pagoda_step``."""

    _fields_ = (
        *_fields(_POINTER, "hidden", "streams", "addend", "positions", "cu_seqlens_q", "seq_lens"),
        *_fields(_INT32, "num_tokens", "num_seqs", "max_blocks", "block_size", "most_chosen"),
        *_fields(_POINTER, "chosen", "num_chosen", "token_starts"),
        *_fields(_SEQUENCES, "sequences"),
        *_fields(_POINTER, "own_inputs", "mixer_input", "aux_layers", "aux_states"),
        ("num_aux", _INT32),
        *_fields(_POINTER, "words", "row_scales", "wide", "query", "attended", "mixed"),
    )


_CALL, _ROWS, _WEIGHT = ctypes.POINTER(CAttentionCall), ctypes.POINTER(CRows), ctypes.POINTER(CWeight)
_EXPERTS, _CACHE = ctypes.POINTER(CExperts), ctypes.POINTER(CLayerCache)
_LAYER, _STEP, _POINTERS = ctypes.POINTER(CLayer), ctypes.POINTER(CStep), ctypes.POINTER(_POINTER)

# Name: what it returns (None: nothing), and its arguments; in the order of csrc's headers.
FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "pagoda_add_dense_and_experts": (None, (_LAYER, _POINTER, _POINTER, _POINTER, _INT32)),
    "pagoda_add_own_input": (None, (_LAYER, _STEP)),
    "pagoda_add_to_residual": (None, (_POINTER, _POINTER, _INT32, _INT32, _POINTER, *(_FLOAT,) * 3)),
    "pagoda_all_finite": (_INT32, (_POINTER, _INT64, _INT32)),
    "pagoda_argmax": (None, (_POINTER, _POINTER, _POINTER, _INT64, _INT64, _INT64)),
    "pagoda_attention": (None, (_CALL,)),
    "pagoda_causal_conv": (None, (ctypes.POINTER(CConvCall),)),
    "pagoda_compute_experts": (None, (_EXPERTS, _POINTER, _POINTER, _INT32, _POINTER, _FLOAT, _FLOAT, _INT32)),
    "pagoda_decode_by_inputs": (_INT32, (ctypes.POINTER(CCodesByInputs),)),
    "pagoda_decode_turned": (
        _INT32,
        (_POINTER, _INT64, _POINTER, _POINTER, _INT64, _INT64, _POINTER, _POINTER),
    ),
    "pagoda_decode_gguf": (_INT32, (_POINTER, _POINTER, _INT64, _INT32, _INT32)),
    "pagoda_decode_groups": (None, (ctypes.POINTER(CGroupedCodes),)),
    "pagoda_draw": (None, (*(_POINTER,) * 6, _INT64, _INT64, _INT64)),
    "pagoda_gather_packed_rows": (_INT32, (_POINTER, _WEIGHT, _POINTER, _INT32, _FLOAT)),
    "pagoda_gather_rows": (_INT32, (_POINTER, _POINTER, _INT32, _INT64, _POINTER, _INT32, _INT32, _FLOAT)),
    "pagoda_gelu": (None, (_POINTER, _POINTER, _INT32, _INT64, _INT64)),
    "pagoda_gated_delta_rule": (None, (ctypes.POINTER(CDeltaRuleCall),)),
    "pagoda_gguf_is_finite": (_INT32, (_POINTER, _INT64, _INT32)),
    "pagoda_has_int8": (_INT32, ()),
    "pagoda_has_tiles": (_INT32, ()),
    "pagoda_largest_magnitude": (_INT32, (_POINTER, _INT64, _INT32)),
    "pagoda_largest_octet": (_INT32, (_POINTER, _INT64, _INT32)),
    "pagoda_layers": (None, (_POINTERS, _INT32, _STEP, _CACHE)),
    "pagoda_linear": (None, (_POINTER, _INT64, _ROWS, _WEIGHT, ctypes.c_int)),
    "pagoda_logits": (None, (_POINTER, _POINTER, _INT32, _POINTER, _FLOAT, _WEIGHT, _FLOAT, _POINTER, _POINTER)),
    "pagoda_match_rows": (None, (_POINTER, _POINTER, _INT32, _INT32)),
    "pagoda_mixer_half": (None, (_LAYER, _STEP, _CACHE)),
    "pagoda_mlp_half": (None, (_LAYER, _STEP)),
    "pagoda_num_words": (_INT32, (_INT32, _INT32)),
    "pagoda_pack_rows_for": (None, (_ROWS, _POINTER, _INT32, _WEIGHT, _POINTER, _FLOAT)),
    "pagoda_pack_weight": (None, (*(_POINTER,) * 4, *(_INT32,) * 7)),
    "pagoda_pack_stored": (None, (_POINTER, ctypes.POINTER(CCodeFormat), ctypes.POINTER(CStoredCodes))),
    "pagoda_panel_bytes": (_INT64, (ctypes.POINTER(CCodeFormat), _INT64)),
    "pagoda_prefault_free": (None, (_POINTER,)),
    "pagoda_prefault_new": (_POINTER, (_POINTERS, ctypes.POINTER(_INT64), _INT64, _INT64, _INT32)),
    "pagoda_prefault_num_ready": (_INT64, (_POINTER,)),
    "pagoda_prefault_want": (None, (_POINTER, _INT64)),
    "pagoda_quantize_codes": (None, (*(_POINTER,) * 3, _INT32, _INT64, _INT64, _INT32)),
    "pagoda_selective_scan": (None, (ctypes.POINTER(CScanCall),)),
    "pagoda_set_num_threads": (None, (ctypes.c_int,)),
    "pagoda_top_k": (None, (*(_POINTER,) * 3, *(_INT64,) * 4)),
    "pagoda_truncated_draw": (None, (*(_POINTER,) * 5, ctypes.POINTER(CLimits), *(_INT64,) * 3)),
    "pagoda_turn_awq": (None, (_POINTER, _POINTER, _INT64, _INT64, _INT64)),
    "pagoda_unpack_fields": (None, (_POINTER, _POINTER, *(_INT64,) * 4, _INT32, _INT32)),
    "pagoda_turn_halves": (None, (_POINTER, _INT64, _POINTER, _INT64, _INT64)),
    "pagoda_turn_words": (None, (_POINTER, _INT64, _POINTER, _INT64, _INT64, _INT64)),
}


def load(path: Path) -> Library:
    """Open the compiled library and declare its functions.

    Raises:
        OSError: if the file is damaged.
    """
    library = ctypes.CDLL(str(path))
    for name, (result, arguments) in FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def address(tensor: torch.Tensor | None) -> int | None:
    """Return where a tensor's elements begin, NULL for None; the tensor must outlive what reads them there."""
    return None if tensor is None else tensor.data_ptr()


def pointers(targets: Collection[torch.Tensor | CLayer]) -> ctypes.Array[ctypes.c_void_p]:
    """Return a C array of the addresses of tensors' elements or of structures, which must outlive it."""
    return (_POINTER * len(targets))(
        *(target.data_ptr() if isinstance(target, torch.Tensor) else ctypes.addressof(target) for target in targets)
    )

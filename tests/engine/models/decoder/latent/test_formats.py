"""Quantised weights of latent attention: each parameter is what the dequantised checkpoint gives, also by ranks.

The first projection has 40 or 48 rows, which blocks of 32 do not divide, as DeepSeek's 576 are 4.5 blocks of 128.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.engine.models.checkpoint.formats import test_fp8 as of_fp8
from tests.engine.models.checkpoint.formats.quantised import Encoded, save_quantised
from tests.engine.models.decoder.latent.latent_families import build_latent_model
from tests.engine.models.decoder.recurrent.test_formats import FORMATS as OTHER_FORMATS
from tests.engine.models.decoder.recurrent.test_formats import parameters

_CHOSEN = re.compile(r"layers\..*((?<!weights)_proj(_with_mqa)?|wq_b|wk)\.weight$")
_BLOCK = (32, 48)


def fp8_in_partial_blocks(_: str, weight: torch.Tensor) -> Encoded:
    """Return codes whose last blocks are smaller."""
    scales = of_fp8.block_maxima(weight, _BLOCK).bfloat16()
    codes, values = of_fp8.encode(weight, scales.float(), _BLOCK)
    return Encoded({"weight": codes, "weight_scale_inv": scales}, values)


FORMATS = OTHER_FORMATS | {"fp8 in partial blocks": (fp8_in_partial_blocks, of_fp8.fp8(weight_block_size=list(_BLOCK)))}
CASES = [(name, form) for name in ("deepseek-v3", "deepseek-v2-lite", "glm-4.7-flash", "glm-5.2") for form in FORMATS]
FEW = {("deepseek-v3", "fp8 in partial blocks"), ("deepseek-v3", "nvfp4"), ("deepseek-v2-lite", "int4 in groups")}
FEW |= {("glm-5.2", "fp8 in partial blocks"), ("glm-5.2", "nvfp4")}


@pytest.mark.parametrize(
    ("name", "form"), [case if case in FEW else pytest.param(*case, marks=pytest.mark.long) for case in CASES]
)
def test_parameters_are_those_of_the_dequantised_checkpoint(name: str, form: str, tmp_path: Path) -> None:
    encode, config = FORMATS[form]
    # NVFP4 needs multiples of 16
    model = build_latent_model(name, moe_intermediate_size=48, kv_lora_rank=32, q_lora_rank=32, v_head_dim=32)
    quantised = save_quantised(
        model, tmp_path, encode, config, chosen=lambda weight: _CHOSEN.search(weight) is not None
    )
    chosen = {weight.rpartition(".self_attn.")[2] for weight in quantised.values}
    assert {"kv_a_proj_with_mqa.weight", "kv_b_proj.weight", "o_proj.weight"} <= chosen
    assert ({"indexer.wq_b.weight", "indexer.wk.weight"} <= chosen) == (name == "glm-5.2")
    assert "indexer.weights_proj.weight" not in chosen
    for rank, size in ((0, 1), (0, 2), (1, 2)):
        expected = parameters(tmp_path / "plain", rank, size)
        computed = parameters(quantised.path, rank, size)
        assert computed.keys() == expected.keys()
        for weight, value in expected.items():
            assert torch.equal(computed[weight], value), weight

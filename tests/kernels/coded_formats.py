"""Formats of codes for property tests."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from kernels.coded_weight import CodeFormat
from tests.kernels.coded_matrices import LEVELS

__all__ = ["any_format"]


@st.composite
def any_format(draw: st.DrawFn) -> CodeFormat:
    """Draw a format that the kernels know, whether a checkpoint has it or not."""
    form = draw(
        st.builds(
            CodeFormat,
            bits=st.integers(2, 8),
            granule=st.sampled_from([16, 32]),
            granules_per_outer=st.sampled_from([1, 2, 4, 8, 16, 32, 48, 2**18]),
            outer_type=st.sampled_from(["float16", "bfloat16", "float32"]),
            has_inner=st.booleans(),
            zero_kind=st.sampled_from(["constant", "points", "minima"]),
            zero=st.just(5.0),
            has_output_scales=st.booleans(),
            has_input_order=st.booleans(),
        )
    )
    if form.bits == 8 and draw(st.booleans()):
        floats = draw(st.sampled_from(["e4m3", "e5m2"]))
        return replace(form, granule=32, has_inner=False, zero_kind="constant", zero=0.0, floats=floats)
    return replace(form, levels=LEVELS) if form.bits == 4 and draw(st.booleans()) else form

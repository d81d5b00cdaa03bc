"""The table of C functions against the headers: ctypes cannot check that a declaration fits its function."""

from __future__ import annotations

import re

import pytest

from kernels.cpu import bindings
from kernels.cpu.build import SOURCES

HEADERS = "\n".join(file.read_text() for file in sorted(SOURCES.rglob("*.h")))
STRUCTURES = {
    bindings.CWeight: "pagoda_weight",
    bindings.CRows: "pagoda_rows",
    bindings.CAttentionCall: "pagoda_attention_call",
    bindings.CExperts: "pagoda_experts",
    bindings.CSequences: "pagoda_sequences",
    bindings.CConvCall: "pagoda_conv_call",
    bindings.CDeltaRuleCall: "pagoda_delta_rule_call",
    bindings.CScanCall: "pagoda_scan_call",
    bindings.CGroupedCodes: "pagoda_grouped_codes",
    bindings.CRecurrentLayer: "pagoda_recurrent_layer",
    bindings.CLatent: "pagoda_latent",
    bindings.CLayer: "pagoda_layer",
    bindings.CLayerCache: "pagoda_layer_cache",
    bindings.CLimits: "pagoda_limits",
    bindings.CStep: "pagoda_step",
    bindings.CStoredCodes: "pagoda_stored_codes",
    bindings.CStoredFactors: "pagoda_stored_factors",
}


@pytest.mark.parametrize("name", bindings.FUNCTIONS)
def test_a_function_is_declared_with_the_headers_arguments(name: str) -> None:
    declared = re.search(rf"^(\w[\w ]*?\**) ?\**{name}\(([^)]*)\);", HEADERS, re.MULTILINE)
    assert declared is not None
    arguments = [part.strip() for part in declared[2].split(",") if part.strip() != "void"]
    result, types = bindings.FUNCTIONS[name]
    assert len(arguments) == len(types)
    assert (declared[1] == "void") == (result is None)
    for argument, kind in zip(arguments, types, strict=True):
        is_number = kind.__name__ in ("c_int", "c_long", "c_float")
        assert is_number != ("*" in argument), argument
        if is_number:
            assert c_name(kind) in argument or "epilogue" in argument, argument


def c_name(kind: type) -> str:
    return {"c_int": "int", "c_long": "int64_t", "c_float": "float"}[kind.__name__]


@pytest.mark.parametrize("structure", STRUCTURES, ids=STRUCTURES.values())
def test_a_structure_has_the_headers_fields_in_order(structure: type) -> None:
    body = re.search(rf"typedef struct {{([^}}]*)}} {STRUCTURES[structure]};", HEADERS)
    assert body is not None
    code = re.sub(r"/\*.*?\*/", "", body[1], flags=re.DOTALL)
    names = [re.findall(r"\w+", part)[-1] for line in code.split(";") if line.strip() for part in line.split(",")]
    assert [name for name, _ in structure._fields_] == names  # type: ignore[attr-defined]

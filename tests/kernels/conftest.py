"""Where the Triton kernels run: on the GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

if TYPE_CHECKING:
    from tests.kernels.interpreted_memory import Traffic

torch.set_num_threads(1)  # the tensors are tiny: more threads only wait for each other


def _speed_up_interpreter() -> None:
    """Leave out what Triton's interpreter does in vain, which takes most of the time of small kernels."""
    from triton import language
    from triton.runtime import interpreter

    # At each launch and each call of a device function it replaced the functions of triton.language by its own.
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": language, "core": language.core}))
    interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()  # has nothing to restore after a launch
    # It computed whether integers overflow, and without `debug` asserted nothing.
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)


def _correct_products_of_interpreter() -> None:
    """Make `tl.dot` multiply any float, and each row alike.

    The interpreter multiplied the bits of bfloat16 numbers as integers. And it left the sums to BLAS, which rounds a
    row's otherwise at another index of a tile; sums of float64 are rounded once.
    """
    from triton import language
    from triton.runtime import interpreter

    def as_float64(operand: Any) -> npt.NDArray[np.float64]:
        data = operand.data
        if operand.dtype.scalar == language.float8e4nv:
            codes = torch.from_numpy(np.ascontiguousarray(operand.data).view(np.uint8))
            return codes.view(torch.float8_e4m3fn).double().numpy()
        if operand.dtype.scalar == language.bfloat16:
            data = (data.astype(np.uint32) << 16).view(np.float32)
        return data.astype(np.float64)

    def create_dot(builder: Any, a: Any, b: Any, sums: Any, *precision: Any) -> Any:
        result = (as_float64(a) @ as_float64(b) + sums.data).astype(sums.data.dtype)
        return interpreter.TensorHandle(result, sums.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot


def _correct_roundings_of_interpreter() -> None:
    """Round float32 to the nearest bfloat16, as GPUs do; the interpreter rounded towards zero."""
    from triton import language
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def convert_float(values: Any, dtype: Any, to_dtype: Any, rounding: Any) -> npt.NDArray[Any]:
        if (dtype, to_dtype) != (language.float32, language.bfloat16):
            converted: npt.NDArray[Any] = convert(values, dtype, to_dtype, rounding)
            return converted
        bits = values.astype(np.float32).view(np.uint32)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # ties to even
        return np.where(np.isnan(values), 0x7FC0, nearest).astype(np.uint16)

    interpreter._convert_float = convert_float


IN_CI = 4  # cases of each function, so that a sweep of interpreted kernels costs minutes and not a quarter of an hour


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the first interpreted case of each function in `make test`, and in CI some that are spread over the rest."""
    functions = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and _runs_kernels(item) and not torch.cuda.is_available():
            functions[item.nodeid.partition("[")[0]].append(item)
    exhaustive = pytest.mark.exhaustive("the remaining combinations of parameters, in Triton's interpreter")
    for cases in functions.values():
        for case in set(cases) - set(cases[:: -(-len(cases) // IN_CI)]):
            case.add_marker(exhaustive)
        for case in cases[1:]:
            case.add_marker(pytest.mark.long)


def _runs_kernels(item: pytest.Function) -> bool:
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return "kernel_device" in item.fixturenames or "triton" in parameters


@pytest.fixture(scope="session")
def kernel_device() -> torch.device:
    """Return the device whose tensors a Triton kernel can be called with."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        return torch.device("cuda")
    _speed_up_interpreter()
    _correct_products_of_interpreter()
    _correct_roundings_of_interpreter()
    from tests.kernels.interpreted_memory import Bounds

    Bounds(pytest.MonkeyPatch())  # of every kernel from now on
    return torch.device("cpu")


@pytest.fixture
def traffic(kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Traffic:
    """Return what the test's kernels load and store from now on."""
    if kernel_device.type != "cpu":
        pytest.skip("only the interpreter shows addresses")
    from tests.kernels.interpreted_memory import Traffic

    return Traffic(monkeypatch)

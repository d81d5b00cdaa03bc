"""RecordingDevice: a GraphDevice on the CPU. A capture records torch's operators, and a replay runs nothing else.

Each replayed operator reads the tensors that the captured one read, by identity, and writes into those that it wrote.
So a replay sees what a CUDA graph would see: what has changed in Python since the capture has no effect on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["RecordingDevice", "poison"]

_INDEXING = {torch.ops.aten.index, torch.ops.aten.index_put_}
_WAITING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class _Operator(NamedTuple):
    function: Any
    args: Any
    kwargs: Any
    results: list[torch.Tensor]  # those that it made; views and what it changed in place are not


class RecordingDevice:
    """Captures on the CPU.

    Attributes:
        inputs: what the captures read and did not make: each tensor by the address of its memory.
        num_replays: of all graphs.
        is_capturing: whether operators are recorded now.
    """

    def __init__(self) -> None:
        self.inputs: dict[int, torch.Tensor] = {}
        self.num_replays = 0
        self.is_capturing = False
        self._results: dict[int, torch.Tensor] = {}
        self.num_bytes_used = 0

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        recorder = _Recorder(self.inputs, self._results)
        self.is_capturing = True
        try:
            with recorder:
                run()
        finally:
            self.is_capturing = False

        def replay() -> None:
            self.num_replays += 1
            for operator in recorder.operators:
                results = _tensors(operator.function(*operator.args, **operator.kwargs))
                for old, new in zip(operator.results, results, strict=False):
                    old.copy_(new)

        return replay

    def used_memory(self) -> int:
        return self.num_bytes_used

    def poison_all_but(self, kept: Iterable[torch.Tensor]) -> None:
        """Overwrite what the captures have read or made, except ``kept``, with what no step computes."""
        addresses = {_address(tensor) for tensor in kept}
        for address, tensor in (self.inputs | self._results).items():
            if address not in addresses:
                poison(tensor)


class _Recorder(TorchDispatchMode):
    def __init__(self, inputs: dict[int, torch.Tensor], results: dict[int, torch.Tensor]) -> None:
        super().__init__()
        self.operators: list[_Operator] = []
        self._inputs, self._results = inputs, results

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing here is compiled, and importing torch's compiler takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _waits(func, args):
            raise RuntimeError(f"{func} needs a value on the host, which a capture cannot wait for")
        read = _tensors((args, kwargs))
        for tensor in read:
            if _address(tensor) not in self._results:
                self._inputs.setdefault(_address(tensor), tensor)
        result = func(*args, **kwargs)
        addresses = {_address(tensor) for tensor in read}
        results = _tensors(result)
        if any(_address(result) in addresses for result in results):
            results = []
        self._results.update({_address(result): result for result in results})
        self.operators.append(_Operator(func, args, kwargs, results))
        return result


def _waits(function: Any, args: Any) -> bool:
    """Whether the host needs a value of a tensor: for a result, or for a shape."""
    if function.overloadpacket in _INDEXING:  # a mask is counted first
        return any(argument is not None and argument.dtype in (torch.bool, torch.uint8) for argument in args[1])
    return bool(_WAITING & set(function.tags))


def poison(tensor: torch.Tensor) -> None:
    """Fill all memory of a tensor with NaN, or with indices far outside every other tensor."""
    whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())  # type: ignore[call-overload]
    if tensor.dtype.is_floating_point:
        whole.fill_(torch.nan)
    else:
        whole.fill_(True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max // 3)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()

"""DeviceTensor: a tensor that is on a simulated GPU; the data is in host memory.

SimulatedGpu, a dispatch mode, sees every operator of its thread. It computes on the data, and

- refuses operators whose tensors are on different devices, as CUDA does, or that CUDA does not have;
- reports operators after which the host waits: those whose result's shape or value the host must know, and copies
  between the host and the device, unless they are asynchronous from or to pinned memory.

Tensors of the host are ordinary ones. A 0-dimensional one may meet those of a device, as in torch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NoReturn

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.gpu_rehearsal.code_lines import caller_line
from tests.gpu_rehearsal.host_memory import poison
from tests.gpu_rehearsal.machine import Capture, Machine

__all__ = ["DeviceTensor", "SimulatedGpu"]

aten = torch.ops.aten

# The host waits for the results of operators with these tags: for a value, or for a count that is a shape.
_WAITING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index}
_MATRIX_PRODUCTS = {aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten.matmul, aten.linear}
_NOT_DECOMPOSED = {aten.linear, aten.rms_norm, aten.matmul}  # they hide no wait, and decomposing takes time
_UNINITIALIZED = {aten.empty, aten.empty_like, aten.new_empty, aten.empty_strided, aten.new_empty_strided}


class DeviceTensor(torch.Tensor):
    """A tensor on a GPU.

    Attributes:
        data_on_host: an ordinary tensor with the data, of the same shape and strides.
    """

    data_on_host: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, data: torch.Tensor, device: torch.device) -> DeviceTensor:
        assert device.index is not None
        tensor: DeviceTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            data.size(),
            strides=data.stride(),
            storage_offset=data.storage_offset(),
            dtype=data.dtype,
            device=device,
        )
        tensor.data_on_host = data
        return tensor

    def __init__(self, *_: Any) -> None:
        pass

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} on a tensor of the simulated GPU, in a thread that SimulatedGpu does not watch")

    def __repr__(self, **_: Any) -> str:
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype}, {self.device})"

    # What torch refuses to do with subclasses, or does without an operator.

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, **_: Any) -> NoReturn:
        raise TypeError(f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() first")

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        self.numpy()

    def data_ptr(self) -> int:
        return self.data_on_host.data_ptr()

    def new_tensor(self, data: Any, *, dtype: Any = None, device: Any = None) -> torch.Tensor:
        return torch.tensor(data, dtype=dtype or self.dtype, device=device or self.device)

    def record_stream(self, stream: Any) -> None:
        pass

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(f"a tensor on {self.device} must not be pickled")


class SimulatedGpu(TorchDispatchMode):
    """The mode of one thread; all threads share the machine."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine = machine

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing here is compiled, and importing torch's compiler takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = _leaves((*args, *kwargs.values()))
        on_device = [leaf for leaf in leaves if isinstance(leaf, DeviceTensor)]
        names_cuda = any(isinstance(leaf, torch.device) and leaf.type == "cuda" for leaf in leaves)
        if not on_device and not names_cuda:
            return self._on_host(func, args, kwargs)
        if _is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        packet = func.overloadpacket
        if packet is aten._to_copy:
            return self._to_copy(*args, **kwargs)
        if packet is aten.copy_:
            return self._copy(*args, **kwargs)
        return self._on_device(func, args, kwargs, on_device, leaves)

    # --- operators ----------------------------------------------------------------------------------------------

    def _on_host(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        memory, packet = self.machine.host_memory, func.overloadpacket
        if packet is aten.is_pinned:
            return memory.is_pinned(args[0])
        if packet in (aten.pin_memory, aten._pin_memory) or kwargs.get("pin_memory"):
            self.machine.forbid_in_capture("an allocation of pinned memory")
        if packet in (aten.pin_memory, aten._pin_memory):
            return args[0] if memory.is_pinned(args[0]) else memory.pin(args[0].clone())
        if kwargs.get("pin_memory"):
            return memory.pin(func(*args, **{**kwargs, "pin_memory": False}))
        return func(*args, **kwargs)

    def _on_device(
        self, func: Any, args: Any, kwargs: dict[str, Any], on_device: list[DeviceTensor], leaves: list[Any]
    ) -> Any:
        packet = func.overloadpacket
        device = self._device(func, kwargs.get("device"), on_device)
        self._check_devices(func, device, leaves)
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        is_pinned = kwargs.pop("pin_memory", None) if "pin_memory" in kwargs else None
        data_args = [_mapped(_data, arg) for arg in args]
        data_kwargs = {name: _mapped(_data, item) for name, item in kwargs.items()}
        if device.type == "cuda":
            self._note_waits(func, device, args, kwargs)
            if not func.is_view and packet not in _UNINITIALIZED:
                self.machine.launch(device.index)
        try:
            result = func(*data_args, **data_kwargs)
        except Exception as error:
            error.add_note(f"in {func} at {caller_line()}")
            raise
        if packet in _UNINITIALIZED:
            poison(result)
        elif self.machine.captured is not None and not func.is_view:
            _record(self.machine.captured, lambda: func(*data_args, **data_kwargs), result, [data_args, data_kwargs])
        if device.type != "cuda":  # such as empty_like(tensor_on_gpu, device="cpu")
            return self.machine.host_memory.pin(result) if is_pinned else result
        outer = {id(leaf.data_on_host): leaf for leaf in on_device}  # what is changed in place stays the same object
        # A view of an ordinary tensor is ordinary in inference mode too.
        with torch.inference_mode(torch.is_inference_mode_enabled() and not (func.is_view and _is_ordinary(on_device))):
            return _mapped(lambda item: outer[id(item)] if id(item) in outer else _wrap(item, device), result)

    def _device(self, func: Any, named: Any, on_device: list[DeviceTensor]) -> torch.device:
        """Return the device of an operator's result."""
        if named is None:
            return on_device[0].device
        device = torch.device(named)
        return self._with_index(device)

    def _with_index(self, device: torch.device) -> torch.device:
        if device.type == "cuda" and device.index is None:
            return torch.device("cuda", self.machine.current_device)
        return device

    def _check_devices(self, func: Any, device: torch.device, leaves: list[Any]) -> None:
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        devices = {str(tensor.device) for tensor in tensors if tensor.dim() or isinstance(tensor, DeviceTensor)}
        if len(devices) > 1:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but {func} got {' and '.join(sorted(devices))} "
                f"at {caller_line()}"
            )
        if func.overloadpacket in _MATRIX_PRODUCTS and not tensors[0].dtype.is_floating_point:
            raise RuntimeError(f'"addmm_cuda" not implemented for {tensors[0].dtype} at {caller_line()}')

    def _note_waits(self, func: Any, device: torch.device, args: Any, kwargs: dict[str, Any]) -> None:
        packet = func.overloadpacket
        kind = func._opname if _WAITING & set(func.tags) else None
        if packet in _INDEXING:
            kind = _indexing_wait(args)
        elif kwargs.get("output_size") is not None:  # of repeat_interleave
            kind = None
        if kind is not None:
            self.machine.wait(kind, device.index)

    # --- copies -------------------------------------------------------------------------------------------------

    def _to_copy(self, source: torch.Tensor, *, device: Any = None, dtype: Any = None, **options: Any) -> torch.Tensor:
        target = self._with_index(torch.device(device)) if device is not None else source.device
        non_blocking = options.get("non_blocking", False)
        data = source.data_on_host if isinstance(source, DeviceTensor) else source
        result = torch.empty_like(data, dtype=dtype or source.dtype, memory_format=options.get("memory_format"))
        if target.type == "cuda":
            return self._copy(_wrap(result, target), source, non_blocking)
        if non_blocking or options.get("pin_memory"):
            self.machine.host_memory.pin(result)  # as torch does, so that the copy can be asynchronous
        return self._copy(result, source, non_blocking)

    def _copy(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if not target.numel():
            return target
        data = source.data_on_host if isinstance(source, DeviceTensor) else source
        if isinstance(target, DeviceTensor):
            self.machine.launch(target.device.index)
            if not isinstance(source, DeviceTensor):
                data = self._to_device(target, source, non_blocking)
            target.data_on_host.copy_(data)
            if self.machine.captured is not None:
                self.machine.captured.launches.append(lambda: target.data_on_host.copy_(data))
            return target
        assert isinstance(source, DeviceTensor)
        self._to_host(target, source, non_blocking)
        return target

    def _to_device(self, target: DeviceTensor, source: torch.Tensor, non_blocking: bool) -> torch.Tensor:
        """Return the data of a copy from the host.

        The host converts dtypes and strides into new memory, which is pageable: so does copy_kernel_cuda.
        """
        self.machine.forbid_in_capture("a copy from the host, whose memory a replay would read again")
        memory, device = self.machine.host_memory, target.device.index
        is_converted = source.dtype != target.dtype or source.shape != target.shape or not source.is_contiguous()
        if not memory.is_pinned(source):
            self.machine.wait("a copy from pageable memory to the device", device)
        elif is_converted:
            self.machine.wait("a copy that converts pinned memory on its way to the device", device)
        elif not non_blocking:
            self.machine.wait("a blocking copy to the device", device)
        else:
            return memory.read(device, source)
        return source

    def _to_host(self, target: torch.Tensor, source: DeviceTensor, non_blocking: bool) -> None:
        self.machine.forbid_in_capture("a copy to the host")
        memory, device = self.machine.host_memory, source.device.index
        is_converted = source.dtype != target.dtype or source.shape != target.shape or not target.is_contiguous()
        self.machine.launch(device)
        if not non_blocking:
            self.machine.wait("a blocking copy to the host", device)
        elif not memory.is_pinned(target):
            self.machine.wait("a copy to pageable memory of the host", device)
        elif is_converted:
            self.machine.wait("a copy to the host that converts", device)
        else:
            return memory.write(device, target, source.data_on_host)
        target.copy_(source.data_on_host)
        return None


def _record(capture: Capture, compute: Callable[[], Any], result: Any, read: list[Any]) -> None:
    """Record an operator. A replay copies its results to where they are now, unless it changes its arguments."""
    places = {_place(item) for item in tree_leaves(read) if isinstance(item, torch.Tensor)}
    results = [item for item in tree_leaves(result) if isinstance(item, torch.Tensor) and _place(item) not in places]
    capture.results += results

    def again() -> None:
        replayed = [item for item in tree_leaves(compute()) if isinstance(item, torch.Tensor)]
        for old, new in zip(results, replayed, strict=False):
            old.copy_(new)

    capture.launches.append(again)


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _leaves(values: Any) -> list[Any]:
    """Return an operator's arguments; those of a list one by one."""
    leaves: list[Any] = []
    for value in values:
        if isinstance(value, list | tuple):
            leaves += value
        else:
            leaves.append(value)
    return leaves


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to an argument or a result, or to each one of a list."""
    return type(value)(map(function, value)) if type(value) in (list, tuple) else function(value)


def _data(leaf: Any) -> Any:
    return leaf.data_on_host if isinstance(leaf, DeviceTensor) else leaf


def _is_ordinary(tensors: list[DeviceTensor]) -> bool:
    return not any(tensor.is_inference() for tensor in tensors)


def _wrap(leaf: Any, device: torch.device) -> Any:
    return DeviceTensor(leaf, device) if isinstance(leaf, torch.Tensor) else leaf


def _indexing_wait(args: Any) -> str | None:
    """Return why indexing waits: a mask is counted first, and a value on the host is copied."""
    masks = [item for item in args[1] if item is not None and item.dtype in (torch.bool, torch.uint8)]
    value = args[2] if len(args) > 2 else None
    if value is not None and not isinstance(value, DeviceTensor):
        accumulates = len(args) > 3 and args[3]
        if len(masks) == len(args[1]) == 1 and not accumulates:
            return None  # becomes masked_fill
        return "indexed assignment of a tensor on the host"
    return "indexing with a boolean mask" if masks else None


@cache
def _is_composite(func: Any) -> bool:
    return func.overloadpacket not in _NOT_DECOMPOSED and bool(
        torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    )

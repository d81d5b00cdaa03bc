"""PartRun: what a running part gets: its device, sizes, the machine's limits, and where to put its results."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.run.part import PartResults, read_results
from benchmarks.gpu.sizes import FULL, TINY, Sizes
from benchmarks.gpu.timing.floors import Limits

if TYPE_CHECKING:
    import torch

__all__ = ["LIMITS", "PartRun"]

LIMITS = "limits"  # the part that measures them


class PartRun:
    """One part as it runs. Torch is imported when the part first asks for its device.

    Args:
        device: as torch names it, or ``auto``.
        size: ``full``, ``tiny`` or ``auto``: full on a GPU.
        work: directory of the run, with the checkpoints and the results of other parts.
        results: where the part records its figures.
    """

    def __init__(self, device: str, size: str, work: Path, results: PartResults) -> None:
        self._device_name, self._size = device, size
        self.work = work
        self.results = results

    @cached_property
    def device(self) -> torch.device:
        """The device; a GPU has an index and is the current one."""
        import torch

        name = self._device_name
        device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
        if device.type == "cuda":
            device = torch.device("cuda", device.index or 0)
            torch.cuda.set_device(device)
        return device

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.type == "cuda"

    @property
    def sizes(self) -> Sizes:
        """Sizes of the models and workloads."""
        return FULL if self._size == "full" or (self._size == "auto" and self.on_gpu) else TINY

    @property
    def limits(self) -> Limits:
        """What an earlier part has measured on this machine.

        Raises:
            RuntimeError: if no such part has passed.
        """
        figures, faults = read_results(self.work / f"{LIMITS}.json")
        if faults:
            raise RuntimeError(f"the part '{LIMITS}' must pass first: {faults[0]}")
        return Limits(figures["copy_gb_s"], figures["bf16_tflop_s"])

    def record(self, name: str, figures: Any) -> None:
        """Set one entry of the part's figures; it is kept even if the process ends now."""
        self.results.record(name, figures)

    def fault(self, reason: str) -> None:
        """Make the part fail."""
        self.results.fault(reason)

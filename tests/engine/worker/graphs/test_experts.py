"""The launches of a mixture of experts depend on shapes alone, so a graph can replay them for other routes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engine.worker.graphs.recorded_graphs import RecordingDevice

KERNELS = {"route_kernel", "group_kernel", "grouped_linear_kernel", "combine_kernel"}


class Kernel:
    """Takes the place of a Triton kernel: notes its launches, and fills the first argument with ones."""

    def __init__(self, name: str, launches: list[Any]) -> None:
        self.name, self.launches = name, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **constants: Any) -> None:
            shapes = [tuple(argument.shape) if isinstance(argument, torch.Tensor) else argument for argument in args]
            self.launches.append((self.name, grid, shapes, constants))
            args[0].fill_(1.0)

        return launch


@pytest.mark.parametrize(("num_tokens", "num_launches"), [(1, 4), (7, 4), (64, 4), (65, 5)])
def test_experts_are_captured_without_a_wait(
    num_tokens: int, num_launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = pytest.importorskip("kernels.experts.triton.experts")
    routing = pytest.importorskip("kernels.experts.triton.routing")
    launches: list[Any] = []
    for name in KERNELS:
        monkeypatch.setattr(experts if hasattr(experts, name) else routing, name, Kernel(name, launches))
    generator = torch.Generator().manual_seed(0)
    hidden, router = torch.randn(num_tokens, 32, generator=generator), torch.randn(8, 32, generator=generator)
    gate_up, down = torch.zeros(8, 48, 32), torch.zeros(8, 32, 24)
    output = torch.zeros_like(hidden)

    def run() -> None:
        hidden.normal_(generator=generator)
        output.copy_(experts.experts_triton(hidden, hidden @ router.T, gate_up, down, 2, normalize=True))

    with torch.inference_mode():
        replay = RecordingDevice().capture(run)  # runs it twice, the second time while it captures
        assert len(launches) == 2 * num_launches
        assert launches[:num_launches] == launches[num_launches:]
        output.zero_()
        replay()
    torch.testing.assert_close(output, torch.ones_like(output))
    assert {name for name, *_ in launches} == KERNELS - ({"route_kernel"} if num_launches == 4 else set())

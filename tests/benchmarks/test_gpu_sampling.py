"""The check of sampling on a GPU accepts the reference's tokens and logits, and finds one that is wrong."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu.parts.kernels import linear_speed, sampling
from benchmarks.gpu.sizes import TINY
from benchmarks.gpu.timing import floors
from kernels.sampling import reference

CHANGES = ("add_biases", "forbid_tokens", "penalise_repetition", "penalise_counts", "apply_bitmask")


class _ReferenceOps:
    """The reference in the kernels' place; ``wrong`` names a method whose first token, or logit, is another one."""

    def __init__(self, wrong: str | None) -> None:
        self._wrong = wrong

    def __getattr__(self, name: str) -> Any:
        def change(logits: torch.Tensor, *arguments: torch.Tensor) -> None:
            getattr(reference, name)(logits, *arguments)
            logits[0, 0] += self._wrong == name

        def choose(tokens: torch.Tensor, logits: torch.Tensor, indices: torch.Tensor | None, *arguments: Any) -> None:
            tokens.copy_(getattr(reference, name)(logits, *arguments))
            tokens[0] += self._wrong == name

        return change if name in CHANGES else choose


@pytest.mark.parametrize(
    ("wrong", "num_faults"),
    [(None, 0), ("argmax", 2), ("draw", 2), ("truncated_draw", 10), *((name, 1) for name in CHANGES)],
)
def test_a_wrong_token_is_found(wrong: str | None, num_faults: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "select_sampling_ops", lambda device_type: _ReferenceOps(wrong))
    monkeypatch.setattr(sampling, "BATCHES", (2,))
    faults: list[str] = []
    figures: dict[str, Any] = {}
    part = SimpleNamespace(
        device=torch.device("cpu"),
        sizes=TINY,
        limits=floors.Limits(copy_gb_s=1.0, bf16_tflop_s=1.0),
        record=figures.__setitem__,
        fault=faults.append,
    )
    sampling.run(part)  # type: ignore[arg-type]
    assert len(faults) == num_faults
    assert figures.keys() == {f"{kind}, batch 2" for kind in (*CHANGES, *sampling.KINDS)} | {"summary"}


def test_logits_are_permutations_of_one_another() -> None:
    logits = sampling._logits(torch.device("cpu"), 3, 50, 1.5)
    assert torch.equal(logits.sort(dim=1).values, logits[:1].sort(dim=1).values.expand(3, 50))
    assert not torch.equal(logits[0], logits[1])
    assert torch.equal(sampling._logits(torch.device("cpu"), 3, 50, 1.5), logits)


@pytest.mark.parametrize("module", [linear_speed, sampling])
def test_parts_of_triton_kernels_pass_without_a_gpu(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else `make bench` would end at its first command."""
    figures: dict[str, Any] = {}
    part = SimpleNamespace(device=torch.device("cpu"), on_gpu=False, sizes=TINY, record=figures.__setitem__)
    module.run(part)
    assert "on this device" in figures["summary"][0]

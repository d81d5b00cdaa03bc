"""The rehearsal finds what it is for: each planted fault is reported with the line where it stands."""

from __future__ import annotations

import re

import pytest
import torch

from engine.sampling_params import SamplingParams
from tests.gpu_rehearsal.kernel_contracts import ContractError
from tests.gpu_rehearsal.machine import RehearsalError
from tests.gpu_rehearsal.planting import plant
from tests.gpu_rehearsal.rehearsal import Rehearsal

FORWARD, EMBEDDED = "engine.models.decoder.decoder:Decoder.forward", "self.embed_tokens(token_ids)"


def run(gpu: Rehearsal, **options: object) -> None:
    """Load the model, make a prefill and two decodes, and check them."""
    llm = gpu.start(**options)
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    llm.generate([{"prompt_token_ids": [20, 30, 40]}], params, use_tqdm=False)
    gpu.machine.check()


@pytest.mark.parametrize(
    "fault",
    [
        "hidden = hidden + torch.ones(hidden.shape)",
        "hidden = hidden[torch.arange(len(hidden))]",
        "hidden = torch.cat([hidden, torch.ones(1, hidden.shape[1], device='cuda:1')])",
        "hidden.add_(torch.ones(hidden.shape))",
    ],
)
def test_a_mix_of_devices(fault: str, gpu: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    line = plant(monkeypatch, FORWARD, EMBEDDED, fault)
    with pytest.raises(RuntimeError, match="same device(.|\n)* at " + re.escape(line)):
        run(gpu)


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ("hidden = hidden @ hidden.half().T", "same dtype"),
        ("hidden = hidden @ hidden.new_ones(7, 7)", "shapes cannot be multiplied"),
        ("hidden = hidden + hidden.new_ones(hidden.shape[1] + 1)", "must match the size"),
        ("hidden = hidden.index_select(0, positions.half())", "index"),
        ("hidden = hidden[positions + 1000]", "out of bounds"),
        ("hidden = (token_ids[:, None] @ token_ids[None]).float() @ hidden", "addmm_cuda"),
    ],
)
def test_a_wrong_dtype_or_shape(fault: str, problem: str, gpu: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    line = plant(monkeypatch, FORWARD, EMBEDDED, fault)
    with pytest.raises((RuntimeError, IndexError), match=f"{problem}(.|\n)* at " + re.escape(line)):
        run(gpu)


@pytest.mark.parametrize(
    ("name", "expression", "problem"),
    [
        ("slot_mapping", "slot_mapping.int()", "slot_mapping is torch.int32"),
        ("slot_mapping", "slot_mapping + 10**6", "slot_mapping leaves"),
        ("slot_mapping", "slot_mapping[1:]", "slot_mapping has shape"),
        ("seq_lens", "seq_lens.long()", "seq_lens is torch.int64"),
        ("cu_seqlens_q", "cu_seqlens_q[:-1]", "cu_seqlens_q has shape"),
        ("block_tables", "block_tables + 10**6", "block_tables names a block"),
        ("seq_lens", "seq_lens + 1000", "has a block table for"),
    ],
)
def test_a_wrong_batch(
    name: str, expression: str, problem: str, gpu: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels would read or write wrong memory."""
    fault = f"object.__setattr__(context.metadata, {name!r}, context.metadata.{expression})"
    plant(monkeypatch, FORWARD, EMBEDDED, fault)
    with pytest.raises(ContractError, match=f"{problem}(.|\n)* at kernels/"):
        run(gpu)


def test_a_cpu_tensor_for_a_kernel(gpu: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = "object.__setattr__(context.metadata, 'slot_mapping', torch.zeros(len(token_ids), dtype=torch.int64))"
    plant(monkeypatch, FORWARD, EMBEDDED, fault)
    with pytest.raises(ValueError, match="slot_mapping of rotate_and_store_kernel cannot be accessed from Triton"):
        run(gpu)


def test_uninitialized_memory(gpu: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds NaN, which reaches the answer."""
    plant(monkeypatch, FORWARD, EMBEDDED, "hidden = hidden + torch.empty_like(hidden)")
    llm = gpu.start(enforce_eager=True)
    params = SamplingParams(temperature=0.0, max_tokens=3)
    (output,) = llm.generate([{"prompt_token_ids": [20, 30, 40]}], params, use_tqdm=False)
    assert output.outputs[0].finish_reason == "abort"


def test_pinned_memory_that_is_reused_too_early(gpu: Rehearsal) -> None:
    with gpu.machine.step():
        pinned = torch.zeros(4, pin_memory=True)
        on_device = pinned.to("cuda", non_blocking=True)
        pinned += 1
        torch.cuda.synchronize()
    assert on_device.tolist() == [0, 0, 0, 0]
    with pytest.raises(RehearsalError, match="overwritten before the GPU had read it; .*test_planted_faults.py"):
        gpu.machine.check()


def test_a_copy_to_the_host_arrives_with_the_wait(gpu: Rehearsal) -> None:
    values = torch.arange(3, device="cuda")
    pinned = torch.zeros(3, dtype=torch.int64, pin_memory=True)
    early, late = torch.cuda.Event(), torch.cuda.Event()
    early.record()
    pinned.copy_(values, non_blocking=True)
    late.record()
    early.synchronize()
    assert pinned.tolist() != [0, 1, 2]
    late.synchronize()
    assert pinned.tolist() == [0, 1, 2]
    assert values.to("cpu", non_blocking=True).tolist() != [0, 1, 2]

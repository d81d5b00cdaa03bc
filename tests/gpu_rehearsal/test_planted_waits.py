"""Each planted wait for the GPU is reported with the line where it stands."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from engine.llm import LLM
from engine.sampling_params import SamplingParams
from tests.gpu_rehearsal.machine import RehearsalError
from tests.gpu_rehearsal.planting import plant
from tests.gpu_rehearsal.rehearsal import Rehearsal, simulated

FORWARD, EMBEDDED = "engine.models.decoder.decoder:Decoder.forward", "self.embed_tokens(token_ids)"

WAITS = {
    "item": "hidden.sum().item()",
    "float": "float(hidden[0, 0])",
    "bool": "bool((hidden > 0).any())",
    "if": "assert hidden.isfinite().all()",
    "tolist": "token_ids.tolist()",
    "iterate": "list(map(int, token_ids))",
    "nonzero": "token_ids.nonzero()",
    "where": "torch.where(token_ids > 5)",
    "masked_select": "hidden.masked_select(hidden > 0)",
    "equal": "torch.equal(token_ids, positions)",
    "allclose": "torch.allclose(hidden, hidden)",
    "unique": "token_ids.unique()",
    "mask": "hidden[token_ids > 5]",
    "mask assignment": "hidden[token_ids > 5] = hidden[:1].clone()",
    "number assignment": "hidden[positions - positions, positions] = 0.0",
    "repeat_interleave": "token_ids.repeat_interleave(positions)",
    "one_hot": "torch.nn.functional.one_hot(token_ids)",
    "cpu": "hidden.cpu()",
    "to cpu": "hidden.to('cpu')",
    "copy to pageable": "torch.empty(hidden.shape).copy_(hidden, non_blocking=True)",
    "blocking copy to pinned": "torch.empty(hidden.shape, pin_memory=True).copy_(hidden)",
    "blocking copy from pinned": "torch.zeros(3).pin_memory().to(hidden.device)",
    "pageable": "torch.zeros(3).to(hidden.device, non_blocking=True)",
    "converted": "torch.zeros(3).pin_memory().to(hidden.device, torch.int64, non_blocking=True)",
    "tensor": "torch.tensor([1, 2], device=hidden.device)",
    "as_tensor": "torch.as_tensor([1, 2], device=hidden.device)",
    "new_tensor": "hidden.new_tensor([1, 2])",
    "cuda": "torch.zeros(3).cuda()",
}


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Rehearsal, LLM]]:
    """One engine for all tests: a wait does not harm it. A graph would not run the planted line."""
    with pytest.MonkeyPatch.context() as monkeypatch, simulated(monkeypatch) as gpu:
        yield gpu, gpu.start(enforce_eager=True)


def run(served: tuple[Rehearsal, LLM]) -> None:
    """Make a prefill and two decodes, and check them."""
    gpu, llm = served
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    llm.generate([{"prompt_token_ids": [20, 30, 40]}], params, use_tqdm=False)
    gpu.machine.check()


def test_without_a_fault(served: tuple[Rehearsal, LLM]) -> None:
    run(served)


@pytest.mark.parametrize("name", WAITS)
def test_a_wait(name: str, served: tuple[Rehearsal, LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    line = plant(monkeypatch, FORWARD, EMBEDDED, WAITS[name])
    with pytest.raises(RehearsalError, match="the host waits for the GPU in .* at " + re.escape(line)):
        run(served)


@pytest.mark.parametrize("call", ["torch.cuda.synchronize()", "torch.cuda.current_stream().synchronize()"])
def test_a_second_wait_on_purpose(call: str, served: tuple[Rehearsal, LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    line = plant(monkeypatch, FORWARD, EMBEDDED, call)
    with pytest.raises(RehearsalError, match="the host waits 2 times .* at " + re.escape(line)):
        run(served)

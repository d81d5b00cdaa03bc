"""Pending token ids, by torch and by Triton, against a loop over the tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kernels.cache.pending_tokens import take_pending_tokens

Take = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], None]
GUARD = 7  # tokens after those of the step, which must not change


@pytest.fixture(params=["torch", "triton"])
def take(request: pytest.FixtureRequest) -> Take:
    if request.param == "torch":
        return take_pending_tokens
    request.getfixturevalue("kernel_device")
    from kernels.cache.triton.pending_tokens import take_pending_tokens_triton

    return take_pending_tokens_triton


def _check(take: Take, token_ids: list[int], sampled: list[int]) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    count = len(token_ids)
    expected = [max(sampled[~token_id], 0) if token_id < 0 else token_id for token_id in token_ids]
    slots = [100 + index for index in range(count + GUARD)]
    for has_states in (False, True):
        tokens = torch.tensor([*token_ids, *[-1] * GUARD], device=device)
        state_slots = torch.tensor(slots, dtype=torch.int32, device=device)
        sampled_on_device = torch.tensor(sampled, dtype=torch.int64, device=device)
        take(tokens[:count], sampled_on_device, state_slots[:count] if has_states else None)
        assert tokens.tolist() == [*expected, *[-1] * GUARD]
        without_token = [has_states and token_id < 0 and sampled[~token_id] < 0 for token_id in token_ids]
        kept = [-1 if without else slot for without, slot in zip(without_token, slots, strict=False)]
        assert state_slots.tolist() == kept + slots[count:]


@pytest.mark.parametrize(
    ("token_ids", "sampled"),
    [
        ([5, 6, 7], [1]),
        ([~0], [2**40]),
        ([~0, ~1, ~2], [8, 9, 10]),
        ([~2, 5, ~0, ~0], [8, 9, 10]),
        ([~0, 4, ~1], [-1, -2]),
        ([], [8]),
        ([], []),
    ],
    ids=["none", "one", "all", "some", "no token was sampled", "no decode", "nothing"],
)
def test_pending_tokens_are_taken(take: Take, token_ids: list[int], sampled: list[int]) -> None:
    _check(take, token_ids, sampled)


def test_more_tokens_than_a_program_has(take: Take) -> None:
    ids = torch.randint(-300, 300, (700,), generator=torch.Generator().manual_seed(1)).tolist()
    _check(take, ids, list(range(1000, 1300)))

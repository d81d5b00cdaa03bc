"""The choosers in torch alone, which may leave a token undecided until the vocabulary is sorted."""

from __future__ import annotations

import pytest

from engine.sampling import choosers


@pytest.fixture
def by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose without the C kernels, which leave no token undecided."""
    monkeypatch.setattr(choosers.cpu_sampling, "can_sample", lambda rows: False)

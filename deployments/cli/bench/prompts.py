"""Ids of generated prompts. Imports nothing but the standard library: environments of other servers import it."""

from __future__ import annotations

import random

__all__ = ["VOCABULARY", "random_ids"]

VOCABULARY = (10, 2000)  # range of drawn ids, end excluded: every tokenizer has them, and none is special


def random_ids(rng: random.Random, count: int) -> list[int]:
    """Draw token ids."""
    return rng.choices(range(*VOCABULARY), k=count)

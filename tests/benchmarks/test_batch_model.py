"""The model of a batch beside clients, in which the server's own gate decides."""

from __future__ import annotations

import pytest

from benchmarks.batch_model import COSTS, PROMPT_TOKENS, Model, compare


def test_what_is_alone_takes_the_time_of_its_steps() -> None:
    figures = Model(0, 1.1, think_s=0.01).run(2.0).figures()
    assert figures["client_tokens"] == 0
    # 48 lines: each of 48 tokens, and a prompt. Lines that end together start together.
    line_s = (COSTS.base_s + 0.2e-3 + 48 * COSTS.sequence_s) / 48 + COSTS.prefill_token_s * PROMPT_TOKENS / 48
    assert figures["all_tokens"] == pytest.approx(1 / line_s, rel=0.05)
    alone = Model(16, None, think_s=0.01).run(2.0).figures()
    assert alone["client_tokens"] == alone["all_tokens"] > 0


@pytest.mark.parametrize("think_s", [0.01, 0.3])
def test_the_clients_have_what_the_gate_promises_and_the_batch_the_rest(think_s: float) -> None:
    careful, greedy = (compare(16, slowdown, think_s, seconds=5.0) for slowdown in (1.1, 1.5))
    assert careful["itl_p99"] < 1.2
    assert greedy["itl_p99"] < 1.6
    assert min(careful["client_tokens"], greedy["client_tokens"]) > 0.75
    assert careful["clients_alone"] < careful["all_tokens"] < greedy["all_tokens"]

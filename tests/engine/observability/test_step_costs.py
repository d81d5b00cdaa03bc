"""StepSpeeds: the fitted costs of steps and the prefill rate, for steps whose times are known functions."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.observability.step_costs import StepCosts, StepSpeeds

GPU = StepCosts(0.008, 1 / 20_000, 0.00002, 0.010 / 200_000)
CPU = StepCosts(0.020, 1 / 450, 0.006, 0.000002)


def drive(
    speeds: StepSpeeds,
    seconds_of: Callable[[int, int, int], float],
    total_s: float,
    *,
    noise: float = 0.05,
    seed: int = 0,
) -> list[float]:
    """Record steps of a changing batch for some seconds; return the relative errors of their predictions."""
    rng, now, errors, num_sequences, length = random.Random(seed), 0.0, [], 8, 1_000
    while now < total_s:
        num_sequences = max(1, num_sequences + rng.choice((-1, 0, 0, 1)))
        length = min(8_000, max(100, length + rng.randrange(-200, 201)))
        step = rng.choice((0, 0, 0, 128, 512)), num_sequences, num_sequences * length
        seconds = seconds_of(*step) * rng.uniform(1 - noise, 1 + noise)
        errors.append(speeds.costs.seconds(*step) / seconds - 1)
        speeds.record(*step, seconds)
        now += seconds
    return errors


@pytest.mark.parametrize("costs", [GPU, CPU], ids=["gpu", "cpu"])
def test_steps_are_predicted_within_15_percent(costs: StepCosts) -> None:
    speeds = StepSpeeds()
    drive(speeds, costs.seconds, 30.0)
    errors = sorted(abs(error) for error in drive(speeds, costs.seconds, 30.0, seed=1))
    assert errors[len(errors) // 2] < 0.05
    assert errors[int(0.9 * len(errors))] < 0.15


@pytest.mark.parametrize("factor", [1 / 3, 3.0])
def test_a_change_of_speed_is_followed_within_five_seconds(factor: float) -> None:
    """Stale coefficients would send a throttled replica as much work as before."""
    speeds = StepSpeeds()
    drive(speeds, CPU.seconds, 20.0)
    drive(speeds, lambda *step: factor * CPU.seconds(*step), 5.0, seed=1)
    step = 0, 8, 8_000
    assert speeds.costs.seconds(*step) == pytest.approx(factor * CPU.seconds(*step), rel=0.25)
    assert speeds.prefill_tokens_per_s < 450 / 2 if factor > 1 else speeds.prefill_tokens_per_s > 450 * 1.2


def test_a_pause_is_forgotten() -> None:
    speeds = StepSpeeds()
    drive(speeds, GPU.seconds, 5.0)
    before = speeds.costs.seconds(0, 8, 8_000)
    speeds.record(0, 8, 8_000, 5.0)
    drive(speeds, GPU.seconds, 2.0, seed=1)
    assert speeds.costs.seconds(0, 8, 8_000) == pytest.approx(before, rel=0.15)


def test_nothing_is_known_before_the_first_step_and_empty_steps_do_not_count() -> None:
    speeds = StepSpeeds()
    speeds.record(0, 0, 0, 1.0)
    speeds.record(0, 1, 10, 0.0)  # the clock stood still
    assert (speeds.costs, speeds.prefill_tokens_per_s) == (StepCosts(), 0.0)
    speeds.record(0, 1, 10, 0.02)
    assert speeds.costs.seconds(0, 1, 10) == pytest.approx(0.02)
    assert speeds.costs.prefill_token_s == 0.0


def test_the_prefill_rate_comes_from_steps_that_mostly_prefill() -> None:
    speeds = StepSpeeds()
    for _ in range(1_000):
        speeds.record(9, 1, 10, 0.01)  # 1,000 tokens a second: the step's own cost is nearly all
    assert speeds.prefill_tokens_per_s == 0
    for _ in range(20):
        speeds.record(149, 1, 10, 0.05)
    speeds.record(2_047, 1, 10, 0.2)
    assert speeds.prefill_tokens_per_s > 8_000
    speeds.record(130, 200, 10, 5.0)  # mostly decodes
    assert speeds.prefill_tokens_per_s > 8_000


@settings(max_examples=50)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 10_000), st.integers(0, 1_000), st.integers(0, 10**8), st.floats(1e-7, 1e4, allow_nan=False)
        ),
        max_size=100,
    )
)
def test_the_coefficients_are_never_negative_or_infinite(steps: list[tuple[int, int, int, float]]) -> None:
    speeds = StepSpeeds()
    for step in steps:
        speeds.record(*step)
        values = [getattr(speeds.costs, name) for name in StepCosts.__struct_fields__]
        assert all(0 <= value <= 1e6 for value in values), values


def test_steps_of_weeks_leave_a_report_that_routers_accept() -> None:
    speeds = StepSpeeds()
    for seconds in (9e5, 3.6e6):
        speeds.record(0, 1, 0, seconds)
    assert speeds.costs.base_s == 1e6
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(speeds.costs), type=StepCosts) == speeds.costs

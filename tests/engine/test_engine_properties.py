"""Random requests, aborts and cache resets on small pools: every read is right, and every answer undisturbed."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.sampling_params import SamplingParams
from tests.engine.shadow import check_integrity, make_engine

# Few distinct tokens, so that prompts share prefixes by chance, on top of those that extend an earlier one.
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=40)


class EngineMachine(RuleBasedStateMachine):
    """The engine under random load; the shadow runner checks each step from inside."""

    @initialize(
        block_size=st.sampled_from([1, 2, 4, 8]),
        num_blocks=st.integers(8, 40),
        budget=st.integers(1, 40),
        max_num_seqs=st.integers(1, 8),
        caching=st.booleans(),
    )
    def start(self, block_size: int, num_blocks: int, budget: int, max_num_seqs: int, caching: bool) -> None:
        self.engine, self.runner = make_engine(
            block_size=block_size,
            num_blocks=num_blocks,
            max_num_batched_tokens=budget,
            max_num_seqs=max_num_seqs,
            enable_prefix_caching=caching,
        )
        self.prompts: dict[str, tuple[list[int], str, int]] = {}
        self.answers: dict[str, list[int]] = {}
        self.texts: list[list[int]] = [[0]]
        self.count = 0

    @rule(
        tokens=TOKENS,
        extend=st.booleans(),
        pick=st.integers(0, 10**6),
        salt=st.sampled_from(["", "", "a"]),
        priority=st.integers(-1, 1),
        max_tokens=st.integers(1, 20),
    )
    def add(self, tokens: list[int], extend: bool, pick: int, salt: str, priority: int, max_tokens: int) -> None:
        prompt = (self.texts[pick % len(self.texts)] if extend else []) + tokens
        prompt = prompt[: self.engine.capacity - 1]
        self.count += 1
        request_id = str(self.count)
        self.prompts[request_id] = (prompt, salt, max_tokens)
        self.answers[request_id] = []
        self.engine.add_request(
            request_id, prompt, SamplingParams(max_tokens=max_tokens), priority=priority, cache_salt=salt
        )

    @precondition(lambda self: self.engine.has_unfinished)
    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            for output in self.engine.step():
                self.answers[output.request_id].extend(output.token_ids)
                if output.finish_reason is not None:
                    self._check_answer(output.request_id)
            check_integrity(self.engine)

    @precondition(lambda self: self.prompts)
    @rule(pick=st.integers(0, 10**6))
    def abort(self, pick: int) -> None:
        request_id = sorted(self.prompts)[pick % len(self.prompts)]
        assert self.engine.abort(request_id)
        assert not self.engine.abort(request_id)
        del self.prompts[request_id]

    @rule()
    def reset_prefix_cache(self) -> None:
        self.engine.block_manager.reset_prefix_cache()

    @invariant()
    def integrity(self) -> None:
        if hasattr(self, "engine"):
            check_integrity(self.engine)

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            for _ in range(5000):
                if not self.engine.has_unfinished:
                    break
                self.step(1)
            assert not self.engine.has_unfinished, "the engine makes no progress"
            assert not self.prompts

    def _check_answer(self, request_id: str) -> None:
        prompt, salt, max_tokens = self.prompts.pop(request_id)
        count = min(max_tokens, self.engine.capacity - len(prompt))
        assert self.answers[request_id] == self.runner.answer(prompt, count, salt)
        self.texts.append(prompt + self.answers[request_id])


EngineMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestEngineMachine = EngineMachine.TestCase

"""Tiny models of many families on a simulated GPU: their checkpoints, the CPU's answers, and steps that are checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from engine.llm import LLM
from tests.gpu_rehearsal.rehearsal import Rehearsal
from tests.gpu_rehearsal.scenarios import OPTIONS, PARAMS, Scenario, answers, generate, watch

__all__ = ["EAGER", "GRAPHS", "SCENARIO", "TWO_RANKS", "Models", "check_steps", "start"]

GRAPHS: dict[str, Any] = {"max_num_seqs": 4}  # which captures few
EAGER: dict[str, Any] = {"enforce_eager": True}
TWO_RANKS: dict[str, Any] = {"tensor_parallel_size": 2}
SCENARIO = Scenario([PARAMS[name] for name in ("greedy", "drawn", "logprobs", "three answers")], [30, 1, 60, 17])


class Models:
    """Checkpoints of tiny models, and what the CPU answers to a scenario.

    Args:
        save: saves the model of a name, with changes of its config, under a path, and returns the directory.
    """

    def __init__(self, save: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> None:
        self._save, self._directories = save, tmp_path_factory
        self._paths: dict[str, str] = {}
        self._answers: dict[tuple[str, int], Any] = {}

    def path(self, name: str, **changes: Any) -> str:
        key = f"{name}{changes}"
        if key not in self._paths:
            self._paths[key] = self._save(name, self._directories.mktemp(name), **changes)
        return self._paths[key]

    def expected(self, path: str, scenario: Scenario) -> Any:
        """Return the CPU's answers. Request them before `gpu`: they must not see the simulated GPU."""
        if (path, id(scenario)) not in self._answers:
            llm = LLM(path, **{**OPTIONS, "device": "cpu", "skip_tokenizer_init": True})
            self._answers[path, id(scenario)] = answers(generate(llm, scenario))
        return self._answers[path, id(scenario)]


def start(gpu: Rehearsal, path: str, **options: Any) -> LLM:
    return gpu.start(path, **{"skip_tokenizer_init": True, "max_num_batched_tokens": 48, **options})


def check_steps(gpu: Rehearsal, path: str, expected: Any, options: dict[str, Any]) -> None:
    """Answer a scenario twice, the second time with a part of each prompt from the cache."""
    llm = start(gpu, path, **options)
    seen = watch(llm.engine, gpu.machine)
    assert answers(generate(llm, SCENARIO)) == expected
    outputs = generate(llm, SCENARIO)
    assert answers(outputs) == expected
    assert any(output.num_cached_tokens for output in outputs)
    assert {"mixed", "decode"} <= set(seen.steps)
    assert set(seen.waits) == {1}
    assert bool(gpu.machine.num_replays) == (options == GRAPHS)
    gpu.machine.check()  # no step has waited otherwise, or compiled a kernel

"""AsyncEngine around an engine on a GPU: concurrent streams, one of which is aborted, give an LLM's tokens."""

from __future__ import annotations

import asyncio

from engine.async_engine import AsyncEngine
from engine.config import EngineConfig
from engine.engine import Engine
from engine.llm import LLM
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from tests.engine.async_streams import collect, stream
from tests.gpu_rehearsal.scenarios import DEMO_MODEL, OPTIONS


def test_streams_while_others_are_aborted() -> None:
    options = {**OPTIONS, "device": "cuda", "max_num_seqs": 8}
    prompts = [[10 + i, 30, 40 + i] * (1 + i) for i in range(20)]
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    outputs = LLM(DEMO_MODEL, **options).generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
    )

    async def run() -> list[list[int]]:
        engine = AsyncEngine(Engine.from_config(EngineConfig.from_options(DEMO_MODEL, options)))

        async def abandoned(number: int) -> None:
            answer = stream(engine, EngineRequest(f"abandoned {number}", prompts[number], params))
            await anext(answer)
            await answer.aclose()

        kept = [collect(stream(engine, EngineRequest(str(i), prompt, params))) for i, prompt in enumerate(prompts)]
        answers = await asyncio.gather(*kept, *(abandoned(number) for number in range(6)))
        await engine.shutdown()
        return answers[: len(prompts)]  # type: ignore[return-value]

    assert asyncio.run(run()) == [output.outputs[0].token_ids for output in outputs]

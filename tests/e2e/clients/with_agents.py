"""openai-agents: usage is `python with_agents.py BASE_URL chat|responses`."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Literal

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)

cities: list[str] = []


@function_tool
def get_weather(city: Literal["Oslo", "Lima"]) -> str:
    """The weather in a city."""
    cities.append(city)
    return f"It rains in {city}."


async def main(base_url: str, api: str) -> None:
    set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=base_url, api_key=os.environ["OPENAI_API_KEY"], max_retries=0)
    kind = OpenAIChatCompletionsModel if api == "chat" else OpenAIResponsesModel
    model = kind(model="pagoda-demo", openai_client=client)
    plain = Agent(name="plain", model=model, model_settings=ModelSettings(temperature=0))
    # The choice is for the first turn: the library resets it then.
    forced = ModelSettings(temperature=0, tool_choice="required", parallel_tool_calls=False)
    calling = Agent(name="weather", model=model, model_settings=forced, tools=[get_weather])
    question = "What is a KV cache?"
    stream = Runner.run_streamed(plain, question)
    streamed = ""
    async for event in stream.stream_events():
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
            streamed += event.data.delta
    answer = (await Runner.run(plain, question)).final_output
    loop = await Runner.run(calling, "What is the weather in Oslo?")
    print(json.dumps({"answer": answer, "streamed": streamed, "cities": cities, "final": loop.final_output}))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:3]))

"""llama-index-llms-openai-like: usage is `python with_llama_index.py BASE_URL`."""

import asyncio
import json
import os
import sys
from typing import Literal

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

cities: list[str] = []


def get_weather(city: Literal["Oslo", "Lima"]) -> str:
    """The weather in a city."""
    cities.append(city)
    return f"It rains in {city}."


async def main(base_url: str) -> None:
    chat = OpenAILike(
        api_base=base_url,
        api_key=os.environ["OPENAI_API_KEY"],
        model="pagoda-demo",
        temperature=0,
        max_retries=0,
        context_window=2048,
        is_chat_model=True,
        is_function_calling_model=True,
    )
    question = [ChatMessage(role="user", content="What is a KV cache?")]
    answer = (await chat.achat(question)).message.content
    streamed = "".join([chunk.delta or "" async for chunk in await chat.astream_chat(question)])
    # It forces the first call only.
    agent = FunctionAgent(tools=[get_weather], llm=chat, initial_tool_choice="get_weather")
    loop = await agent.run("What is the weather in Oslo?")
    printed = {"answer": answer, "streamed": streamed, "cities": cities, "final": loop.response.content}
    print(json.dumps(printed))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))

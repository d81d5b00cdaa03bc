"""langchain-openai: usage is `python with_langchain.py BASE_URL`."""

from __future__ import annotations

import json
import os
import sys
from typing import Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def get_weather(city: Literal["Oslo", "Lima"]) -> str:
    """The weather in a city."""
    return f"It rains in {city}."


def main(base_url: str) -> None:
    chat = ChatOpenAI(
        base_url=base_url, api_key=os.environ["OPENAI_API_KEY"], model="pagoda-demo", temperature=0, max_retries=0
    )
    question = HumanMessage("What is a KV cache?")
    asked = HumanMessage("What is the weather in Oslo?")
    calling = chat.bind_tools([get_weather], tool_choice="required", parallel_tool_calls=False).invoke([asked])
    results = [get_weather.invoke(call) for call in calling.tool_calls]
    assert all(isinstance(result, ToolMessage) for result in results)
    printed = {
        "answer": chat.invoke([question]).content,
        "streamed": "".join(str(chunk.content) for chunk in chat.stream([question])),
        "cities": [call["args"]["city"] for call in calling.tool_calls],
        "final": chat.bind_tools([get_weather], tool_choice="none").invoke([asked, calling, *results]).content,
    }
    print(json.dumps(printed))


if __name__ == "__main__":
    main(sys.argv[1])

"""litellm: usage is `python with_litellm.py BASE_URL`."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it downloads a table of prices when it is imported

import litellm

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Oslo", "Lima"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def main(base_url: str) -> None:
    options: dict[str, Any] = {
        "model": "openai/pagoda-demo",
        "api_base": base_url,
        "api_key": os.environ["OPENAI_API_KEY"],
        "num_retries": 0,
        "temperature": 0,
    }
    question = [{"role": "user", "content": "What is a KV cache?"}]
    chunks = litellm.completion(**options, messages=question, stream=True)
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]
    forced = {"tool_choice": "required", "parallel_tool_calls": False}
    called = litellm.completion(**options, messages=messages, tools=[WEATHER], **forced)
    messages.append(called.choices[0].message)
    cities = [json.loads(call.function.arguments)["city"] for call in called.choices[0].message.tool_calls]
    messages += [
        {"role": "tool", "tool_call_id": call.id, "content": f"It rains in {city}."}
        for call, city in zip(called.choices[0].message.tool_calls, cities, strict=True)
    ]
    replied = litellm.completion(**options, messages=messages, tools=[WEATHER], tool_choice="none")
    printed = {
        "answer": litellm.completion(**options, messages=question).choices[0].message.content,
        "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in chunks),
        "cities": cities,
        "final": replied.choices[0].message.content,
    }
    print(json.dumps(printed))


if __name__ == "__main__":
    main(sys.argv[1])

"""instructor: usage is `python with_instructor.py BASE_URL tools|json_schema`."""

from __future__ import annotations

import json
import os
import sys
from typing import Literal

import instructor
import openai
from pydantic import BaseModel, ConfigDict

MODES = {"tools": instructor.Mode.TOOLS, "json_schema": instructor.Mode.JSON_SCHEMA}


class Weather(BaseModel):
    """The weather in a city."""

    model_config = ConfigDict(extra="forbid")  # the demo model would add members without end
    city: Literal["Oslo", "Lima"]
    rains: bool


def main(base_url: str, mode: str) -> None:
    client = openai.OpenAI(base_url=base_url, api_key=os.environ["OPENAI_API_KEY"], max_retries=0)
    choice = instructor.from_openai(client, mode=MODES[mode]).chat.completions.create(
        model="pagoda-demo",
        response_model=Weather,
        max_retries=0,
        temperature=0,
        messages=[{"role": "user", "content": "What is the weather in Oslo?"}],
    )
    print(json.dumps({"cities": [choice.city]}))


if __name__ == "__main__":
    main(*sys.argv[1:3])

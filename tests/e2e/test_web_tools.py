"""The page's tools in headless Chromium: calls of a scripted model and of the demo model, which the browser runs."""

from __future__ import annotations

import json
from typing import Any

from tests.e2e.browser import Opener, ask, browser, open_page

from playwright.sync_api import Page, Route, expect  # isort: skip  # after the check that it is there

__all__ = ["browser", "open_page"]  # fixtures


def test_calls_are_run_and_their_results_sent_back(open_page: Opener) -> None:
    page = open_page()
    page.get_by_label("Tools").check()
    calls = [("calculator", '{"expression": "17 * 23"}'), ("cluster_status", "{}")]
    replies = [stream_of(called(name, arguments)) for name, arguments in calls]
    bodies = play(page, [*replies, stream_of({"content": "That is 391."}), stream_of({"content": "No tools."})])
    answer = ask(page, "What is 17 times 23, and how many engines are there?")
    assert answer.locator(".text").inner_text() == "That is 391."
    product, status = (call.locator("code").all_inner_texts() for call in answer.locator(".call").all())
    assert product == [calls[0][1], '{"result": 391}']
    assert json.loads(status[1])["engines"] == 2
    assert {tool["function"]["name"] for tool in bodies[0]["tools"]} == {"calculator", "cluster_status"}
    sent = bodies[2]["messages"][1:]
    assert [message["role"] for message in sent] == ["user", "assistant", "tool", "assistant", "tool"]
    assert [sent[2]["content"], sent[4]["content"]] == [product[1], status[1]]

    page.get_by_label("Tools").uncheck()
    ask(page, "And now?")
    assert "tools" not in bodies[3]
    assert [message["role"] for message in bodies[3]["messages"][1:]] == [
        *("user", "assistant", "tool", "assistant", "tool", "assistant"),
        "user",
    ]


RESULTS: list[tuple[str, str, dict[str, Any]]] = [
    ("calculator", '{"expression": "1 / 3"}', {"result": 0.3333}),
    ("calculator", '{"expression": "-2 * (3.5 - 4) + .5"}', {"result": 1.5}),
    ("calculator", '{"expression": "2 - 3 - 4"}', {"result": -5}),
    ("calculator", '{"expression": "1 / (2 - 2)"}', {"error": "division by zero"}),
    ("calculator", '{"expression": "2 +"}', {"error": "the expression is incomplete"}),
    ("calculator", '{"expression": "(2 + 3"}', {"error": "a bracket is not closed"}),
    ("calculator", '{"expression": "2 3"}', {"error": "unexpected 3"}),
    ("calculator", '{"expression": "alert(1)"}', {"error": "unexpected a"}),
    ("calculator", '{"expression": 3}', {"error": "expression must be a string"}),
    ("calculator", f'{{"expression": "{"(" * 60}"}}', {"error": "the expression is nested too deeply"}),
    ("toString", "{}", {"error": "there is no tool toString"}),
]


def test_a_tool_result_or_error_is_sent_back(open_page: Opener) -> None:
    page = open_page()
    for name, arguments, result in RESULTS:
        half = len(arguments) // 2
        function = {"name": name, "arguments": ""}
        deltas: list[Any] = [
            {"content": "Let me see."},
            {"tool_calls": [{"index": 0, "id": "call_1", "type": "function", "function": function}]},
            {"tool_calls": [{"index": 0, "function": {"arguments": arguments[:half]}}]},
            {"tool_calls": [{"index": 0, "function": {"arguments": arguments[half:]}}]},
        ]
        bodies = play(page, [stream_of(*deltas), stream_of({"content": "<i>Done</i>"})])
        answer = ask(page, "Do it")
        call, returned = bodies[1]["messages"][-2:]
        assert call["content"] == answer.locator(".said").inner_text() == "Let me see."
        assert call["tool_calls"] == [
            {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}
        ]
        assert (returned["role"], returned["tool_call_id"]) == ("tool", "call_1")
        assert json.loads(returned["content"]) == result, arguments
        assert answer.locator(".text").inner_text() == "<i>Done</i>"
        page.unroute("**/v1/chat/completions")


def test_a_model_that_only_calls_tools_is_stopped(open_page: Opener) -> None:
    page = open_page()
    play(page, [stream_of(called("cluster_status", "{}"))] * 4)
    answer = ask(page, "Do it", state="failed")
    assert answer.locator(".call").count() == 4
    assert answer.get_by_role("alert").inner_text() == "the model called tools 4 times without an answer."


def test_the_demo_model_calls_the_calculator_and_reads_the_cluster(open_page: Opener) -> None:
    page = open_page()
    page.get_by_text("System prompt and parameters").click()
    page.get_by_label("Temperature").fill("0")
    page.get_by_role("button", name="What is 12 * 34?").click()
    answer = page.locator(".assistant").first
    expect(answer).to_have_attribute("data-state", "done")
    assert page.get_by_label("Tools").is_checked()
    assert answer.locator(".call code").all_inner_texts() == ['{"expression": "12 * 34"}', '{"result": 408}']
    assert answer.locator(".text").inner_text() == "12 * 34 = 408."

    answer = ask(page, "What is the status of the cluster?")
    [figures] = [json.loads(text) for text in answer.locator(".call code").all_inner_texts()[1:]]
    assert figures["engines"] == 2
    assert answer.locator(".text").inner_text().startswith("Engines: 2, running:")


def play(page: Page, replies: list[str]) -> list[Any]:
    """Answer the page's chat requests with these bodies; return the requests' bodies as they come."""
    bodies: list[Any] = []

    def reply(route: Route) -> None:
        bodies.append(route.request.post_data_json)
        route.fulfill(body=replies[len(bodies) - 1], content_type="text/event-stream")

    page.route("**/v1/chat/completions", reply)
    return bodies


def called(name: str, arguments: str) -> dict[str, Any]:
    """The delta of a whole call."""
    call = {"index": 0, "id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"tool_calls": [call]}


def stream_of(*deltas: Any) -> str:
    """The body of a streamed answer."""
    events = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"

"""The web page in headless Chromium, against the real server."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest

from tests.e2e.browser import LAPTOP, Opener, ask, axe_api, browser, fact, numbers, open_page, reload
from tests.e2e.losses import stopped_engines
from tests.e2e.server import Server, by_replica
from tests.waiting import HANG_S, until

from playwright.sync_api import Browser, Error, Page, Route, expect  # isort: skip  # after the check that it is there

__all__ = ["browser", "open_page"]  # fixtures

BLOCK_SIZE = 16  # the default on a CPU
LONGEST = 1800  # tokens of an answer: with its prompt, nearly the context
PHONE = {"width": 375, "height": 812}
LONG = "Prefix caching keeps the KV blocks of earlier prompts, so that a new one need not compute them. " * 4


def change_requests(page: Page, **fields: Any) -> None:
    """Add fields to the page's chat requests."""

    def change(route: Route) -> None:
        route.continue_(post_data=json.dumps(route.request.post_data_json | fields))

    page.route("**/v1/chat/completions", change)


# --- the playground ---------------------------------------------------------------------------------------------------


def test_the_second_question_of_a_chat_hits_the_cache(open_page: Opener) -> None:
    page = open_page()
    first = ask(page, "What is a KV cache?")
    second = ask(page, "Can you give an example?")
    _, before = numbers(fact(first, "cached"))
    cached, asked = numbers(fact(second, "cached"))
    assert before > 8 * BLOCK_SIZE  # the system prompt alone fills blocks
    assert cached >= before // BLOCK_SIZE * BLOCK_SIZE
    assert cached / asked > 0.75
    badges = [answer.locator("[data-fact=replica] .replica").get_attribute("title") for answer in (first, second)]
    assert badges[0] == badges[1]
    for answer in (first, second):
        words = answer.locator(".text").inner_text().split()
        assert len(words) > 8  # a real answer, which the demo model gives with this system prompt
    expect(page.locator("#routed tr").first.locator("td").nth(2)).to_have_text("hit")


# Gives the page one event of a stream in a frame: a browser that is late would read several at once.
ONE_EVENT_A_FRAME = """() => {
    const fetched = window.fetch;
    window.fetch = async (...request) => {
        const response = await fetched(...request);
        if (!response.headers.get("content-type")?.includes("event-stream")) return response;
        const decoder = new TextDecoder(), encoder = new TextEncoder();
        const slowly = new TransformStream({
            async transform(chunk, controller) {
                for (const event of decoder.decode(chunk, {stream: true}).split(/(?<=\\n\\n)/)) {
                    controller.enqueue(encoder.encode(event));
                    await new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)));
                }
            },
        });
        return new Response(response.body.pipeThrough(slowly), response);
    };
}"""


def test_a_chat_streams_and_shows_its_statistics(open_page: Opener) -> None:
    page = open_page()
    page.evaluate(ONE_EVENT_A_FRAME)
    page.evaluate("""() => {
        window.lengths = new Set();
        const look = () => lengths.add(document.querySelector(".assistant .text")?.textContent.length ?? 0);
        new MutationObserver(look).observe(document.getElementById("log"),
            {subtree: true, childList: true, characterData: true});
    }""")
    with page.expect_response("**/v1/chat/completions") as sent:
        first = ask(page, "What is a KV cache?")
    assert len(page.evaluate("[...lengths].filter((length) => length > 0)")) >= 2
    text = first.locator(".text").inner_text()
    assert re.search(r"[A-Za-z]{3,} [A-Za-z]{2,}", text)

    replica = sent.value.headers["x-pagoda-replica"]
    assert first.locator("[data-fact=replica] .replica").get_attribute("title") == replica
    value, unit = fact(first, "ttft").split()
    assert float(value) > 0
    assert unit in ("ms", "s")
    assert numbers(fact(first, "rate"))[0] > 0
    answered = numbers(fact(first, "tokens"))[0]
    assert len(text.split()) * 0.5 < answered < 500

    second = ask(page, "And how does it help?")
    _, before = numbers(fact(first, "cached"))
    cached, asked = numbers(fact(second, "cached"))
    assert asked > before + answered  # the conversation so far was sent
    assert BLOCK_SIZE <= cached < asked
    roles = [message["role"] for message in sent.value.request.post_data_json["messages"]]
    assert roles == ["system", "user"]


def test_the_form_sets_the_parameters(open_page: Opener) -> None:
    page = open_page()
    page.get_by_text("System prompt and parameters").click()
    for label, value in (
        ("System prompt", "Be brief."),
        ("Temperature", "0.5"),
        ("Top p", "0.9"),
        ("Top k", "40"),
        ("Max tokens", "5"),
        ("Frequency penalty", "0.1"),
        ("Seed", "7"),
        ("Stop strings", "never\nagain"),
    ):
        page.get_by_label(label).fill(value)
    with page.expect_request("**/v1/chat/completions") as sent:
        answer = ask(page, "What is a block table?")
    body = sent.value.post_data_json
    assert body.pop("messages") == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is a block table?"},
    ]
    assert body == {
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "max_tokens": 5,
        "frequency_penalty": 0.1,
        "seed": 7,
        "stop": ["never", "again"],
    }
    assert fact(answer, "tokens") == "5 tokens, cut at the limit"

    page.get_by_label("Temperature").fill("3")
    page.get_by_text("System prompt and parameters").click()  # closed: the page has to open it again
    page.get_by_label("Prompt", exact=True).fill("Is this sent?")
    page.keyboard.press("Enter")
    expect(page.locator("#parameters")).to_have_attribute("open", "")
    assert page.locator(".assistant").count() == 1
    assert page.get_by_label("Prompt", exact=True).input_value() == "Is this sent?"


def test_the_page_works_with_the_keyboard_alone(open_page: Opener, server: Server) -> None:
    page = open_page()
    change_requests(page, ignore_eos=True, max_tokens=LONGEST)
    for _ in range(9):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.id") == "prompt":
            break
    else:
        pytest.fail("Tab does not lead to the prompt")
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    page.may_fail = True  # a request that is cut off counts as failed
    answer = page.locator(".assistant")
    text = answer.locator(".text", has_text=re.compile(r"\w"))
    with stopped_engines(server) as go_on:  # or the answer might end by itself
        page.keyboard.press("Enter")
        until(lambda: go_on() or text.is_visible(), "the answer begins")
        assert page.locator(".user").inner_text() == "one\ntwo"
        expect(page.get_by_role("button", name="Stop")).to_be_visible()
        page.keyboard.press("Escape")
        expect(answer).to_have_attribute("data-state", "stopped")
    assert fact(answer, "tokens").endswith("tokens, stopped")
    assert numbers(fact(answer, "tokens"))[0] < LONGEST
    expect(page.locator("#running")).to_have_text("0")  # the server has stopped too
    assert page.evaluate("document.activeElement.id") == "prompt"
    page.get_by_role("button", name="New chat").click()
    assert page.locator(".message").count() == 0
    expect(page.get_by_text("Ask something, then ask again")).to_be_visible()


def test_markup_stays_text(open_page: Opener) -> None:
    page = open_page()
    attack = "<img src=x onerror=alert(1)><b>bold</b>"
    events = [{"choices": [{"index": 0, "delta": {"content": attack}, "finish_reason": "stop"}]}]
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body, content_type="text/event-stream"))
    answer = ask(page, attack)
    assert page.locator(".user").inner_text() == answer.locator(".text").inner_text() == attack
    assert page.locator("#log :is(img, b)").count() == 0


def test_errors_are_shown_and_the_conversation_continues(open_page: Opener) -> None:
    page = open_page()
    page.may_fail = True  # browsers log error responses
    error = {"error": {"message": "the queue is full", "type": "overloaded_error", "param": None, "code": "overloaded"}}
    whole: dict[str, Any] = {"status": 503, "json": error, "headers": {"Retry-After": "5"}}
    begun = {"choices": [{"index": 0, "delta": {"content": "Half an"}, "finish_reason": None}]}
    cut = {"body": f"data: {json.dumps(begun)}\n\ndata: {json.dumps(error)}\n\n", "content_type": "text/event-stream"}
    for reply, text, shown in (
        (whole, "", "503: the queue is full. Try again in 5 s."),
        (cut, "Half an", "the queue is full."),
    ):
        page.route("**/v1/chat/completions", lambda route, _, reply=reply: route.fulfill(**reply))
        answer = ask(page, "Hello?", state="failed")
        assert answer.get_by_role("alert").inner_text() == shown
        assert answer.locator(".text").inner_text() == text
        page.unroute("**/v1/chat/completions")
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "Are you there?")
    contents = [message["content"] for message in sent.value.post_data_json["messages"] if message["role"] != "system"]
    assert contents == ["Hello?", "Half an", "Are you there?"]  # without the unanswered question


# --- the live view ----------------------------------------------------------------------------------------------------


def test_the_heat_map_agrees_with_the_metrics(open_page: Opener, server: Server) -> None:
    page = open_page()
    picture = "() => [...document.querySelectorAll('canvas')].map((canvas) => canvas.toDataURL())"
    before = page.evaluate(picture)
    assert len(before) == 2
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": [300] * 1000, "max_tokens": 1}, timeout=HANG_S)
    replica = answer.headers["x-pagoda-replica"]
    until(lambda: page.evaluate(picture) != before, "a picture of the load changes")

    tile = page.locator(f"[data-replica='{replica}']")

    def shown() -> list[float]:
        return numbers(tile.locator("canvas").get_attribute("aria-label") or "")

    def measured() -> list[float]:
        samples = server.metrics_of_all()
        cached, free = (by_replica(samples, "pagoda_kv_blocks", state=state)[replica] for state in ("cached", "free"))
        return [0, 0, cached, free]

    # Other requests of these tests may not have ended yet.
    until(lambda: shown() == measured(), "the page shows what the metrics say", details=lambda: (shown(), measured()))
    used, shared, cached, free = shown()
    assert cached >= 1000 // 16
    blocks = numbers(tile.locator(".hint").inner_text())[0]
    assert used + shared + cached + free == blocks


def test_each_request_is_listed_with_the_reason(open_page: Opener, server: Server) -> None:
    page = open_page()
    rows = page.locator("#routed tr")
    body = {"messages": [{"role": "user", "content": LONG}], "max_tokens": 2, "cache_salt": "of this test"}
    for row in (rows.nth(0), rows.nth(1)):  # of the first request, when it is the last and the last but one
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=HANG_S)
        replica, num_tokens = answer.headers["x-pagoda-replica"], answer.json()["usage"]["prompt_tokens"]
        expect(row.locator(".asked")).to_have_text(f"{num_tokens:,}")
    second, first = (rows.nth(index).locator("td").all_inner_texts() for index in (0, 1))
    assert (first[2], second[2]) == ("cold", "hit")
    assert rows.nth(0).locator(".replica").get_attribute("title") == replica
    # Of the answer that has ended: when its first token was expected, if rates were known by then, and when it came.
    expect(rows.nth(0).locator("td").last).to_have_attribute("title", re.compile("; first token .*came after"))
    prompt, expected, best = (numbers(second[index])[0] for index in (3, 4, 5))
    assert 0 < prompt - expected <= 16
    assert best == expected
    assert numbers(first[4])[0] == 0
    assert page.locator("#hit-chart .line").count() >= 1
    assert page.locator("#rate-chart svg").get_attribute("aria-label").startswith("Output tokens")  # type: ignore[union-attr]


def test_transfers_are_drawn_while_they_happen_and_listed_for_a_minute(open_page: Opener) -> None:
    page = open_page()
    expect(page.locator("[data-replica]")).to_have_count(2)
    phases = ["none"]  # the server may have moved KV in earlier tests

    def change(route: Route) -> None:
        answer = route.fetch()
        state = answer.json()
        names = [replica["name"] for replica in state["replicas"]]
        ends = {"source": names[0], "target": names[1]}
        running = {"time": state["time"] - 9, "seconds": 9.0, "tokens": 512, "bytes": 3 * 2**20, "is_running": True}
        ended = {"time": state["time"] - 30, "seconds": 0.25, "tokens": 64, "bytes": 4096, "is_running": False}
        gone = {"source": "tcp://gone:1", "target": names[1]}
        state["transfers"] = {"none": [], "two": [running | ends, ended | gone], "one": [ended | ends]}[phases[-1]]
        route.fulfill(response=answer, json=state)

    page.route("**/live", change)
    expect(page.locator("#transfers")).to_be_hidden()
    phases.append("two")
    arrows, rows = page.locator("path.arrow"), page.locator("#transferred tr")
    expect(arrows).to_have_count(1)
    boxes = [page.locator("[data-replica] canvas").nth(index).bounding_box() for index in (0, 1)]
    origin = page.locator("#tiles").bounding_box()
    assert origin is not None
    ends = re.findall(r"([\d.]+),([\d.]+)", arrows.get_attribute("d") or "")[:2]
    for box, (x, y) in zip(boxes, [(float(x), float(y)) for x, y in ends], strict=True):
        assert box is not None
        assert abs(origin["x"] + x - box["x"] - box["width"] / 2) <= 2
        assert abs(origin["y"] + y - box["y"] - box["height"] / 2) <= 2
    assert rows.nth(0).locator("td").all_inner_texts()[3:] == ["512", "3.0 MiB", "9.00 s so far"]
    assert rows.nth(1).locator("td").all_inner_texts()[3:] == ["64", "4.0 KiB", "250 ms"]
    phases.append("one")
    expect(arrows).to_have_count(0)
    expect(rows).to_have_count(1)
    page.unroute_all(behavior="wait")  # an answer that is changed while the page closes would fail the next test
    assert _serious_problems(page) == []


def test_a_hidden_page_does_not_poll(open_page: Opener) -> None:
    """Another page polls meanwhile, so that a second and more passes."""
    page, other = open_page(), open_page()
    page.evaluate("Object.defineProperty(document, 'hidden', {get: () => true, configurable: true})")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    for _ in range(2):
        other.wait_for_event("requestfinished", lambda request: request.url.endswith("/live"))
    assert asked == []
    with page.expect_request("**/live"):
        page.evaluate("Object.defineProperty(document, 'hidden', {get: () => false})")


# --- how it looks -----------------------------------------------------------------------------------------------------


SIZE_SEEN = pytest.mark.exhaustive("CI has each theme and each size once")


@pytest.mark.parametrize(
    ("theme", "viewport"),
    [
        pytest.param("light", LAPTOP, id="light-laptop"),
        pytest.param("dark", PHONE, id="dark-phone"),
        pytest.param("light", PHONE, id="light-phone", marks=SIZE_SEEN),
        pytest.param("dark", LAPTOP, id="dark-laptop", marks=SIZE_SEEN),
    ],
)
def test_the_page_fits_and_is_accessible(open_page: Opener, theme: str, viewport: dict[str, int]) -> None:
    page = open_page(viewport=viewport, color_scheme=theme)
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(numbers(background)) > 380) == (theme == "light")
    ask(page, "What is a KV cache? " + "x" * 200)
    page.get_by_text("System prompt and parameters").click()
    page.get_by_text("What the reasons mean").click()
    expect(page.locator("#routed tr").first).to_be_visible()
    width = page.evaluate("document.documentElement.scrollWidth")
    assert width <= viewport["width"]
    page.evaluate(  # the widest row
        """() => {
            const row = document.querySelector("#routed tr");
            row.querySelector("b").textContent = "balanced";
            row.querySelector(".share .number").textContent = "12,345";
            row.querySelector(".of").textContent = " of 12,345";
        }"""
    )
    region = page.get_by_role("region", name="Routing").last
    assert region.evaluate("element => element.scrollWidth <= element.clientWidth")
    assert _serious_problems(page) == []


def _serious_problems(page: Page) -> list[tuple[str, str]]:
    """Return what hinders people who use the page with other tools than eyes and a mouse."""
    problems = axe_api.Axe().run(page).response["violations"]
    serious = [problem for problem in problems if problem["impact"] in ("serious", "critical")]
    return [(problem["id"], problem["nodes"][0]["html"]) for problem in serious]


def test_a_theme_can_be_chosen_and_is_kept(open_page: Opener) -> None:
    page = open_page(color_scheme="light")
    colour = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(colour)
    page.get_by_role("button", name="System theme").click()
    assert page.evaluate(colour) == light
    page.get_by_role("button", name="Light theme").click()
    dark = page.evaluate(colour)
    assert dark != light
    page.route("**/live", lambda route: None, times=1)
    with page.expect_request("**/live"):  # whose answer is still missing when the page is loaded again
        pass
    reload(page)
    assert page.evaluate(colour) == dark
    page.get_by_role("button", name="Dark theme").click()
    assert page.evaluate(colour) == light


# --- with keys --------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_without_a_key_nothing_is_served(public_server: Server) -> None:
    with httpx.Client(base_url=public_server.url, timeout=HANG_S) as plain:
        for path in ("/", "/live", "/metrics", "/v1/models", "/web/app.js"):
            assert plain.get(path).status_code == 401, path
        assert plain.post("/v1/completions", json={"prompt": "a"}).status_code == 401
        assert plain.get("/health").status_code == plain.get("/version").status_code == 200
        assert plain.get("/metrics", headers=public_server.headers).status_code == 200
        answer = plain.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers=public_server.headers)
        assert answer.status_code == 200
    assert public_server.key not in public_server.log.read_text()


@pytest.mark.long
def test_a_browser_asks_for_the_key(browser: Browser, public_server: Server) -> None:
    with browser.new_context() as context, pytest.raises(Error, match="ERR_INVALID_AUTH_CREDENTIALS"):
        context.new_page().goto(public_server.url)  # it would ask its user, but is headless


@pytest.mark.long
def test_a_browser_with_a_wrong_key_is_refused(browser: Browser, public_server: Server) -> None:
    with browser.new_context(http_credentials={"username": "me", "password": "an-unknown-key"}) as context:
        answer = context.new_page().goto(public_server.url)
        assert answer is not None
        assert answer.status == 401
        assert answer.header_value("www-authenticate") == 'Basic realm="Pagoda", charset="UTF-8"'
        assert answer.json()["error"]["code"] == "invalid_api_key"


@pytest.mark.long
def test_with_the_key_the_page_works(browser: Browser, public_server: Server) -> None:
    problems: list[str] = []
    with browser.new_context(http_credentials={"username": "me", "password": public_server.key}) as context:
        page = context.new_page()
        page.goto(public_server.url)
        page.on("console", lambda message: message.type == "error" and problems.append(message.text))
        expect(page.locator("#status")).to_have_text("2 replicas")
        answer = ask(page, "What is a KV cache?")
        assert re.search(r"[A-Za-z]{3,}", answer.locator(".text").inner_text())
        assert problems == []

"""A headless browser with the web page of the real server: fixtures and helpers of the page's tests."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.e2e.server import Server
from tests.waiting import HANG_S

MISSING = "playwright or axe is not installed: pip install -e '.[test]'"
playwright_api = pytest.importorskip("playwright.sync_api", reason=MISSING)
axe_api = pytest.importorskip("axe_playwright_python.sync_playwright", reason=MISSING)

from playwright.sync_api import Browser, Page, expect  # noqa: E402

from demo.screenshots import CHROMIUM, FLAGS  # noqa: E402

if not CHROMIUM.exists():
    pytest.skip(f"there is no {CHROMIUM}: apt-get install chromium", allow_module_level=True)

__all__ = ["LAPTOP", "Opener", "ask", "axe_api", "browser", "fact", "numbers", "open_page", "reload"]

LAPTOP = {"width": 1440, "height": 900}
HANG_MS = 1000 * HANG_S
expect.set_options(timeout=HANG_MS)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with playwright_api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=str(CHROMIUM), args=FLAGS)
        yield launched
        launched.close()


Opener = Callable[..., Page]


@pytest.fixture
def open_page(browser: Browser, server: Server) -> Iterator[Opener]:
    """Open pages; at the end check that no request failed (unless ``page.may_fail``) or went to another server."""
    contexts, problems = [], []

    def note(page: Page, text: str) -> None:
        if not getattr(page, "may_fail", False):
            problems.append(text)

    def make(**options: Any) -> Page:
        context = browser.new_context(**({"viewport": LAPTOP} | options))
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(HANG_MS)
        page.on("console", lambda message: message.type == "error" and note(page, message.text))
        page.on("pageerror", lambda error: note(page, str(error)))
        page.on("requestfailed", lambda request: note(page, f"{request.url}: {request.failure}"))
        page.on("request", lambda request: request.url.startswith(server.url) or problems.append(request.url))
        page.goto(server.url)
        expect(page.locator("#status")).to_have_text("2 replicas")
        return page

    yield make
    for context in contexts:
        for page in context.pages:
            page.may_fail = True  # requests that closing interrupts
        context.close()
    assert problems == []


def reload(page: Page) -> None:
    """Load the page again; a poll that this interrupts counts as failed, which is not a problem."""
    page.may_fail = True
    page.reload()
    page.may_fail = False


def ask(page: Page, question: str, state: str = "done") -> Any:
    """Send a question; return the answer's element once the answer is complete."""
    number = page.locator(".assistant").count()
    page.get_by_label("Prompt", exact=True).fill(question)
    page.keyboard.press("Enter")
    answer = page.locator(".assistant").nth(number)
    expect(answer).to_have_attribute("data-state", state)
    return answer


def fact(answer: Any, name: str) -> str:
    return str(answer.locator(f"[data-fact={name}] dd").inner_text())


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"[\d.]+", text.replace(",", ""))]
